"""A job file whose `plan:` is a mapping: planned on the head's own fleet when the job is handed in, and sent as the layout that won."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from phalanx.cli.plan.figures import Told
from phalanx.core.errors import BadRequest, NeverFits
from phalanx.core.work.planned import layout_text

if TYPE_CHECKING:
    from phalanx.cli.jobs.asked import Asked
    from phalanx.cli.plan.given import PlanWish
    from phalanx.client import Client

# Every option of `phalanx plan` that a job file has no word for.
_UNSAID: Final[Mapping[str, Any]] = {
    "seq": None,
    "global_batch": None,
    "tokens": None,
    "method": "full",
    "precision": None,
    "stack": None,
    "instance": None,
    "network": None,
    "price": None,
    "price_date": None,
    "price_kind": None,
    "prices": (),
    "layout": None,
    "top": 1,
    "explain": False,
}


def plan_now(head: Client, wanted: Asked) -> Asked:
    """The job with its layout; as it was where it holds no wish to plan. Says on standard error what won.

    Raises:
        BadRequest: it asks for no GPUs, or names no model that we know.
        NeverFits: no layout of that model fits on what it asks for.
    """
    if wanted.to_plan is None:
        return wanted
    told = _planned(head, wanted.to_plan, str(wanted.spec.role.gpus) if wanted.spec.role.gpus.total else "")
    best = told.layouts[0]
    text = layout_text(best.layout)
    print(f"plan of {told.model}: {text}, {best.step_s.mid:.3g} s a step expected", file=sys.stderr)
    return replace(wanted, mapping={**wanted.mapping, "plan": text}, to_plan=None)


def _planned(head: Client, wish: PlanWish, gpus: str) -> Told:
    from phalanx.cli.plan.told import told_of

    if not gpus:
        raise BadRequest("plan: on how many GPUs?", hint="add gpus: 8 to the job, or --gpus 8")
    model = os.path.join(wish.folder, wish.model)
    given = {
        **_UNSAID,
        **wish.options,
        "model": model if os.path.exists(model) else wish.model,
        "gpus": gpus,
        "fleet": "here",
    }
    told = told_of(given, head=head)
    if not told.fits:
        raise NeverFits(
            f"plan: {told.model} does not fit: {told.reason}", hint=told.smallest[0] if told.smallest else told.next
        )
    return told
