"""The attempts of a job as a timeline: where each ran, from its placement to its end, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from phalanx.core.units import format_duration
from phalanx.core.work.states import AttemptState
from phalanx.web.cells import moment, state_word
from phalanx.web.charts import ChartPart, key, strip
from phalanx.web.html import Html, element, join, link, table
from phalanx.wire.api.jobs import AttemptView

_LEGEND: Final = {"range": "placed and starting", "own": "running"}
ATTEMPTS_MAX: Final = 50  # newest


def attempts_timeline(attempts: Sequence[AttemptView], now_s: float) -> Html | None:
    """Return the newest attempts, each a bar between the first placement and now or the last end; None without any."""
    shown = attempts[-ATTEMPTS_MAX:]
    if not shown:
        return None
    begin_s = shown[0].placed_s
    whole_s = max(1.0, max(one.ended_s or now_s for one in shown) - begin_s)
    rows = [
        (
            f"{one.epoch}",
            state_word(one.state.value),
            [join(link(node, "nodes", node), " ") for node in dict.fromkeys(grant.node_id for grant in one.grants)],
            moment(one.placed_s),
            _bar(one, begin_s, whole_s, now_s),
            one.why,
        )
        for one in reversed(shown)
    ]
    titles = ("Attempt", "State", "Nodes", "Placed", f"Over {format_duration(whole_s)}", "Why it ended")
    more = len(attempts) - len(shown)
    legend = element("ul", [element("li", key(kind, words)) for kind, words in _LEGEND.items()], class_="legend")
    return join(
        element("h2", "Attempts"),
        table(titles, rows, caption="Attempts, newest first", empty=""),
        legend,
        element("p", f"{more} earlier attempts", class_="note") if more else None,
    )


def _bar(one: AttemptView, begin_s: float, whole_s: float, now_s: float) -> Html:
    end_s = one.ended_s or now_s
    run_s = one.first_running_s or one.running_s
    ran = "" if run_s is None else f", ran {format_duration(max(0.0, end_s - run_s))}"
    words = f"{format_duration(max(0.0, end_s - one.placed_s))}{ran}"
    from_s = end_s if run_s is None else max(run_s, one.placed_s)
    parts = [
        ChartPart(start=one.placed_s - begin_s, size=from_s - one.placed_s, kind="range", tip="placed and starting"),
        ChartPart(start=from_s - begin_s, size=end_s - from_s, kind="own", tip="running"),
    ]
    live = "" if one.state is AttemptState.ENDED else ", not ended"
    return join(
        strip(parts, whole_s, name=f"attempt {one.epoch}: {words}{live}"), element("span", words + live, class_="note")
    )
