"""Plans as the command computes them, without its output."""

from phalanx.cli.plan.answer import plan_answer
from phalanx.plans.option_words import PLAN_DEFAULTS


def planned(model, gpus, **options):
    """The answer of `phalanx plan` with these options."""
    return plan_answer({**PLAN_DEFAULTS, "model": model, "gpus": gpus, **options})
