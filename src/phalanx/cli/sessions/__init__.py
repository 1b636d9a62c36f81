"""The commands that work inside a running job: terminals, editors, SSH and ports."""
