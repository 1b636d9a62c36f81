"""A plugin of submitit: `submitit.AutoExecutor(folder, cluster="phalanx")` runs each function as a job of the cluster.

submitit finds it by the entry points `executor` and `job_environment` of the group `submitit`. Nothing else imports this package.
"""
