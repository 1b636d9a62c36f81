"""Uses by `phalanx.Executor`: each program runs twice, once with a kill in the middle, and both results must be equal."""

from __future__ import annotations

from tests.examples.use import Use, UseCluster, UseFailed

_WORKER = "phalanx.executor.broker"  # forks the workers, which keep its command line


def monte_carlo(cluster: UseCluster) -> str:
    """A worker dies in the middle; the prices are the same to the last digit, and near the exact one."""
    found = cluster.same_after_a_kill(
        "price.py", kill_after=": 24 of 96", kill=lambda job: cluster.kill_process(job, _WORKER)
    )
    off = (found["geometric"] - found["geometric_exact"]) / found["geometric_error"]
    if abs(off) > 4.0:
        raise UseFailed(f"the geometric price is {off:.1f} standard errors from the exact one")
    if not 0.0 < found["controlled_error"] < found["arithmetic_error"] / 10:
        raise UseFailed(f"the control variate does not help: {found}")
    return (
        f"price {found['controlled']:.4f} +- {found['controlled_error']:.4f}, geometric {off:+.1f} errors from exact; "
        "a worker killed: same to the last digit"
    )


def analytics(cluster: UseCluster) -> str:
    """A node dies in the middle; the report is the same, and its totals are those of all rows."""
    days, rows = 60, 50_000
    found = cluster.same_after_a_kill(
        "report.py",
        "--data",
        str(cluster.shell.work / "days"),
        "--make",
        str(days),
        "--rows",
        str(rows),
        kill_after=f": 15 of {days}",
        kill=lambda _: cluster.kill_node("n1"),
    )
    for table in ("regions", "days"):
        requests = sum(row["requests"] for row in found[table])
        if requests != days * rows:
            raise UseFailed(f"{table} count {requests} requests of {days * rows}")
    worst = max(found["days"], key=lambda row: row["failures"])
    if worst["day"] != "2026-08-10":
        raise UseFailed(f"the bad day is 2026-08-10, the report says {worst}")
    return f"{days} files, {days * rows:,} rows, bad day {worst['day']} found; a node killed: same report"


def rl_rollouts(cluster: UseCluster) -> str:
    """A worker dies in the third generation; the training is the same, and the policy has learned."""
    found = cluster.same_after_a_kill(
        "train.py", kill_after="generation 2, 10 of", kill=lambda job: cluster.kill_process(job, _WORKER)
    )
    before, after = found["history"][0]["mean"], sum(found["test"]) / len(found["test"])
    if after < 475.0:
        raise UseFailed(f"the policy balances for {after:.0f} steps only")
    return f"{before:.0f} steps in generation 0, {after:.0f} in the test; a worker killed: same history and weights"


PROGRAMS = (
    Use(name="monte_carlo", run=monte_carlo),
    Use(name="analytics", run=analytics, packaged=True),
    Use(name="rl_rollouts", run=rl_rollouts, packaged=True),
)
