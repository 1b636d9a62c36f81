"""Plan a job whose `plan:` is a mapping: search on the head's fleet at submit, and send the best layout."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from phalanx.core.errors import BadRequest, NeverFits
from phalanx.core.work.job_file.plan_key import layout_text
from phalanx.plans.option_words import PLAN_DEFAULTS
from phalanx.plans.records import PlanAnswer

if TYPE_CHECKING:
    from phalanx.cli.jobs.request.job_request import JobRequest
    from phalanx.cli.plan.plan_option import PlanRequest
    from phalanx.client import Client
    from phalanx.core.work.gpus import GpuRequest


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
    mapping = {**wanted.mapping, "plan": text}
    speeds = _speeds_by_model(head, wanted.plan_request, gpus, text)
    if len(speeds) > 1:
        rates = ", ".join(f"{model} {1.0 / speed / gpus.total:.3g} s" for model, speed in speeds.items())
        print(f"with this layout a step takes: {rates}", file=sys.stderr)
        mapping["planned_speeds"] = speeds
    return wanted._replace(mapping=mapping, plan_request=None)


def _speeds_by_model(head: Client, request: PlanRequest, gpus: GpuRequest, layout: str) -> dict[str, float]:
    """Return the steps per second and GPU of this layout on each model that the job names; models that cannot hold it are left out."""
    words = {_word(model, memory): one for one in gpus.choices for model, memory in one.kinds if model is not None}
    found: dict[str, float] = {}
    for word, one in words.items() if len(words) > 1 else ():
        shape = f"{one.nodes}x{word}:{one.per_node}" if one.nodes is not None else f"{word}:{one.total}"
        try:
            answer = _planned(head, replace(request, options={**request.options, "layout": layout}), shape)
        except (BadRequest, NeverFits):
            continue
        found[word] = 1.0 / answer.layouts[0].step_s.mid / one.total
    return found


def _word(model: str, memory_gib: int | None) -> str:
    return model if memory_gib is None else f"{model}-{memory_gib}gb"


def _planned(head: Client, request: PlanRequest, gpus: str) -> PlanAnswer:
    from phalanx.cli.plan.answer import plan_answer

    if not gpus:
        raise BadRequest("plan: the job requests no GPUs", hint="add gpus: 8 to the job, or --gpus 8")
    model = os.path.join(request.folder, request.model)
    options = {
        **PLAN_DEFAULTS,
        **request.options,
        "model": model if os.path.exists(model) else request.model,
        "gpus": gpus,
        "fleet": "here",
        "top": 1,
    }
    answer = plan_answer(options, head=head)
    if not answer.fits:
        raise NeverFits(
            f"plan: {answer.model} does not fit: {answer.reason}",
            hint=answer.alternatives[0] if answer.alternatives else answer.next_command,
        )
    return answer
