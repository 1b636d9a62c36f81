"""Experiment trackers find the names of a job's runs by their own variables; nothing that the user set is replaced, and links repeat no password."""

# mypy: disable-error-code="arg-type"

import json
from dataclasses import replace

import pytest

from phalanx.api.views.tracker_links import tracker_links
from phalanx.core.work.dependency import ArrayPosition
from phalanx.core.work.job_file.trackers import TrackedJob
from phalanx.core.work.spec import Role
from tests.unit.test_environment import BASE, env_of, job

JOB = TrackedJob(id="17", name="train", folder="17-ab12", array_id=None, labels={})


def variables(env):
    return {name: value for name, value in env.items() if name.startswith(("WANDB_", "MLFLOW_"))}


def test_the_first_rank_continues_the_run_of_the_attempt_before():
    first, _ = env_of(job(), node_rank=0, local_rank=0)
    again, _ = env_of(replace(job(), epoch=9, restarts=8), node_rank=0, local_rank=0)
    assert first["WANDB_RUN_ID"] == again["WANDB_RUN_ID"] == "7"
    assert first["WANDB_RESUME"] == "allow"
    assert (first["WANDB_NAME"], first["WANDB_RUN_GROUP"]) == ("j-7", "j-7")
    tags = {"mlflow.runName": "j-7", "phalanx.run": "7", "phalanx.job": "7", "phalanx.group": "j-7"}
    assert json.loads(first["MLFLOW_RUN_CONTEXT"]) == tags


def test_other_ranks_have_runs_of_their_own_in_the_same_group():
    env, _ = env_of(job(), node_rank=1, local_rank=1)
    assert "WANDB_RUN_ID" not in env
    assert "WANDB_RESUME" not in env
    assert (env["WANDB_NAME"], env["WANDB_RUN_GROUP"]) == ("j-7-rank3", "j-7")


def test_elements_of_an_array_and_trials_of_a_sweep_are_a_group():
    element = replace(
        job(),
        job_id="5_2",
        array=ArrayPosition(array_id="5", index=2, size=4, lowest=0, highest=3),
        output_dir="/o/5_2-k",
    )
    env, _ = env_of(element, node_rank=0, local_rank=0)
    assert (env["WANDB_NAME"], env["WANDB_RUN_ID"], env["WANDB_RUN_GROUP"]) == ("j-5_2", "5_2-k", "j-5")
    trial = replace(job(), spec=replace(job().spec, labels=(("sweep", "s1"),)))
    assert env_of(trial, node_rank=0, local_rank=0)[0]["WANDB_RUN_GROUP"] == "s1"


@pytest.mark.parametrize("given", [{"WANDB_RUN_ID": "mine"}, {"WANDB_RESUME": "never"}])
def test_what_the_user_or_the_node_sets_stays(given):
    own = {"WANDB_NAME": "mine", "MLFLOW_RUN_CONTEXT": "{}", **given}
    for found in (
        env_of(job(env=own.items()), node_rank=0, local_rank=0)[0],
        env_of(job(), node_rank=0, local_rank=0, base={**BASE, **own})[0],
    ):
        assert variables(found) == {**own, "WANDB_RUN_GROUP": "j-7"}


@pytest.mark.parametrize(
    "changes",
    [
        {"terminal": True},
        {"idle_s": 60.0},
        {"slurm": (("ntasks", "2"),)},
        {"role": Role(argv=("python", "-m", "phalanx.executor.broker"))},
    ],
)
def test_programs_that_begin_many_runs_have_only_the_group(changes):
    order = replace(job(), spec=replace(job().spec, **changes))
    assert variables(env_of(order, node_rank=0, local_rank=0)[0]) == {"WANDB_RUN_GROUP": "j-7"}


@pytest.mark.parametrize(
    ("env", "links"),
    [
        ({}, []),
        ({"WANDB_PROJECT": "p"}, []),
        ({"WANDB_PROJECT": "p", "WANDB_ENTITY": "lab"}, ["https://wandb.ai/lab/p/runs/17-ab12"]),
        ({"WANDB_PROJECT": "p", "WANDB_ENTITY": "lab", "WANDB_MODE": "offline"}, []),
        ({"WANDB_PROJECT": "p", "WANDB_ENTITY": "lab", "WANDB_RUN_ID": "a/b"}, ["https://wandb.ai/lab/p/runs/a%2Fb"]),
        ({"WANDB_PROJECT": "p", "WANDB_ENTITY": "lab", "WANDB_RESUME": "never"}, ["https://wandb.ai/lab/p"]),
        (
            {"WANDB_PROJECT": "p", "WANDB_ENTITY": "lab", "WANDB_BASE_URL": "http://u:pw@w:8080/?k=pw#pw"},
            ["http://w:8080/lab/p/runs/17-ab12"],
        ),
        ({"WANDB_PROJECT": 'p"><script>', "WANDB_ENTITY": "lab"}, []),
        ({"MLFLOW_TRACKING_URI": "https://u:pw@ml.example.org:5000/"}, ["https://ml.example.org:5000/"]),
        (
            {"MLFLOW_TRACKING_URI": "https://ml.example.org", "MLFLOW_EXPERIMENT_ID": "3"},
            ["https://ml.example.org/#/experiments/3"],
        ),
        ({"MLFLOW_TRACKING_URI": "http://ml/a%0ab c"}, ["http://ml/a%0ab%20c/"]),
        ({"MLFLOW_TRACKING_URI": "javascript:alert(1)"}, []),
        ({"MLFLOW_TRACKING_URI": "sqlite:///ml.db"}, []),
        ({"MLFLOW_TRACKING_URI": "http://[::1]:5000"}, ["http://[::1]:5000/"]),
        ({"MLFLOW_TRACKING_URI": "http://[bad"}, []),
        ({"MLFLOW_TRACKING_URI": "http://h:99999"}, []),
    ],
)
def test_links(env, links):
    assert [one.url for one in tracker_links(JOB, env)] == links
