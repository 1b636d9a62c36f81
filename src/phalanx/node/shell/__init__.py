"""The supervisor's hands: processes, cgroups, probes, spools and HTTP."""
