"""A job gives its job file again, and `phalanx rerun` submits it: what the owner gets, what others do not, and what the head lost meanwhile."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined, index"

import json
from dataclasses import replace

import pytest

from phalanx.cli.root import main
from phalanx.core.state.events import PutProject, PutQueue
from phalanx.core.work.queue import Project, Queue
from tests.contract.api_head import JOB, TOKENS, Supervisor, code, until

FULL = {
    "run": "python train.py --lr 1e-3 steps=5",
    "env": {"COLOR": "red", "KEY": "canary-env"},
    "labels": {"exp": "7"},
    "time": "90m",
    "data": {"train": "s3://b/p", "mode": "stream"},
    "ports": {"board": 6006},
    "retry": 2,
    "memory": "1536M",
    "upload": "ab" * 32,
    "setup": "echo a\necho b\n",
}


@pytest.fixture
def phalanx(call, monkeypatch, tmp_path, capfd):
    """The command line of ada: its exit code, output and errors."""
    monkeypatch.setenv("PHALANX_URL", call.url)
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path / "client"))
    monkeypatch.chdir(tmp_path)

    def run(*words, role="user"):
        monkeypatch.setenv("PHALANX_TOKEN", TOKENS[role])
        exit_code = main(list(words))
        out, err = capfd.readouterr()
        return exit_code, out, err

    return run


def keys_of(call, job_id, role="user"):
    reply = call(role, "GET", f"/v1/jobs/{job_id}/request")
    assert reply.status_code == 200, reply.text
    return reply.json()


def spec_of(head, job_id):
    return head.store.job(job_id).spec


def test_the_keys_submit_the_same_spec_again(head, call):
    first = call.submit(**FULL)
    reply = keys_of(call, first)
    assert (reply["keys"]["env"], reply["hidden_env"]) == (FULL["env"], [])
    again = call("user", "POST", "/v1/jobs", reply["keys"]).json()["job"]["id"]
    assert spec_of(head, again) == spec_of(head, first)


def test_others_see_the_names_of_variables_alone_and_strangers_nothing(head, call):
    head.ask(PutProject(project=Project(id="nlp", members=frozenset({"ada"}), admins=frozenset({"bob"}))))
    job_id = call.submit(**FULL, project="nlp")
    for role in ("operator", "admin", "other"):
        reply = keys_of(call, job_id, role)
        assert reply["hidden_env"] == ["COLOR", "KEY"]
        assert "env" not in reply["keys"]
        assert "canary-env" not in json.dumps(reply)
    own = call.submit(project="default")
    assert code(call("other", "GET", f"/v1/jobs/{own}/request")) == (403, "not_permitted")
    assert code(call("viewer", "GET", f"/v1/jobs/{job_id}/request")) == (403, "not_permitted")


def test_the_queue_and_the_limits_are_the_present_ones(call):
    job_id = call.submit(hold=True)
    call("user", "PATCH", f"/v1/jobs/{job_id}", {"time": "3h", "name": "other"})
    keys = keys_of(call, job_id)["keys"]
    assert (keys["time"], keys["name"]) == ("3h", "other")
    assert "queue" not in keys
    assert "project" not in keys


def test_an_array_and_an_element_and_conditions_that_hold_for_good(call):
    parent = call.submit()
    first = call.submit(array="0-6:2%2", depends_on=[f"afterany:{parent}", "singleton"], hold=True)
    array = first.partition("_")[0]
    assert keys_of(call, array)["keys"]["array"] == "0-6:2%2"
    assert keys_of(call, f"{array}_4")["keys"]["array"] == "4"
    assert keys_of(call, array)["keys"]["depends_on"] == [f"afterany:{parent}", "singleton"]
    call("user", "POST", f"/v1/jobs/{parent}/cancel")
    assert keys_of(call, array)["keys"]["depends_on"] == ["singleton"]


def test_the_secret_of_a_batch_script_is_another_for_each_job(head, call):
    job_id = call.submit(tasks_per_node=1, slurm={"ntasks": "2", "key": "canary-key"})
    keys = keys_of(call, job_id)["keys"]
    assert keys["slurm"] == {"ntasks": "2"}
    again = call("user", "POST", "/v1/jobs", keys).json()["job"]["id"]
    assert dict(spec_of(head, again).slurm)["key"] not in ("", "canary-key")


def test_a_service_gives_its_newest_revision(call):
    web = {**JOB, "name": "web", "type": "service", "replicas": "0..2", "env": {"N": "1"}}
    assert call("user", "POST", "/v1/services", web).status_code == 201
    call("user", "PATCH", "/v1/services/web", {"spec": {**web, "env": {"N": "2"}}})
    found = call("user", "GET", "/v1/services/web/request").json()["keys"]
    assert (found["type"], found["replicas"], found["env"]) == ("service", "0..2", {"N": "2"})
    assert code(call("other", "GET", "/v1/services/web/request")) == (403, "not_permitted")


# ---- the command line ----


def test_show_prints_a_file_that_submits_the_same(head, call, phalanx, tmp_path):
    job_id = call.submit(**{**FULL, "upload": None}, workdir=str(tmp_path))
    (tmp_path / "train.py").touch()
    exit_code, text, _ = phalanx("show", job_id, "--file")
    assert exit_code == 0
    assert "setup: |\n  echo a\n  echo b\n" in text
    (tmp_path / "job.yaml").write_text(text)
    exit_code, again, _ = phalanx("submit", "--quiet", "job.yaml")
    assert exit_code == 0
    assert spec_of(head, again.strip()) == spec_of(head, job_id)
    exit_code, text, err = phalanx("show", job_id, "--file", role="admin")
    assert "COLOR" not in text
    assert "left out: COLOR, KEY" in err


def test_rerun_replaces_parameters_variables_and_keys(head, call, phalanx, tmp_path):
    (tmp_path / "train.py").touch()
    job_id = call.submit(**{**FULL, "upload": None}, workdir=str(tmp_path))
    values = ("lr=5e-4", "steps=9", "COLOR=blue", "time=2h")
    words = [word for value in values for word in ("--with", value)]
    exit_code, again, _ = phalanx("rerun", job_id, *words, "--gpus", "2x1", "-e", "MORE=1", "--name", "n2", "--quiet")
    assert exit_code == 0
    before, after = spec_of(head, job_id), spec_of(head, again.strip())
    assert after.role.argv == ("python", "train.py", "--lr", "5e-4", "steps=9")
    assert after.env == (("COLOR", "blue"), ("KEY", "canary-env"), ("MORE", "1"))
    assert (after.time_limit_s, after.name, str(after.role.gpus)) == (7200.0, "n2", "2x1")
    same = replace(after, role=before.role, env=before.env, time_limit_s=before.time_limit_s, name=before.name)
    assert same == before
    exit_code, _, err = phalanx("rerun", job_id, "--with", "nothing=1")
    assert exit_code == 64
    assert "of the command: lr, steps; variables: COLOR, KEY" in err


def test_rerun_of_the_failed_elements_alone(head, call, phalanx):
    supervisor = Supervisor(call)
    supervisor.hello()
    first = call.submit(array="0-4%3", gpus=1, retry=0, workdir="/", run="true")
    array = first.partition("_")[0]
    assert phalanx("rerun", array, "--failed")[0] == 64
    for index in range(3):
        until(lambda index=index: head.store.attempts(f"{array}_{index}"))
        supervisor.run(f"{array}_{index}")
        supervisor.end(f"{array}_{index}", ranks=1, code=3 if index else 0)
        until(lambda index=index: head.store.job(f"{array}_{index}").state.terminal)
    exit_code, again, _ = phalanx("rerun", array, "--failed", "--quiet")
    assert exit_code == 0
    whole = call("user", "GET", f"/v1/jobs/{again.strip()}").json()["job"]
    assert (whole["elements"], whole["array_max"]) == ("1-2", 3)


def test_rerun_uses_the_uploaded_copy_again_or_says_what_to_do(head, call, phalanx, tmp_path):
    (tmp_path / "train.py").write_text("1")
    exit_code, first, _ = phalanx("submit", "--copy", "--quiet", "--", "python", "train.py")
    assert exit_code == 0
    (tmp_path / "train.py").unlink()  # the copy has it
    exit_code, again, _ = phalanx("rerun", first.strip(), "--quiet")
    assert (exit_code, spec_of(head, again.strip()).upload) == (0, spec_of(head, first.strip()).upload)
    assert head.parts.blobs.remove_unused(spec_of(head, first.strip()).upload, 1e12)
    exit_code, _, err = phalanx("rerun", first.strip(), "--quiet")
    assert exit_code == 64
    assert "(--copy uploads its working directory again, if this machine has it)" in err
    (tmp_path / "train.py").write_text("2")
    exit_code, fresh, _ = phalanx("rerun", first.strip(), "--quiet", "--copy")
    assert (exit_code, spec_of(head, fresh.strip()).upload) != (0, spec_of(head, first.strip()).upload)


def test_rerun_of_another_users_job_needs_the_values_of_its_variables(head, call, phalanx):
    job_id = call.submit(env={"KEY": "canary-env"}, run="true")
    exit_code, _, err = phalanx("rerun", job_id, "--quiet", role="operator")
    assert exit_code == 64
    assert "only its owner sees: KEY" in err
    exit_code, again, _ = phalanx("rerun", job_id, "--quiet", "-e", "KEY=mine", role="operator")
    assert exit_code == 0
    assert (spec_of(head, again.strip()).env, head.store.job(again.strip()).user) == ((("KEY", "mine"),), "opal")


def test_rerun_refuses_services(call, phalanx):
    call("user", "POST", "/v1/services", {**JOB, "name": "web", "type": "service", "replicas": "0..2"})
    exit_code, _, err = phalanx("rerun", "web")
    assert exit_code == 64
    assert "phalanx show web --file" in err


def test_job_that_copies_data_for_another_is_not_submitted_again_and_the_other_names_its_limit(head, call, phalanx):
    head.ask(PutQueue(queue=Queue(id="default", jobs_per_user=1)))
    Supervisor(call).hello()
    call.submit(run="true", gpus=1)
    job_id = call.submit(run="true", gpus=2, data={"train": "s3://b/p"})
    until(lambda: head.store.job(job_id).unmet_dependencies)
    (copy,) = (one.job_id for one in head.store.job(job_id).unmet_dependencies)
    assert call("user", "GET", f"/v1/jobs/{job_id}").json()["job"]["unmet"] == [f"afterany:{copy}"]
    _, _, err = phalanx("rerun", copy)
    assert f"job {copy} only copies data for job {job_id}" in err
    until(lambda: "limit" in call("user", "GET", f"/v1/jobs/{copy}/why").json()["reason"])
    limit = call("user", "GET", f"/v1/jobs/{copy}/why").json()["detail"]
    assert f"job {copy} waits: {limit}" in call("user", "GET", f"/v1/jobs/{job_id}/why").json()["headline"]
    call("user", "POST", f"/v1/jobs/{job_id}/cancel")
    why = call("user", "GET", f"/v1/jobs/{job_id}/why").json()
    assert (why["detail"], why["headline"].count("cancelled by ada")) == ("cancelled by ada before it ran", 1), why
