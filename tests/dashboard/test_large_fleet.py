"""The fleet's page with thousands of nodes: it is drawn on several canvases, and each node is where the pointer and the keys find it."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

from dataclasses import replace

import pytest

from phalanx.ports.store import Batch
from phalanx.store.memory import MemoryStore
from tests import chromium_here
from tests.contract.api_head import ApiHead, make_node

pytestmark = [
    pytest.mark.prove,
    pytest.mark.timeout(600),
    pytest.mark.skipif(chromium_here.program() is None, reason="no chromium here: make browser-tools"),
]
NODES, RACK = 3000, 32
AREA = "document.querySelector('[role=application]')"
DRAWN = "performance.getEntriesByName('usable').length"


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    store = MemoryStore()
    nodes = [make_node(f"n{at:04}", devices=8) for at in range(NODES)]
    store.commit(Batch(records=[replace(node, labels={"rack": f"{at // RACK:03}"}) for at, node in enumerate(nodes)]))
    head = ApiHead(str(tmp_path_factory.mktemp("head")), store=store)
    with head.calling() as call, chromium_here.chromium() as page:
        page.send("Emulation.setDeviceMetricsOverride", width=1280, height=800, deviceScaleFactor=1, mobile=False)
        page.open(call.url + call("admin", "POST", "/v1/dashboard/link").json()["path"])
        page.until(DRAWN)
        yield page
    head.close()


def test_every_canvas_is_drawn(large):
    drawn = large.run(
        f"[...{AREA}.children].map((one) => one.getContext('2d').getImageData(0, 0, one.width, one.height).data.some(Boolean))"
    )
    assert len(drawn) > 3
    assert all(drawn)
    assert large.run("document.querySelector('[data-count=nodes]').textContent") == "3,000"


def test_a_click_picks_the_node_under_it_on_every_canvas(large):
    found = set()
    for at in range(large.run(f"{AREA}.children.length")):
        large.run(f"{AREA}.children[{at}].scrollIntoView({{block: 'center'}})")
        x, top, height = large.run(
            f"(() => {{ const box = {AREA}.children[{at}].getBoundingClientRect(); return [box.x, box.y, box.height] }})()"
        )
        name = None
        # A row of a rack is somewhere in these lines, and a node at its left edge.
        for y in range(10, 60, 3):
            if y >= height:
                break
            for kind in ("mousePressed", "mouseReleased"):
                large.send("Input.dispatchMouseEvent", type=kind, x=x + 8, y=top + y, button="left", clickCount=1)
            name = large.run("document.querySelector('.picked h2 a')?.textContent")
            if name:
                break
        assert name, f"no node on canvas {at}"
        found.add(name)
        large.press("Escape")
    assert len(found) == large.run(f"{AREA}.children.length"), "each canvas has other nodes"


def test_keys_go_from_the_first_node_to_the_last(large):
    large.run(f"{AREA}.focus()")
    large.press("ArrowRight")
    large.until("document.querySelector('.picked h2 a')?.textContent === 'n0000'")
    for _ in range(400):
        large.press("ArrowDown")
        if large.run("document.querySelector('.picked h2 a').textContent") >= f"n{NODES - RACK:04}":
            break
    assert large.run("document.querySelector('.picked h2 a').textContent") >= f"n{NODES - RACK:04}"
    assert large.problems == []
