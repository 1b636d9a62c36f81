"""Fact tables: GPUs, links, instances, models and prices as data. Each row has its source and its date.

People read and edit the tables (`tables/*.csv`). The modules validate them strictly and return the records of the planner
(`core.performance`). Tables of a user override shipped rows by name. No other package stores such a number as a constant.
"""
