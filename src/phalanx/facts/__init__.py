"""Facts as data: what GPUs, links, instances and models are, and what they cost. Each row of a table has its source and its date.

The tables (`tables/*.csv`) are for people to read and edit; the modules here read them strictly and give the records that the planner
works with (`core.performance`). A user's own tables override shipped rows by name. Nothing here computes a plan, and nothing elsewhere
keeps such a number as a constant.
"""
