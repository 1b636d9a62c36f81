"""The planner's page at 80 and 140 columns, to the letter. After a wanted change: PHALANX_GOLDEN=write pytest tests/golden/cli."""

import pytest

from phalanx.cli.plan.page import plan_page
from phalanx.cli.terminal import display_width
from phalanx.plans.headline import headline
from tests.golden.cli import plans
from tests.golden.cli.test_screens import same_as, screen


@pytest.mark.parametrize("width", [80, 140])
def test_plan_that_fits(width):
    lines = plan_page(plans.fitting(), screen(width), explain=width == 140)
    same_as(f"plan-{width}", lines)
    assert max(map(display_width, lines)) <= width


@pytest.mark.parametrize("width", [80, 140])
def test_plan_that_does_not_fit(width):
    lines = plan_page(plans.refusing(), screen(width))
    same_as(f"plan-refused-{width}", lines)
    assert max(map(display_width, lines)) <= width


@pytest.mark.parametrize("width", [80, 140])
def test_plan_with_its_optimizer_on_the_host(width):
    lines = plan_page(plans.offloaded(), screen(width))
    same_as(f"plan-offload-{width}", lines)
    assert max(map(display_width, lines)) <= width


def test_sentence_says_what_is_known_and_no_more():
    told = plans.fitting()
    assert headline(told).endswith("at $2.69 a GPU-hour (RunPod, on-demand, 2026-11-09)")
    assert headline(plans.refusing()).startswith("does not fit: weights, gradients and Adam states are 1.12 TB")
