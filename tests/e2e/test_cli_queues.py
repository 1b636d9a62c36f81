"""The queue tree from the command line, against a real head with virtual nodes."""

import sys
import time

import pytest

from benchmarks.cluster import free_port
from tests.e2e.test_cli_head import Shell

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(300)]

TREE = """\
queues:
  research:
    quota: 2
    queues:
      nlp: {weight: 2, budget: 100 GPU-h per 30d}
  prod: {quota: 2, borrow: none}
"""


@pytest.fixture(scope="module")
def phalanx(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("queues"))
    shell("up", "--virtual", "1x4", "--port", str(free_port()))
    (shell.work / "queues.yaml").write_text(TREE)
    yield shell
    shell("down", "--cancel-jobs")


def figures(phalanx, name):
    return next(queue for queue in phalanx.json("queues", "show") if queue["id"] == name)


def test_a_file_is_applied_whole_and_says_what_changed(phalanx):
    dry = phalanx("queues", "apply", "queues.yaml", "--dry-run").stdout.splitlines()
    assert dry == ["+ research", "+ nlp", "+ prod", "3 would be added, 0 changed, 0 removed, 0 unchanged"]
    assert [queue["id"] for queue in phalanx.json("queues", "show")] == ["default"]
    assert phalanx("queues", "apply", "queues.yaml").stdout.splitlines()[-1].startswith("3 added")
    (phalanx.work / "more.yaml").write_text(TREE.replace("quota: 2, borrow", "quota: 1, borrow"))
    assert phalanx("queues", "apply", "more.yaml").stdout.splitlines()[0] == "~ prod: quota 2 -> 1"
    assert phalanx("queues", "apply", "-", stdin=TREE).stdout.splitlines()[0] == "~ prod: quota 1 -> 2"


def test_a_wrong_file_is_refused_by_line_and_changes_nothing(phalanx):
    (phalanx.work / "wrong.yaml").write_text("queues:\n  late: {}\n  later:\n    qouta: 3\n")
    refused = phalanx("queues", "apply", "wrong.yaml", code=78)
    assert "wrong.yaml:4: unknown key 'qouta'" in refused.stderr
    assert "did you mean 'quota'?" in refused.stderr
    over = phalanx("queues", "apply", "-", stdin="queues:\n  late: {quota: 1, queues: {later: {quota: 2}}}\n", code=64)
    assert "its quota is 1 GPU, but the quotas below it sum to 2" in over.stderr
    assert "late" not in phalanx("queues", "show").stdout


def test_the_tree_shows_what_is_borrowed_and_who_waits(phalanx):
    job = phalanx(
        "submit", "--quiet", "-q", "nlp", "--gpus", "3", "--", sys.executable, "-c", "import time; time.sleep(120)"
    ).stdout
    phalanx.until(job.strip(), "running")
    late = phalanx(
        "submit", "--quiet", "-q", "prod", "--hold", "--gpus", "2", "--", sys.executable, "-c", ""
    ).stdout.strip()
    nlp, research, prod = (figures(phalanx, name) for name in ("nlp", "research", "prod"))
    assert (nlp["used_gpus"], nlp["borrowed_gpus"], nlp["running"]) == (3, 3, 1)
    assert (research["used_gpus"], research["borrowed_gpus"], research["running"]) == (3, 1, 0)
    assert (prod["used_gpus"], prod["lent_gpus"], prod["pending_gpus"]) == (0, 1, 2)
    assert prod["waiting"][0]["reason"] == "held"
    lines = phalanx("queues", "show").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["default", "prod", "research"]
    assert lines[4].startswith("└─ nlp")
    assert "100 GPU-h" in lines[4]
    below = phalanx("queues", "show", "research").stdout
    assert "research: weight 1, priority 0, borrows all, lends all" in below
    assert "prod" not in below
    phalanx("cancel", job.strip(), late)
    phalanx.until(job.strip(), "cancelled")
    for _ in range(100):
        if figures(phalanx, "nlp")["used_gpus"] == 0:
            break
        time.sleep(0.1)
    assert figures(phalanx, "nlp")["budget_left_gpu_h"] < 100.0


def test_a_job_that_can_never_start_is_refused_or_accepted_on_request(phalanx):
    three = ("-q", "prod", "--gpus", "3", "--", sys.executable, "-c", "")
    why = "3 GPUs asked; queue prod can get at most 2 (quota 2, borrow 0)"
    for verb in ("submit", "run"):
        assert why in phalanx(verb, *three, code=64).stderr
    taken = phalanx("submit", "--quiet", "--allow-never", *three)
    assert taken.stderr == f"phalanx: warning: it can never start: {why}\n"
    job = taken.stdout.strip()
    assert phalanx("why", job).stdout.splitlines()[0] == f"job {job} can NEVER start (borrow): {why}"
    found = phalanx.json("why", job)
    assert (found["never"], found["limit"], found["reason"]) == (True, "borrow", "never")
    assert f"NEVER: {why}" in phalanx("ps").stdout
    two = phalanx("submit", "--quiet", "-q", "prod", "--hold", "--gpus", "2", "--", sys.executable, "-c", "")
    (phalanx.work / "narrow.yaml").write_text("queues: {prod: {quota: 1, borrow: none}}\n")
    for words in (("--dry-run",), ()):
        said = phalanx("queues", "apply", "narrow.yaml", *words).stdout.splitlines()
        named = f"  job {two.stdout.strip()}: 2 GPUs asked; queue prod can get at most 1 (quota 1, borrow 0)"
        assert (len(said), said[-1]) == (4, named)
    phalanx("queues", "apply", "queues.yaml")
    phalanx("cancel", job, two.stdout.strip())


def test_an_unknown_queue_is_answered_with_the_nearest(phalanx):
    assert "did you mean research?" in phalanx("queues", "show", "reserch", code=64).stderr


def test_prune_removes_what_the_file_does_not_name(phalanx):
    phalanx("queues", "apply", "queues.yaml")
    said = phalanx("queues", "apply", "--prune", "-", stdin="queues: {prod: {quota: 2, borrow: none}}\n").stdout
    assert said.splitlines() == ["- nlp", "- research", "0 added, 0 changed, 2 removed, 1 unchanged"]
    assert [queue["id"] for queue in phalanx.json("queues", "show")] == ["default", "prod"]
