"""Checkpoints: complete or absent, loadable into any world size, and never the end of the training that makes them."""

from __future__ import annotations

import json
import re
import shutil

import pytest

pytest.importorskip("torch")

from phalanx.torch import checkpoint_folder
from phalanx.wire import manifest
from phalanx.wire.manifest import CheckpointInvalid
from tests.torch.gang import LOOP, ROOT, Gang

pytestmark = [pytest.mark.torch, pytest.mark.serial]


def losses(gang, rank=0):
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) (\S+)$", gang.log(rank), re.MULTILINE)}


def temporaries(checkpoints):
    return [path.name for path in checkpoints.glob("*.tmp-*")]


def make_checkpoints(tmp_path, *arguments, steps=10, world_size=2, **options):
    """A finished supervised run of LOOP; its losses by step."""
    with Gang(
        tmp_path, LOOP, "--steps", steps, "--every-steps", "5", *arguments, world_size=world_size, **options
    ) as gang:
        assert gang.finish() == [0] * world_size, gang.log()
        return losses(gang)


@pytest.mark.parametrize(
    ("wrap", "writers", "readers"),
    [("plain", 1, 1), ("ddp", 2, 2), ("ddp", 3, 2), ("ddp", 1, 3), ("fsdp", 2, 2), ("fsdp", 3, 2), ("fsdp", 1, 3)],
)
def test_resumed_run_repeats_the_losses_of_an_unbroken_one(tmp_path, wrap, writers, readers):
    checkpoints = tmp_path / "ck"
    straight = make_checkpoints(tmp_path / "a", "--wrap", wrap, steps=15, world_size=writers, checkpoints=checkpoints)
    resume = {"epoch": 2, "PHALANX_RESUME_FROM": checkpoints / "step-00000005"}
    with Gang(tmp_path / "b", LOOP, "--steps", "15", "--wrap", wrap, world_size=readers, **resume) as gang:
        assert gang.finish() == [0] * readers, gang.log()
        again = losses(gang)
        (report,) = gang.of("resumed")
    expected = {step: straight[step] for step in range(6, 16)}
    assert again == (expected if readers == writers else pytest.approx(expected, rel=2e-5))
    assert report["step"] == 5
    for rank in range(readers):
        owner = rank if readers == writers else 0
        assert f"resumed 5 {{'seen': 120, 'rank': {owner}}}" in gang.log(rank)


def test_manifest_verifies_and_names_every_file(tmp_path):
    make_checkpoints(tmp_path, checkpoints=tmp_path / "ck")
    step = tmp_path / "ck/step-00000010"
    whole = manifest.verify(str(step))
    assert (whole.step, whole.world_size, whole.epoch) == (10, 2, 1)
    assert {file.path for file in whole.files} | {"manifest.json"} == {path.name for path in step.iterdir()}


def test_supervisor_is_told_of_what_lies_there(tmp_path):
    with Gang(tmp_path, LOOP, "--every-steps", "10", world_size=2, checkpoints=tmp_path / "ck") as gang:
        assert gang.finish() == [0, 0]
        for report in gang.of("checkpoint"):
            whole, digest = manifest.read(report["path"])
            assert (report["digest"], report["rank"], report["step"]) == (digest, 0, whole.step)
            assert report["bytes"] == sum(file.size_bytes for file in whole.files)
        assert [report["step"] for report in gang.of("checkpoint")] == [10, 20]
        assert [report["steps_total"] for report in gang.of("planned")] == [20]
        assert [report["step"] for report in gang.of("step", rank=1)] == list(range(1, 21))


def test_a_stager_that_closes_itself_serves_every_save(tmp_path):
    make_checkpoints(tmp_path, "--closing-stager", steps=15, world_size=1, checkpoints=tmp_path / "ck")
    assert {path.name for path in (tmp_path / "ck").glob("step-*")} >= {"step-00000010", "step-00000015"}


def test_torn_checkpoint_is_never_resumed_even_when_named(tmp_path):
    make_checkpoints(tmp_path / "a", checkpoints=tmp_path / "ck")
    step = tmp_path / "ck/step-00000010"
    shard = step / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointInvalid):
        manifest.verify(str(step))
    with Gang(tmp_path / "b", LOOP, world_size=2, PHALANX_RESUME_FROM=step) as gang:
        assert gang.finish() == [1, 1]
        assert gang.of("step") == []
        assert "CheckpointInvalid" in gang.log()
        assert "__1_0.distcp" in gang.log()


