"""The history of devices, nodes and jobs: rollups in compressed chunks, written by a thread of their own. Not truth: no job needs it."""
