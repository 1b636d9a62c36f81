"""The live state of the fleet: read once in each tick for all pages, and resumed without loss."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item"

import asyncio
import itertools
import json

import msgspec
import pytest

from phalanx.api.live.fleet_feed import FleetFeed
from phalanx.wire.api.fleet import FleetFrame

FRAME = FleetFrame(
    now_s=0.0,
    nodes=["n0", "n1"],
    places=["", ""],
    states=["up", "up"],
    cells=["FF", "FF"],
    jobs=[[], []],
    counts={"pending": 1},
)


class Fleet:
    """A fleet whose state the test sets; it counts how often it was read."""

    def __init__(self):
        self.frame, self.reads = FRAME, 0
        self.feed = FleetFeed(self.read, heartbeat_s=30.0, tick_s=0.001)

    def read(self):
        self.reads += 1
        return self.frame

    def change(self, **fields):
        self.frame = msgspec.structs.replace(self.frame, **fields)


def parsed(event):
    fields = dict(line.split(": ", 1) for line in event.decode().strip().split("\n"))
    return fields["event"], fields["id"], json.loads(fields["data"])


async def following(fleet, last_id=""):
    source = fleet.feed.follow(last_id)
    return source, parsed(await anext(source))


def run(scenario):
    async def within():
        async with asyncio.timeout(60):
            await scenario(Fleet())

    asyncio.run(within())


def test_page_gets_the_whole_fleet_and_then_what_changed():
    async def scenario(fleet):
        source, (kind, _, frame) = await following(fleet)
        assert (kind, frame["cells"]) == ("frame", ["FF", "FF"])
        fleet.feed.note_changes(["7"])
        fleet.change(cells=["FF", "AF"], jobs=[[], ["7", ""]], counts={"running": 1})
        delta = {}
        while not delta.get("nodes"):
            kind, _, delta = parsed(await anext(source))
        assert (kind, delta["nodes"]) == ("delta", [[1, "up", "AF", ["7", ""]]])
        assert delta["counts"] == {"running": 1}
        await source.aclose()

    run(scenario)


def test_pages_share_one_read_and_the_same_bytes():
    async def scenario(fleet):
        pages = [fleet.feed.follow("") for _ in range(20)]
        first = [await anext(page) for page in pages]
        assert len({id(event) for event in first}) == 1
        fleet.change(cells=["XX", "FF"])
        assert len({id(await anext(page)) for page in pages}) == 1
        for page in pages:
            await page.aclose()

    run(scenario)


def test_page_that_reconnects_gets_what_it_missed_and_nothing_twice():
    async def scenario(fleet):
        keeper, _ = await following(fleet)
        source, (_, last_id, _) = await following(fleet)
        await source.aclose()
        fleet.change(cells=["BF", "FF"])
        _, seen, _ = parsed(await anext(keeper))
        fleet.change(cells=["BB", "FF"])
        await anext(keeper)
        again = fleet.feed.follow(last_id)
        missed = [parsed(await anext(again)) for _ in range(2)]
        assert [(kind, delta["nodes"][0][2]) for kind, _, delta in missed] == [("delta", "BF"), ("delta", "BB")]
        later = fleet.feed.follow(seen)
        assert parsed(await anext(later))[2]["nodes"][0][2] == "BB"
        for one in (keeper, again, later):
            await one.aclose()

    run(scenario)


@pytest.mark.parametrize("last_id", ["", "other-1", "1", "-", "x-99999999999999999999"])
def test_page_with_an_unknown_id_gets_the_whole_fleet(last_id):
    async def scenario(fleet):
        keeper, _ = await following(fleet)
        source, (kind, _, _) = await following(fleet, last_id)
        assert kind == "frame"
        await source.aclose()
        await keeper.aclose()

    run(scenario)


def test_node_that_joins_makes_a_whole_frame_again():
    async def scenario(fleet):
        source, _ = await following(fleet)
        fleet.change(nodes=["n0", "n1", "n2"], places=[""] * 3, states=["up"] * 3, cells=["FF"] * 3, jobs=[[]] * 3)
        kind, _, frame = parsed(await anext(source))
        assert (kind, frame["nodes"]) == ("frame", ["n0", "n1", "n2"])
        await source.aclose()

    run(scenario)


def test_nothing_is_read_while_no_page_is_open():
    async def scenario(fleet):
        source, _ = await following(fleet)
        await source.aclose()
        await fleet.feed._task
        reads = fleet.reads
        fleet.feed.note_changes(["1"])
        source, (kind, _, _) = await following(fleet)
        assert (kind, fleet.reads) == ("frame", reads + 1)
        await source.aclose()

    run(scenario)


def test_head_that_stops_ends_every_stream():
    async def scenario(fleet):
        source, _ = await following(fleet)
        waiting = asyncio.ensure_future(anext(source))
        await asyncio.sleep(0)
        fleet.feed.close()
        with pytest.raises(StopAsyncIteration):
            await waiting

    run(scenario)


def test_a_tick_that_fails_is_tried_again_and_loses_no_change():
    async def scenario(fleet):
        source, _ = await following(fleet)
        fails = itertools.chain([True], itertools.repeat(False))
        read = fleet.read

        def failing():
            if next(fails):
                fleet.feed.note_changes(())
                raise OSError("disk")
            return read()

        fleet.feed._read = failing
        fleet.feed.note_changes(["5"])
        changed = []
        while "5" not in changed:
            _, _, delta = parsed(await anext(source))
            changed += delta["changed"]
        await source.aclose()

    run(scenario)
