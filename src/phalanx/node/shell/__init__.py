"""The effects of the supervisor: processes, cgroups, probes, spools and HTTP."""
