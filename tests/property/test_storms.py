"""The rules of `test_controller_machine` without a search: every kind of fault, densely, always the same for a seed."""

from dataclasses import replace
from random import Random

import pytest

from tests.property.test_controller_machine import (
    AFTER,
    KINDS,
    LASTING,
    MOMENTS,
    NAMES,
    QUEUES,
    QUICK,
    QUOTAS,
    SHAPES,
    TREE,
    Cluster,
)

STORM = (
    "submit",
    "submit",
    "after",
    "array",
    "quota",
    "wait",
    "wait",
    "wait",
    "cancel",
    "requeue",
    "hold",
    "park",
    "cordon",
    "uncordon",
    "uncordon",
    "reserve",
    "unreserve",
    "kill_node",
    "kill_node",
    "pause",
    "cut",
    "slow",
    "lose",
    "kill_head",
    "disk",
    "old",
    "clock",
)


@pytest.mark.parametrize("seed", range(60))
def test_storm(seed):
    storm(seed, QUICK)


# `las` starts nothing between its rounds, so that 14 does not hold for it within a second.
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["fifo", "skip", "backfill", "fair"])
def test_storm_under_another_policy(name, seed):
    storm(seed, replace(QUICK, name=name))


def storm(seed, policy):
    dice = Random(seed)
    cluster = Cluster()
    cluster.policy = policy
    cluster.begin(dice.choice(KINDS), dice.choice(KINDS))
    jobs = []
    for _ in range(60):
        name, for_s, then_s = dice.choice(NAMES), dice.choice(LASTING), dice.choice(MOMENTS)
        if not cluster.head_is_up():
            cluster.wait(then_s)
            continue
        match dice.choice(STORM):
            case "submit":
                kind, limit_s, grace_s = dice.choice(KINDS), dice.choice((None, None, 9.0)), dice.choice((1.0, 30.0))
                jobs.append(
                    cluster.submit(
                        kind,
                        dice.choice(SHAPES),
                        dice.randint(0, 1),
                        dice.randint(0, 2),
                        limit_s,
                        grace_s,
                        dice.choice(QUEUES),
                        then_s,
                    )
                )
            case "after" if jobs:
                jobs.append(
                    cluster.submit_after(
                        dice.choice(jobs), dice.choice(AFTER), dice.choice(KINDS), dice.choice(QUEUES), then_s
                    )
                )
            case "array":
                size, running_max = dice.randint(1, 4), dice.choice((None, 1, 2))
                jobs += cluster.submit_array(dice.choice(KINDS), size, running_max, dice.choice(QUEUES), then_s).values
            case "quota":
                cluster.change_quota(dice.choice(TREE[1:]), dice.choice(QUOTAS), then_s)
            case "cancel" if jobs:
                cluster.cancel(dice.choice(jobs), then_s)
            case "requeue" if jobs:
                cluster.requeue(dice.choice(jobs), then_s)
            case "hold" if jobs:
                cluster.hold(dice.choice(jobs), dice.random() < 0.5)
            case "park" if jobs:
                cluster.park(dice.choice(jobs), dice.random() < 0.5, then_s)
            case "cordon":
                cluster.cordon(name, dice.random() < 0.5, then_s)
            case "uncordon":
                cluster.uncordon(name)
            case "reserve":
                cluster.reserve(name, dice.random() < 0.3, for_s, then_s)
            case "unreserve":
                cluster.unreserve(then_s)
            case "kill_node":
                cluster.kill_node(name, dice.random() < 0.5, for_s, then_s)
            case "pause":
                cluster.pause_node(name, for_s, then_s)
            case "cut":
                cluster.cut_node_off(name, for_s, then_s)
            case "slow":
                cluster.slow_network(name, dice.choice((0.3, 1.5)), for_s)
            case "lose":
                cluster.lose_commands(dice.randint(1, 3), for_s, then_s)
            case "kill_head":
                cluster.kill_head(for_s, then_s)
            case "disk":
                cluster.fill_disk(dice.randint(1, 4), then_s)
            case "old":
                cluster.hear_something_old_again(dice.randint(0, 60), dice.randint(1, 8))
            case "clock":
                cluster.jump_clock(dice.choice((-86400.0, -3.0, 3.0, 86400.0)))
            case _:
                cluster.wait(then_s)
    cluster.teardown()
