"""Plans as the command computes them, without its output."""

from phalanx.cli.plan.answer import plan_answer
from phalanx.cli.plan.job_plan import _DEFAULTS


def planned(model, gpus, **options):
    """The answer of `phalanx plan` with these options."""
    return plan_answer({**_DEFAULTS, "fleet": None, "model": model, "gpus": gpus, "top": 5, **options})
