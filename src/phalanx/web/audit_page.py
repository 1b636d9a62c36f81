"""The page of the audit trail: who changed what, with a filter by user and object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.web.cells import live, moment
from phalanx.web.document import Viewer, document
from phalanx.web.fields import text_field
from phalanx.web.html import Html, element, link, table
from phalanx.wire.api.audit import AuditLineView


def audit_page(lines: Sequence[AuditLineView], older: int | None, asked: Mapping[str, str], viewer: Viewer) -> Html:
    """Return lines of the audit trail, newest first. `older`: the line before which the next page begins; `asked`: the filter."""
    filters = {key: value for key, value in asked.items() if value}
    form = element(
        "form",
        text_field("User", "user", value=asked.get("user", ""), placeholder="", maxlength="200"),
        text_field(
            "Object", "object", value=asked.get("object", ""), placeholder="job_id=17 or gpu-a", maxlength="200"
        ),
        element("button", "Show", type="submit"),
        method="get",
        action="/audit",
        class_="filter",
        aria_label="Filter",
    )
    rows = [
        (str(line.seq), moment(line.at_s), line.user, line.origin, line.action, line.target, line.detail, line.result)
        for line in lines
    ]
    titles = ("Line", "Time", "User", "From", "Request", "Object", "Detail", "Result")
    empty = "No line matches." if filters else "Nothing has been changed yet."
    if filters and older is not None:
        empty = f"No line matches, back to line {older}."
    shown = table(titles, rows, caption="Audit trail", empty=empty)
    more = element("p", link("Older lines", "audit", **filters, before=str(older))) if older is not None else None
    return document("audit", "Audit trail", form, live(shown, more), viewer=viewer)
