"""Whatever is asked of a plan, the answer is finite, adds up and can be written as JSON, or one line says what is wrong."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import PhalanxError
from phalanx.planner.cost.optimizers import Offload, OptimizerKind
from phalanx.planner.facts.coefficient_table import stacks
from phalanx.plans.answer import compute_plan
from phalanx.plans.method import method_words
from phalanx.plans.option_words import PLAN_DEFAULTS
from phalanx.plans.records import as_json

COUNTS = st.sampled_from((*[None] * 20, "1", "2", "7", "8", "64", "504", "4096", "1000000"))
ASKED = st.fixed_dictionaries(
    {
        "model": st.sampled_from(
            ("llama-3-8b", "gpt2", "mixtral-8x7b", "deepseek-v2-lite", "layers=2,hidden=64,heads=4,vocab=99")
        ),
        "gpus": st.sampled_from(("h100:8", "rtx-4090:1", "2xa100-80gb:4", "t4:4", "2xgb200:4", "cpu:2")),
        "method": st.sampled_from(method_words()),
        "optimizer": st.sampled_from((*[OptimizerKind.ADAMW] * 8, *OptimizerKind)),
        "offload": st.sampled_from((*[Offload.NONE] * 4, *Offload)),
        "stack": st.sampled_from((*[None] * 40, *stacks())),
        "layout": st.sampled_from((*[None] * 20, "fsdp=8", "dp=8", "single", "tp=2,fsdp=4,zero=1", "pp=2,dp=4")),
        **dict.fromkeys(("seq", "global_batch", "prompt_tokens", "answer_tokens", "group", "updates"), COUNTS),
        "cuda_graphs": st.sampled_from((*[None] * 8, "on", "off")),
    }
)


def _answer(asked):
    """Return the answer, or the error. Most draws have the options of rollouts for rollouts only."""
    if not asked["method"].startswith("grpo") and asked["seq"] != "7":
        asked = {**asked, "prompt_tokens": None, "answer_tokens": None, "group": None, "updates": None}
    try:
        return as_json(compute_plan({**PLAN_DEFAULTS, "explain": True, "top": 3, **asked})), ""
    except PhalanxError as error:
        return None, error.message


@given(ASKED)
def test_every_combination_of_options_is_answered_or_refused_in_one_line(asked):
    answer, refused = _answer(asked)
    if answer is None:
        assert refused
        assert "\n" not in refused
        return
    json.dumps(answer, allow_nan=False)
    shown = [*answer["layouts"], *answer["losers"], *(one["without"] for one in answer["effects"])]
    for one in shown:
        assert sum(one["memory"]["items"].values()) == pytest.approx(one["memory"]["total_bytes"])
        assert sum(one["step"]["items"].values()) == pytest.approx(one["step"]["mid_s"])
        assert one["memory"]["low_bytes"] <= one["memory"]["total_bytes"] <= one["memory"]["high_bytes"]
        assert min(one["memory"]["items"].values()) > 0.0
        assert one["memory"]["host_bytes"] >= 0.0
    for one in answer["effects"]:
        best = answer["layouts"][0]
        assert one["saved_bytes"] == pytest.approx(
            one["without"]["memory"]["total_bytes"] - best["memory"]["total_bytes"]
        )
        assert one["added_s"] == pytest.approx(best["step"]["mid_s"] - one["without"]["step"]["mid_s"])
