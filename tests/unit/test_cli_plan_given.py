"""`--plan` and `plan:` as users write them: words, a saved file, a mapping; every refusal in one line with its place."""

import json

import pytest

from phalanx.cli.jobs.request.job_file import parse_job_file
from phalanx.cli.plan.plan_option import PlanRequest, parse_plan_option
from phalanx.cli.root import main
from phalanx.core.errors import BadFile
from phalanx.core.work.job_file.keys import InvalidKey
from phalanx.core.work.layouts.layout import Layout, layout_to_json
from tests.golden.cli.fake_head import TOKEN, FakeHead

SAVED = {
    "fits": True,
    "layouts": [{"layout": layout_to_json(Layout(tensor=2, shard=4, zero=3))}, {"layout": {"replicate": 8}}],
}


@pytest.fixture
def head(monkeypatch, tmp_path):
    fake = FakeHead()
    for name, value in {"URL": fake.url, "TOKEN": TOKEN, "HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(f"PHALANX_{name}", value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    yield fake
    fake.close()


def sent(head, *words):
    assert main(["submit", "--quiet", *words]) == 0
    return head.sent("POST", "/v1/jobs")[-1]["body"]


def refused(value, folder):
    with pytest.raises(InvalidKey) as caught:
        parse_plan_option(value, str(folder))
    assert "\n" not in caught.value.message
    return caught.value


def test_words_go_to_the_head_as_typed(head):
    assert sent(head, "--plan", "tp=2,fsdp=4", "--", "python", "train.py")["plan"] == "tp=2,fsdp=4"
    assert sent(head, "--plan", "auto", "--gpus", "8", "--", "python", "train.py")["plan"] == "auto"
    assert "plan" not in sent(head, "--", "python", "train.py")


def test_saved_answer_gives_its_first_layout_or_the_one_named(head, tmp_path):
    (tmp_path / "best.json").write_text(json.dumps(SAVED))
    assert sent(head, "--plan", "best.json", "--", "python", "train.py")["plan"] == "tp=2,fsdp=4"
    assert sent(head, "--plan", "best.json#2", "--", "python", "train.py")["plan"] == "dp=8"


def test_file_that_is_a_layout_itself_will_do(tmp_path):
    (tmp_path / "one.json").write_text(json.dumps(layout_to_json(Layout(tensor=4))))
    assert parse_plan_option("one.json", str(tmp_path)) == "tp=4"


def test_job_file_means_a_saved_answer_from_its_own_folder(head, tmp_path):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "best.json").write_text(json.dumps(SAVED))
    (tmp_path / "jobs" / "job.yaml").write_text("run: python train.py\nplan: best.json\n")
    assert sent(head, "jobs/job.yaml")["plan"] == "tp=2,fsdp=4"


def test_mapping_is_a_wish_to_plan_first(tmp_path):
    file = parse_job_file("plan:\n  model: llama-3-8b\n  seq: 8192\n  global_batch:\n", path="job.yaml")
    assert parse_plan_option(file.mapping["plan"], "/w") == PlanRequest(
        model="llama-3-8b", options={"seq": "8192"}, folder="/w"
    )
    assert refused({"modle": "x"}, tmp_path).hint == "did you mean 'model'?"
    assert "has no model" in refused({"seq": "1"}, tmp_path).message


def test_list_is_no_plan():
    with pytest.raises(BadFile, match=r"job\.yaml:1: plan: expected one value, or keys and values"):
        parse_job_file("plan: [tp=2]", path="job.yaml")


@pytest.mark.parametrize(
    ("written", "asked", "words"),
    [
        (None, "best.json", "no such file"),
        ("{", "best.json", "not JSON"),
        ("[" * 100_000, "best.json", "not JSON"),
        ("[]", "best.json", "contains no plan"),
        ('{"fits": false, "reason": "1.1 TB of states", "layouts": []}', "best.json", "1.1 TB of states"),
        (json.dumps(SAVED), "best.json#3", "layout 3 does not exist"),
        (json.dumps(SAVED), "best.json#0", "from 1"),
        ('{"layouts": [7]}', "best.json", "is invalid"),
        ('{"layouts": [{"layout": {"tensor": -2}}]}', "best.json", "tensor is -2"),
    ],
)
def test_file_that_will_not_do_says_why(tmp_path, written, asked, words):
    if written is not None:
        (tmp_path / "best.json").write_text(written)
    assert words in refused(asked, tmp_path).message


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--plan", "fast", "--gpus", "2"), "--plan: 'fast' is neither auto nor a layout (write auto, or a layout as"),
        (
            ("--plan", "tp=2", "--gpus", "8"),
            "plan tp=2 is for 2 ranks, but the job requests 8 GPUs (ask for 2 GPUs, or write dp=4)",
        ),
        (("--plan", "tp=8,tp=4"), "--plan: layout 'tp=8,tp=4': tensor is given twice"),
        (
            ("--plan", "gone.json"),
            "--plan: gone.json: no such file (create one with phalanx plan MODEL --save FILE.json",
        ),
    ],
)
def test_wrong_plan_is_one_line(head, capsys, words, told):
    assert main(["submit", *words, "--", "python", "train.py"]) == 64
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_wrong_plan_of_a_job_file_names_its_line(head, capsys, tmp_path):
    (tmp_path / "job.yaml").write_text("run: python train.py\nplan: tq=2\n")
    assert main(["submit", "job.yaml"]) == 78
    assert "job.yaml:2: plan: layout: unknown field 'tq'" in capsys.readouterr().err
