"""Prefixes that survive a restart of the gateway: as saved, for the replicas that are the same, and never from a spoilt file."""

import os
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gateway_trace import service_of
from phalanx.gateway.prefixes import PrefixIndex
from phalanx.gateway.saved_prefixes import PrefixFiles, pack_generation, unpack_generation
from phalanx.gateway.services import ServiceTable
from phalanx.wire.api.services import EndpointView


def table_of(folder, count=4, without=()):
    """A gateway's table with a service of this many replicas, and its files."""
    table = ServiceTable(replica_limit=100, waiting_max=1)
    files = PrefixFiles(table, str(folder))
    files.open()
    view = service_of(count).view
    ends = [one for one in view.endpoints if str(one.job_id) not in without]
    table.update([type(view)(**{name: getattr(view, name) for name in view.__struct_fields__} | {"endpoints": ends})])
    return table.services["chat"], files


def killed(files):
    """End a gateway as a kill does: its lock goes, and nothing more is written."""
    os.close(files._lock)
    files._path = ""


async def saved(files):
    await files.save()


PROMPTS = [random.Random(number).randbytes(3000) for number in range(20)]


def fill(service):
    chosen = {}
    for number, prompt in enumerate(PROMPTS):
        replica, tokens = service.choose(prompt, 16)
        chosen[number] = replica.job_id
        service.done(replica, tokens)
    return chosen


def choices(service):
    found = {}
    for number, prompt in enumerate(PROMPTS):
        replica, tokens = service.choose(prompt + b"and then?", 16)
        found[number] = replica.job_id
        service.done(replica, tokens)
    return found


def run(work):
    import asyncio

    return asyncio.run(work)


def test_a_gateway_that_was_killed_routes_as_before(tmp_path):
    service, files = table_of(tmp_path)
    chosen = fill(service)
    run(saved(files))
    killed(files)
    again, _ = table_of(tmp_path)
    assert choices(again) == chosen


def test_it_knows_nothing_of_replicas_that_have_gone_and_all_of_the_others_whatever_their_slots(tmp_path):
    service, files = table_of(tmp_path)
    chosen = fill(service)
    run(saved(files))
    killed(files)
    again, _ = table_of(tmp_path, without={"0", "2"})
    found = choices(again)
    for number, job_id in chosen.items():
        assert found[number] in {"1", "3"}
        if job_id in {"1", "3"}:
            assert found[number] == job_id


def test_a_replica_that_comes_again_has_read_nothing(tmp_path):
    service, files = table_of(tmp_path, 2)
    fill(service)
    run(saved(files))
    killed(files)
    again, more = table_of(tmp_path, 2)
    before = len(again.prefixes)
    view = again.view
    none: list[EndpointView] = []
    for ends in (none, view.endpoints):
        more._table.update(
            [type(view)(**{name: getattr(view, name) for name in view.__struct_fields__} | {"endpoints": ends})]
        )
    assert before > 0
    assert len(again.prefixes) == 0


def test_siblings_write_files_of_their_own_and_read_each_others(tmp_path):
    one, first = table_of(tmp_path)
    two, second = table_of(tmp_path)
    assert first._path != second._path
    half = PROMPTS[:10], PROMPTS[10:]
    chosen = {}
    for service, prompts in zip((one, two), half, strict=True):
        for prompt in prompts:
            replica, tokens = service.choose(prompt, 16)
            chosen[PROMPTS.index(prompt)] = replica.job_id
            service.done(replica, tokens)
    run(saved(first))
    run(saved(second))
    killed(first)
    killed(second)
    again, _ = table_of(tmp_path)
    assert choices(again) == chosen


def test_old_files_do_not_count(tmp_path):
    service, files = table_of(tmp_path)
    fill(service)
    run(saved(files))
    killed(files)
    os.utime(tmp_path / "0", (time.time() - 7200,) * 2)
    again, _ = table_of(tmp_path)
    assert len(again.prefixes) == 0


@pytest.mark.parametrize("how", ["cut", "changed", "empty", "folder", "other"])
def test_a_spoilt_file_is_an_empty_one(tmp_path, how):
    service, files = table_of(tmp_path)
    fill(service)
    run(saved(files))
    killed(files)
    path = tmp_path / "0"
    content = path.read_bytes()
    path.unlink()
    if how == "folder":
        path.mkdir()
    else:
        middle = len(content) // 2
        changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        path.write_bytes({"cut": content[:middle], "changed": changed, "empty": b"", "other": b"x" * 100}[how])
    again, more = table_of(tmp_path)
    assert len(again.prefixes) == 0
    fill(again)
    run(saved(more))


def test_nothing_is_written_where_nothing_may_be(tmp_path):
    (tmp_path / "file").write_text("")
    service, files = table_of(tmp_path / "file" / "folder")
    fill(service)
    run(saved(files))


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.integers(0, 2**64 - 1), st.integers(1, 2**100 - 1), max_size=50),
    st.dictionaries(st.integers(0, 99), st.integers(0, 99), max_size=100),
)
def test_packing_keeps_each_replica_that_stays(known, slots):
    expected = {}
    for one, bits in known.items():
        moved = {slots[slot] for slot in range(100) if bits >> slot & 1 and slot in slots}
        if moved:
            expected[one] = sum(1 << slot for slot in moved)
    assert unpack_generation(pack_generation(known), slots) == expected


def test_parts_that_do_not_fit_are_refused():
    saved_one = pack_generation({1: 1, 2: 2})
    for wrong in (
        type(saved_one)(saved_one.hashes, saved_one.set_numbers[:4], saved_one.sets),
        type(saved_one)(saved_one.hashes[:-1], saved_one.set_numbers, saved_one.sets),
        type(saved_one)(saved_one.hashes, saved_one.set_numbers, saved_one.sets[:1]),
    ):
        with pytest.raises(ValueError):
            unpack_generation(wrong, {0: 0, 1: 1})


def test_merged_indexes_stay_bounded():
    index = PrefixIndex(known_max=50)
    index.add(range(40), 0)
    index.merge([dict.fromkeys(range(100, 200), 2), dict.fromkeys(range(200, 300), 2)])
    assert len(index) == 100
    assert index.matches(list(range(40))) == {0: 40}
