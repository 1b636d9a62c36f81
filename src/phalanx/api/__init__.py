"""The HTTP face of the head: authorise, validate, hand to the controller, answer what was committed."""
