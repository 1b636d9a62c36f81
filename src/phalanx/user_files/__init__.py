"""What users write as YAML, parsed into records: for the command line and for the API. Errors name the line."""
