"""What a head takes of its machine's limits."""

import resource

import pytest

from benchmarks.cluster import cluster

pytestmark = [pytest.mark.serial, pytest.mark.e2e]


def test_a_head_has_room_for_more_supervisors_than_the_usual_limit_of_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))  # as a session has it
    try:
        with cluster("1x1") as head:
            assert head.head is not None
            with open(f"/proc/{head.head.pid}/limits", encoding="ascii") as file:
                (line,) = [line for line in file if line.startswith("Max open files")]
            assert line.split()[3:5] == [str(hard), str(hard)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
