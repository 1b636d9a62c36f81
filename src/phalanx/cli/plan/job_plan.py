"""Plan a job whose `plan:` is a mapping: search on the head's fleet at submit, and send the best layout."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from phalanx.cli.plan.records import PlanAnswer
from phalanx.core.errors import BadRequest, NeverFits
from phalanx.core.work.plan_key import layout_text

if TYPE_CHECKING:
    from phalanx.cli.jobs.job_request import JobRequest
    from phalanx.cli.plan.plan_option import PlanRequest
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


def resolve_plan(head: Client, wanted: JobRequest) -> JobRequest:
    """Return the job with its layout; unchanged without a plan request. Prints the best layout on standard error.

    Raises:
        BadRequest: the job requests no GPUs or names an unknown model.
        NeverFits: no layout of that model fits on the requested GPUs.
    """
    if wanted.plan_request is None:
        return wanted
    gpus = wanted.spec.role.gpus
    if len({one.total for one in gpus.choices}) > 1:
        raise BadRequest(
            f"plan: a layout is for one number of GPUs, but gpus is {gpus}",
            hint="write plan: auto, so that the ranks choose it, or give one of the alternatives",
        )
    answer = _planned(head, wanted.plan_request, str(wanted.spec.role.gpus) if wanted.spec.role.gpus.total else "")
    best = answer.layouts[0]
    text = layout_text(best.layout)
    print(f"plan of {answer.model}: {text}, expected {best.step_s.mid:.3g} s per step", file=sys.stderr)
    return replace(wanted, mapping={**wanted.mapping, "plan": text}, plan_request=None)


def _planned(head: Client, request: PlanRequest, gpus: str) -> PlanAnswer:
    from phalanx.cli.plan.answer import plan_answer

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
    answer = plan_answer(options, head=head)
    if not answer.fits:
        raise NeverFits(
            f"plan: {answer.model} does not fit: {answer.reason}",
            hint=answer.alternatives[0] if answer.alternatives else answer.next_command,
        )
    return answer
