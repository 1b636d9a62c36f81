"""What the view of a job says of the GPUs that it holds."""

from dataclasses import replace

import pytest

from phalanx.api.views.job_records import fresh_job_view, job_view
from phalanx.core.work.allocation import Allocation
from phalanx.core.work.gpus import parse_gpus
from phalanx.core.work.share import DeviceShare, GrantedSlice, ShareKind
from tests.contract import records


def shape_of(gpus, share):
    """The shape that a job with these alternatives shows while it holds the part, or one whole device."""
    asked = records.job(1)
    asked = replace(asked, spec=replace(asked.spec, role=replace(asked.spec.role, gpus=parse_gpus(gpus))))
    attempt = records.attempt(1, devices=(0,))
    grant = replace(attempt.allocation.grants[0], share=share)
    assert fresh_job_view(asked, output_root="/out").shape == ""
    return job_view(
        asked,
        attempt=replace(attempt, allocation=Allocation(grants=(grant,))),
        waiting=None,
        progress=None,
        utilization=None,
        show_all=True,
        output_root="/out",
    ).shape


def part(milli, *profiles):
    slices = tuple(
        GrantedSlice(device=0, profile=name, start=at, memory_slices=1, milli=milli // len(profiles))
        for at, name in enumerate(profiles)
    )
    kind = ShareKind.MIG if profiles else ShareKind.MPS
    return DeviceShare(milli=milli, memory_bytes=2**30, kind=kind, group="g", slices=slices)


@pytest.mark.parametrize(
    ("gpus", "share", "shown"),
    [
        ("1/4|1/2", part(500), "1 x 0.5"),
        ("1/4|1/2", part(250), "1 x 0.25"),
        ("1g.10gb|2g.20gb", part(250, "2g.20gb"), "1 x 2g.20gb"),
        ("1g.10gb:2|2g.20gb", part(250, "1g.10gb", "1g.10gb"), "1 x 1g.10gb:2"),
        ("1/4|a100:1", part(250), "1 x 0.25"),
        ("1/4|a100:1", None, "1 x 1"),
    ],
)
def test_of_alternatives_the_one_that_is_held_is_shown(gpus, share, shown):
    assert shape_of(gpus, share) == shown
