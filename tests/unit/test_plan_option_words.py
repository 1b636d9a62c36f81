"""The options of a plan are the same on the command line, in the API, in the form and in job files."""

import pytest

from phalanx.cli.plan.command import plan
from phalanx.cli.plan.plan_option import PLAN_KEYS
from phalanx.core.errors import BadRequest
from phalanx.plans.option_words import PLAN_DEFAULTS, TRAINING_DEFAULTS, TRAINING_ONLY, flag_of, refuse_options
from phalanx.web.plan_page import PLAN_FIELDS
from phalanx.wire.api.plan import PlanBody


def test_the_command_has_each_option_with_its_default():
    flags = {option.name: option.opts for option in plan.params}
    assert all(f"--{flag_of(name)}" in flags[name] for name in (*PLAN_DEFAULTS, *TRAINING_ONLY))
    read = plan.make_context("plan", ["llama-3-8b"]).params
    assert {name: read[name] for name in PLAN_DEFAULTS} == PLAN_DEFAULTS


def test_the_api_has_each_option_but_those_of_files_and_formulas():
    fields = dict(zip(PlanBody.__struct_fields__[1:], PlanBody.__struct_defaults__, strict=True))
    assert PlanBody.__struct_fields__[0] == "model"
    assert fields == {name: value for name, value in PLAN_DEFAULTS.items() if name not in {"prices", "explain"}}


def test_form_and_job_file_have_options_of_the_api():
    assert set(PLAN_FIELDS) < set(PlanBody.__struct_fields__)
    assert ("model", *TRAINING_DEFAULTS) == PLAN_KEYS


def test_options_at_their_default_are_not_refused():
    refuse_options(dict(PLAN_DEFAULTS), TRAINING_ONLY, "serve", "none")
    with pytest.raises(BadRequest, match="--offload and --serve exclude each other"):
        refuse_options({**PLAN_DEFAULTS, "offload": "optimizer"}, TRAINING_ONLY, "serve", "none")
