"""axe-core of npm, run in a page: what people who use a keyboard, a screen reader or strong contrast cannot use."""

import json
import sys
from pathlib import Path

SCRIPT = Path(sys.prefix, "axe", "axe.min.js")
WORST = ("serious", "critical")


def findings(page):
    """The serious findings of axe-core in the page as it is now: rule and element each."""
    page.run(SCRIPT.read_text() + ";0")
    found = page.run(
        "axe.run(document, {resultTypes: ['violations']}).then((found) => JSON.stringify(found.violations))"
    )
    return [
        f"{one['id']}: {node['html'][:200]}: {node['failureSummary']}"
        for one in json.loads(found)
        if one["impact"] in WORST
        for node in one["nodes"]
    ]