def test_without_phalanx_the_newest_valid_is_found_and_the_last_two_are_kept(tmp_path):
    alone = {"supervised": False, "checkpoints": tmp_path / "ck"}
    make_checkpoints(tmp_path / "a", steps=20, **alone)
    assert sorted(path.name for path in (tmp_path / "ck").iterdir()) == ["step-00000015", "step-00000020"]
    torn = tmp_path / "ck/step-00000020/.metadata"
    torn.write_bytes(torn.read_bytes()[::-1])
    with Gang(tmp_path / "b", LOOP, "--steps", "17", world_size=1, **alone) as gang:
        assert gang.finish() == [0]
        assert list(losses(gang)) == [16, 17]


def test_kill_in_mid_save_leaves_only_whole_checkpoints(tmp_path):
    """SIGKILL at ten instants of runs that save at every step; whatever lies there afterwards is whole, and the next run sweeps."""
    checkpoints = tmp_path / "ck"
    arguments = ("--steps", "100000", "--every-steps", "1", "--width", "400")
    for lap in range(10):
        options = {"world_size": 2, "checkpoints": checkpoints, "generation": lap}
        with Gang(tmp_path / str(lap), LOOP, *arguments, **options) as gang:
            gang.until_step(2 + lap)
            gang.kill()
        for path in checkpoints.glob("step-*"):
            if ".tmp-" not in path.name:
                manifest.verify(str(path))
    assert checkpoint_folder.newest_valid(str(checkpoints)) is not None
    (checkpoints / "step-00000003.tmp-0").mkdir()  # as an older release names it
    (checkpoints / "step-00000003.tmp-1-0").mkdir(exist_ok=True)
    make_checkpoints(tmp_path / "z", checkpoints=checkpoints)
    assert temporaries(checkpoints) == []


def test_unbroken_and_killed_run_agree_on_every_loss(tmp_path):
    straight = make_checkpoints(tmp_path / "a", steps=60, world_size=2)
    with Gang(
        tmp_path / "b",
        LOOP,
        "--steps",
        "60",
        "--every-steps",
        "7",
        "--pace-s",
        "0.01",
        world_size=2,
        checkpoints=tmp_path / "ck",
    ) as gang:
        gang.until_step(30)
        gang.kill()
        before = losses(gang)
    newest = checkpoint_folder.newest_valid(str(tmp_path / "ck"))
    with Gang(tmp_path / "c", LOOP, "--steps", "60", world_size=3, epoch=2, PHALANX_RESUME_FROM=newest) as gang:
        assert gang.finish() == [0, 0, 0]
        after = losses(gang)
    assert set(before) & set(after), "some steps were made twice"
    assert before == {step: straight[step] for step in before}
    assert after == pytest.approx({step: straight[step] for step in after}, rel=1e-4)
    assert max(after) == 60


def test_full_disk_fails_the_checkpoint_and_not_the_training(tmp_path):
    """RLIMIT_FSIZE stands in for the full disk from step 6 to 10; the shards are larger."""
    checkpoints = tmp_path / "ck"
    arguments = (
        LOOP,
        "--steps",
        "15",
        "--every-steps",
        "2",
        "--width",
        "200",
        "--file-limit",
        "20000",
        "--pace-s",
        "0.05",
    )
    with Gang(tmp_path, *arguments, world_size=2, checkpoints=checkpoints) as gang:
        assert gang.finish() == [0, 0], gang.log()
        failed = [report["step"] for report in gang.of("checkpoint_failed")]
        assert 8 in failed
        assert {2, 12, 14} <= {report["step"] for report in gang.of("checkpoint")}
        assert "training continues" in gang.log()
        assert list(losses(gang)) == list(range(1, 16))
        assert not temporaries(checkpoints)
        assert not {f"step-{step:08d}" for step in failed} & {path.name for path in checkpoints.iterdir()}


