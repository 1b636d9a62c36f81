"""A job far wider than the machine: 128 ranks on 16 virtual nodes. Real processes, forked from warm parents; some 60 s on two cores."""

import pytest

from benchmarks.cluster import cluster, command_words, wait_until
from benchmarks.wide_job import (
    HANG_S,
    SCRIPT,
    STEPS,
    available_bytes,
    submit_wide,
)
from phalanx.node.processes.proctable import read_table

VIRTUAL = "16x8"
NEEDED_BYTES = 12 * 2**30
"""8.5 GiB were seen (docs/benchmarks.md); the rest is for whatever else runs."""

pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.prove,
    pytest.mark.torch,
    pytest.mark.timeout(HANG_S),
    pytest.mark.skipif(available_bytes() < NEEDED_BYTES, reason="128 ranks with torch take 12 GiB of memory"),
]


def ranks() -> dict[int, int]:
    """Processes that show the script as their command, as warm ranks do too, and the parent of each."""
    return {pid: row.parent for pid, row in read_table().items() if SCRIPT in command_words(pid)}


def test_a_job_of_128_ranks_passes_an_all_reduce_and_leaves_no_process():
    with cluster(VIRTUAL) as head:
        job = submit_wide(head, VIRTUAL)
        wait_until(lambda: len(ranks()) == 128 or head.job(job)["state"] == "failed", "all ranks run", limit_s=HANG_S)
        keepers = set(ranks().values())
        assert len(keepers) == 16, "one on each node"
        assert all(any("zygote_main" in word for word in command_words(pid)) for pid in keepers), (
            "all forked, none cold"
        )
        wait_until(lambda: head.job(job)["state"] in {"succeeded", "failed"}, "it is over", limit_s=HANG_S)
        view = head.job(job)
        assert (view["state"], view["attempts"], view["restarts"]) == ("succeeded", 1, 0), head.history(job)
        said = head.call("GET", f"/v1/jobs/{job}/logs?rank=0")["chunks"]
        assert f"step {STEPS} loss" in "".join(chunk["text"] for chunk in said)
        wait_until(lambda: not ranks(), "no rank is left")
