"""Take pictures of every page of the dashboard, for people to look at and for the docs.

    python -m tests.dashboard.pictures FOLDER [--large NODES]

They come from the planted head of `planted_head`, in light and dark on a screen 1280 px wide and in light on one of 360 px, as whole pages:
FOLDER/light/fleet.png and so on. `--large 10000` takes those of a fleet with so many nodes instead. With pngquant (Debian has it) the files are a third as large.
"""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import argparse
import base64
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests import chromium_here
from tests.dashboard.large_fleet import large_fleet
from tests.dashboard.planted_head import BROKEN, planted_head

LOOKS = {"light": (1280, "light"), "dark": (1280, "dark"), "narrow": (360, "light")}  # width in px, colour scheme
HEIGHT, HEIGHT_MAX = 800, 2600  # px; what is longer is cut
LARGE_HEIGHT = 1400  # a large fleet is laid out anew when its screen grows
DRAWN = "performance.getEntriesByName('usable').length"
COLOURS = "64"  # of a palette
SETTLED_S = 0.8  # after the last table has come: curves are drawn
LIVE = "document.querySelector('.connection')?.textContent === 'live'"
PLAN = "/plan?model=llama-3-70b&gpus=4xh100:8&tokens=300B"
WHAT_IF = "/what-if?gpus=24&time=2h&queue=research&project=nlp&add_nodes=2"


def main(argv=None):
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--large", type=int, metavar="NODES", help="a fleet of so many nodes, and nothing else")
    parser.add_argument("--only", metavar="PAGE", help="one page, such as what-if")
    given = parser.parse_args(argv)
    if chromium_here.program() is None:
        print("no Chromium here: make browser-tools", file=sys.stderr)
        return 1
    if given.large:
        take_large(given.folder, given.large)
    else:
        take_all(given.folder, given.only)
    size = sum(one.stat().st_size for one in given.folder.rglob("*.png"))
    print(f"{size / 1e6:.2f} MB in {given.folder}")
    return 0


def take_all(folder, only=None):
    """Pictures of every page in every look."""
    with tempfile.TemporaryDirectory() as home, planted_head(home) as planted, chromium_here.chromium() as page:
        if only is None:
            shoot(page, planted.call.url + "/", folder, "sign-in", "true")
        page.open(planted.call.url + planted.call("admin", "POST", "/v1/dashboard/link").json()["path"])
        for name, (path, ready) in pages_of(planted).items():
            if only in (None, name):
                shoot(page, planted.call.url + path, folder, name, f"{LIVE} && {ready}")
        assert page.problems == [], page.problems


def pages_of(planted):
    """Each page's address, and what it shows when it is ready."""
    jobs = planted.jobs
    return {
        "fleet": ("/", "document.querySelector('canvas')"),
        "jobs": ("/jobs", "true"),
        "job": (f"/jobs/{jobs['llama-7b-pretrain']}", "document.querySelector('.curves canvas')"),
        "job-waits": (f"/jobs/{jobs['quick-eval']}", "document.querySelector('.why strong')"),
        "services": ("/services", "true"),
        "service": ("/services/chat", "true"),
        "queues": ("/queues", "true"),
        "nodes": ("/nodes", "true"),
        "node": (f"/nodes/{BROKEN}", "document.querySelector('.curves canvas')"),
        "use": ("/use?days=30", "true"),
        "plan": (PLAN, "document.querySelector('.answer')"),
        "what-if": (WHAT_IF, "document.querySelectorAll('.curves canvas').length === 2"),
        "audit": (f"/audit?object=job_id={jobs['llama-70b-pretrain']}", "true"),
        "settings": ("/settings", "document.body.classList.contains('scripted')"),
    }


def take_large(folder, nodes):
    """A picture of a large fleet."""
    with tempfile.TemporaryDirectory() as home, large_fleet(home, nodes) as call, chromium_here.chromium() as page:
        page.open(call.url + call("admin", "POST", "/v1/dashboard/link").json()["path"])
        shoot(page, f"{call.url}/", folder, f"fleet-{nodes}", DRAWN, LARGE_HEIGHT)


def shoot(page, url, folder, name, ready, height=HEIGHT):
    """A page in every look, each opened anew, on a screen of this height."""
    for look, (width, scheme) in LOOKS.items():
        page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        page.send("Emulation.setDeviceMetricsOverride", **size)
        page.open(url)
        page.until(ready)
        time.sleep(SETTLED_S)  # a picture for people: nothing is asserted of it
        whole = page.send("Page.getLayoutMetrics")["cssContentSize"]
        if whole["width"] > width:
            print(f"{look} {name}: the page is {whole['width']} px wide", file=sys.stderr)
        clip = {
            "x": 0,
            "y": 0,
            "width": width,
            "height": min(whole["height"], HEIGHT_MAX if height == HEIGHT else height),
            "scale": 1,
        }
        path = folder / look / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            base64.b64decode(page.send("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"])
        )
        if shutil.which("pngquant"):
            subprocess.run(
                ["pngquant", "--force", "--ext", ".png", "--strip", "--speed", "1", COLOURS, str(path)], check=True
            )


if __name__ == "__main__":
    sys.exit(main())
