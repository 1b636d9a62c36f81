"""The dashboard: its HTML, its scripts and its styles. Pure: it gets records of `wire` and returns text; `api.pages` serves it."""
