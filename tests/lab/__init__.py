"""Three servers and a switch on one machine, made of Linux namespaces: see docs/lab.md.

`Lab` builds it and breaks it; `why_not` says in one line why this machine cannot; `python -m tests.lab` does both by hand. Nothing of
Phalanx is imported here: the lab is what Phalanx is tried on.
"""
