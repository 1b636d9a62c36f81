"""The state of a rank in a checkpoint is that of its step, whatever training changes while a thread writes it."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, var-annotated"

from collections import defaultdict

import pytest
import torch

from phalanx.torch.training_state import collect_rank_state

pytestmark = pytest.mark.torch


class Average:
    """An object whose state is the tensor that it goes on changing."""

    def __init__(self):
        self.weights = torch.zeros(2)

    def state_dict(self):
        return {"weights": self.weights, "seen": [1]}


def collected(stateful, extra):
    return collect_rank_state(stateful, extra, torch.device("cpu"), costs=(None, None), layout="")


def test_what_training_changes_after_the_save_is_not_in_it():
    average, losses, counts = Average(), [1.0], defaultdict(int, {"a": 1})
    rate = torch.ones(1, requires_grad=True)
    made = collected({"average": average}, {"losses": losses, "counts": counts, "deep": ([losses],), "rate": rate})
    losses.append(2.0)
    counts["b"] += 1
    average.weights += 1
    rate.data += 1
    assert made["objects"]["average"]["weights"].tolist() == [0, 0]
    assert made["extra"]["losses"] == [1.0]
    assert made["extra"]["deep"] == ([[1.0]],)
    assert made["extra"]["counts"] == {"a": 1}
    assert type(made["extra"]["counts"]) is defaultdict
    assert (made["extra"]["rate"].tolist(), made["extra"]["rate"].requires_grad) == ([1], True)


def test_what_could_run_code_when_it_is_loaded_is_refused_with_its_place():
    with pytest.raises(TypeError, match=r"extra\['a'\]\[1\] is a .*\.Average"):
        collected({}, {"a": [1, Average()]})
