"""Python functions on the cluster: `phalanx.Executor`, a `concurrent.futures.Executor` whose workers are the processes of one job.

`broker`, `worker`, `journal` and `frames` run on the nodes and import the standard library only; the others run in the user's program.
"""
