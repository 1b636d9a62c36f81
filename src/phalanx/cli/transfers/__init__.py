"""How commands fetch outputs of jobs, with their progress, also after an interruption."""