def test_folder_that_cannot_be_written_fails_the_checkpoint_and_not_the_training(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with Gang(tmp_path, LOOP, "--every-steps", "5", world_size=2, checkpoints=tmp_path / "file/ck") as gang:
        assert gang.finish() == [0, 0], gang.log()
        assert [report["step"] for report in gang.of("checkpoint_failed")] == [5, 10, 15, 20]
        assert "Not a directory" in gang.of("checkpoint_failed")[0]["error"]


@pytest.mark.parametrize(("epoch", "failed"), [(1, [5]), (2, [])])
def test_in_a_folder_that_all_epochs_share_each_writes_under_names_of_its_own(tmp_path, epoch, failed):
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck/step-00000005.tmp-1-0").write_text("in the way of epoch 1, and of no other")
    words, options = ("--steps", "5", "--every-steps", "5"), {"world_size": 2, "checkpoints": tmp_path / "ck"}
    with Gang(tmp_path / "a", LOOP, *words, epoch=epoch, **options) as gang:
        assert gang.finish() == [0, 0], gang.log()
        assert [report["step"] for report in gang.of("checkpoint_failed")] == failed
        assert [report["step"] for report in gang.of("checkpoint")] == ([] if failed else [5])


def test_gang_restarted_in_place_keeps_the_checkpoint_it_made_before(tmp_path):
    checkpoints = tmp_path / "ck"
    make_checkpoints(tmp_path / "a", checkpoints=checkpoints, generation=0)
    _, first = manifest.read(str(checkpoints / "step-00000005"))
    with Gang(
        tmp_path / "b", LOOP, "--steps", "10", "--every-steps", "5", world_size=2, checkpoints=checkpoints, generation=1
    ) as gang:
        assert gang.finish() == [0, 0]
        again = gang.of("checkpoint")[0]
    assert (again["step"], again["digest"]) == (5, first)
    assert temporaries(checkpoints) == []


def test_torn_folder_in_the_way_is_replaced(tmp_path):
    checkpoints = tmp_path / "ck"
    (checkpoints / "step-00000005").mkdir(parents=True)
    make_checkpoints(tmp_path / "a", checkpoints=checkpoints)
    manifest.verify(str(checkpoints / "step-00000005"))


def test_extra_that_could_not_be_loaded_is_refused_at_the_first_save(tmp_path):
    with Gang(tmp_path, LOOP, "--every-steps", "5", "--bad-extra", checkpoints=tmp_path / "ck") as gang:
        assert gang.finish() == [1]
        assert "TypeError: extra['seen'] is a builtins.object" in gang.log()


def test_plain_library_without_phalanx_or_a_folder_just_trains(tmp_path):
    with Gang(tmp_path, LOOP, world_size=2, supervised=False) as gang:
        assert gang.finish() == [0, 0]
        assert list(losses(gang)) == list(range(1, 21))
        assert "phalanx:" not in gang.log()


def test_bare_process_is_a_gang_of_one(tmp_path):
    script = tmp_path / "bare.py"
    script.write_text(
        "import os\n"
        "for name in ('MASTER_ADDR', 'MASTER_PORT', 'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'): del os.environ[name]\n"
        "import runpy, sys\n"
        f"sys.argv = [{str(LOOP)!r}, '--steps', '7']\n"
        f"runpy.run_path({str(LOOP)!r}, run_name='__main__')\n"
    )
    with Gang(tmp_path, script, supervised=False) as gang:
        assert gang.finish() == [0]
        assert list(losses(gang)) == list(range(1, 8))


@pytest.mark.timeout(300)
def test_example_gpt_learns_and_repeats_itself_on_another_number_of_ranks(tmp_path):
    script = ROOT / "examples/train_gpt/train.py"
    small = ("--d-model", 32, "--layers", 1, "--seq", 32, "--batch", 8, "--corpus-bytes", 1_100_000, "--print-every", 1)
    arguments = (script, *small, "--steps", 30, "--save-every-steps", 10, "--sample-bytes", 20)
    pattern = re.compile(r"^step (\d+) loss (\S+)$", re.MULTILINE)
    output = tmp_path / "output"
    with Gang(tmp_path / "a", *arguments, world_size=2, checkpoints=tmp_path / "ck", PHALANX_OUTPUT_DIR=output) as gang:
        assert gang.finish() == [0, 0], gang.log()
        straight = {int(step): float(loss) for step, loss in pattern.findall(gang.log())}
    result = json.loads((output / "result.json").read_text())
    assert (result["steps"], result["world_size"], result["resumed_from"]) == (30, 2, 0)
    assert (output / "sample.txt").read_text().startswith("def ")
    assert straight[1] == pytest.approx(5.545, abs=0.01)
    assert straight[30] < 4.0
    shutil.rmtree(output)
    resume = {"PHALANX_RESUME_FROM": tmp_path / "ck/step-00000010", "PHALANX_OUTPUT_DIR": output}
    with Gang(tmp_path / "b", *arguments, world_size=3, epoch=2, **resume) as gang:
        assert gang.finish() == [0, 0, 0], gang.log()
        again = {int(step): float(loss) for step, loss in pattern.findall(gang.log())}
    assert list(again) == list(range(11, 31))
    assert again == pytest.approx({step: straight[step] for step in again}, rel=1e-4)


def test_script_that_never_heard_of_phalanx_runs_unchanged(tmp_path):
    with Gang(tmp_path, ROOT / "examples/bare_allreduce/train.py", "8", world_size=3) as gang:
        assert gang.finish() == [0, 0, 0]
        assert len(re.findall(r"^step \d+ loss \d", gang.log(), re.MULTILINE)) == 8
        assert gang.reports == []
