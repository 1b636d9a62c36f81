"""The fleet's page with thousands of nodes: it is drawn on several canvases, and each node is where the pointer and the keys find it."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import pytest

from tests import chromium_here
from tests.dashboard.large_fleet import RACK, large_fleet

pytestmark = [
    pytest.mark.prove,
    pytest.mark.timeout(600),
    pytest.mark.skipif(chromium_here.program() is None, reason="no chromium here: make browser-tools"),
]
NODES = 3000
AREA = "document.querySelector('[role=application]')"
DRAWN = "performance.getEntriesByName('usable').length"


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    with large_fleet(str(tmp_path_factory.mktemp("head")), NODES) as call, chromium_here.chromium() as page:
        page.send("Emulation.setDeviceMetricsOverride", width=1280, height=800, deviceScaleFactor=1, mobile=False)
        page.open(call.url + call("admin", "POST", "/v1/dashboard/link").json()["path"])
        page.until(DRAWN)
        yield page


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
    large.until("document.querySelector('.picked h2 a')?.textContent === 'gpu00000'")
    for _ in range(400):
        large.press("ArrowDown")
        if large.run("document.querySelector('.picked h2 a').textContent") >= f"gpu{NODES - RACK:05}":
            break
    assert large.run("document.querySelector('.picked h2 a').textContent") >= f"gpu{NODES - RACK:05}"
    assert large.problems == []
