"""Stories told to the steps in virtual time."""
