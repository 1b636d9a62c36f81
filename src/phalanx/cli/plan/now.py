"""Plan a job whose `plan:` is a mapping: search on the head's fleet at submit, and send the best layout."""

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

# Options of `phalanx plan` that a job file cannot set, with their defaults.
_DEFAULTS: Final[Mapping[str, Any]] = {
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
    """Return the job with its layout; unchanged without a plan request. Prints the best layout on standard error.

    Raises:
        BadRequest: the job requests no GPUs or names an unknown model.
        NeverFits: no layout of that model fits on the requested GPUs.
    """
    if wanted.to_plan is None:
        return wanted
    answer = _planned(head, wanted.to_plan, str(wanted.spec.role.gpus) if wanted.spec.role.gpus.total else "")
    best = answer.layouts[0]
    text = layout_text(best.layout)
    print(f"plan of {answer.model}: {text}, expected {best.step_s.mid:.3g} s per step", file=sys.stderr)
    return replace(wanted, mapping={**wanted.mapping, "plan": text}, to_plan=None)


def _planned(head: Client, request: PlanWish, gpus: str) -> Told:
    from phalanx.cli.plan.told import told_of

    if not gpus:
        raise BadRequest("plan: the job requests no GPUs", hint="add gpus: 8 to the job, or --gpus 8")
    model = os.path.join(request.folder, request.model)
    options = {
        **_DEFAULTS,
        **request.options,
        "model": model if os.path.exists(model) else request.model,
        "gpus": gpus,
        "fleet": "here",
    }
    answer = told_of(options, head=head)
    if not answer.fits:
        raise NeverFits(
            f"plan: {answer.model} does not fit: {answer.reason}",
            hint=answer.smallest[0] if answer.smallest else answer.next,
        )
    return answer
