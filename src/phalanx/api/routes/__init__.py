"""The handlers of the API's routes, a file for each noun."""
