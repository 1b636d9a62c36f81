"""What `phalanx calibrate` decides before it measures, and how it shows what was found. Nothing is measured here."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, attr-defined"

import io
import tarfile

import pytest

from phalanx.cli.plan.calibration_job import (
    PROGRESS_LINE,
    CalibrationFailed,
    _fetch,
    build_calibration_job,
)
from phalanx.cli.plan.calibration_nodes import check_idle, select_nodes
from phalanx.cli.plan.calibration_table import calibration_rows, format_amount, profile_lines
from phalanx.cli.root import main
from phalanx.cli.terminal import Terminal
from phalanx.core.errors import BadRequest, NotFound, TooLarge, TryLater
from phalanx.core.work.layouts.layout import Layout
from phalanx.planner.calibration.profile import (
    InterNodeMeasurement,
    NodeMeasurement,
    PairMeasurement,
    Profile,
    RunMeasurement,
)
from phalanx.planner.cost.model_shape import ModelShape
from phalanx.wire.api.nodes import CordonView, DeviceView, NodeView, ReservedView
from tests.golden.cli.fake_head import TOKEN, FakeHead
from tests.golden.cli.views import make

NOW_S = 1_800_000_000.0
SCREEN = Terminal(width=100, height=40, interactive=False, colour=False, blocks=False)


def node(name, *, gpus=8, model="NVIDIA H100 80GB HBM3", sick=(), **more):
    devices = [
        make(DeviceView, index=i, uuid=f"{name}-{i}", model=model, memory_bytes=1, healthy=i not in sick)
        for i in range(gpus)
    ]
    return make(NodeView, id=name, engine="local", cpus=8, memory_bytes=1, devices=devices, **{"state": "up", **more})


def chosen(*nodes, wanted=None):
    return select_nodes(nodes, wanted, NOW_S)


# ---- which nodes -----------------------------------------------------------------------------------------------------


def test_all_nodes_that_are_up_are_measured_and_the_others_named():
    found = chosen(
        node("n3"),
        node("n0"),
        node("n1", state="down"),
        node("n2", cordon=make(CordonView, by="opal", why="fan", since_s=1.0, drain=True)),
        node("n4", sick=[5]),
        node("n5", reserved=[make(ReservedView, id="r", start_s=NOW_S - 1, end_s=NOW_S + 9, holders="maintenance")]),
        node("n6", gpus=0),
    )
    assert found.names == ["n0", "n3"]
    assert found.excluded == (
        "n1 is excluded: it is down",
        "n2 is excluded: it is drained: fan",
        "n4 is excluded: device 5 is unhealthy",
        "n5 is excluded: it is reserved for maintenance",
        "n6 is excluded: it has no devices",
    )


def test_a_node_reserved_for_later_is_measured_now():
    later = make(ReservedView, id="r", start_s=NOW_S + 60, end_s=NOW_S + 90, holders="maintenance")
    assert chosen(node("n0", reserved=[later])).names == ["n0"]


def test_a_named_node_that_cannot_be_measured_is_refused_not_left_out():
    with pytest.raises(NotFound, match="n1 cannot be measured: it is down"):
        chosen(node("n0"), node("n1", state="down"), wanted=["n0", "n1"])
    with pytest.raises(NotFound, match="no node 'n7'"):
        chosen(node("n0"), wanted=["n7"])
    with pytest.raises(NotFound, match="no node is up"):
        chosen(node("n0", state="down"))


def test_two_kinds_of_node_are_measured_one_after_the_other():
    fleet = node("a0", model="a100"), node("h0"), node("h1"), node("h2", gpus=4)
    with pytest.raises(BadRequest, match="nodes are of 3 kinds") as refused:
        chosen(*fleet)
    assert refused.value.hint == "measure one kind at a time: phalanx calibrate --nodes h2"
    assert chosen(*fleet, wanted=["h0", "h1"]).names == ["h0", "h1"]


def test_busy_nodes_are_refused_unless_waited_for():
    found = chosen(node("n0", jobs=["12"]), node("n1"))
    with pytest.raises(TryLater, match="1 of 2 nodes is busy with job 12"):
        check_idle(found, wait=False)
    check_idle(found, wait=True)
    check_idle(chosen(node("n1")), wait=False)


# ---- the job ---------------------------------------------------------------------------------------------------------


def test_the_job_is_one_gang_over_all_of_them():
    job = build_calibration_job(chosen(node("n0"), node("n1")), reservation="mine", quick=True, python="", here=False)
    assert job["run"] == ["python", "-P", "-m", "phalanx.torch.calibrate", "--quick"]
    assert (job["gpus"], job["reservation"]) == ("2x8", "mine")
    assert "reservation" not in build_calibration_job(
        chosen(node("n0")), reservation="", quick=False, python="", here=True
    )


def test_lines_of_the_rank_program_move_the_bar():
    found = PROGRESS_LINE.fullmatch("calibrate: 3/11 all-reduce within nodes")
    assert found is not None
    assert found.groups() == ("3", "11", "all-reduce within nodes")


class Outputs:
    """A head that has one archive."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def download_archive(self, _job, out, _path):
        for piece in self.pieces:
            out.write(piece)


def tar_of(text):
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        member = tarfile.TarInfo("calibration.json")
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text))
    return whole.getvalue()


@pytest.mark.parametrize("pieces", [(), (b"no tar at all",), (tar_of(b"{"),), (tar_of(b"[" * 100_000),)])
def test_a_job_that_left_no_samples_is_said_so(pieces):
    with pytest.raises(CalibrationFailed, match="job 7 left no samples"):
        _fetch(Outputs(*pieces), "7")


def test_samples_without_end_are_not_read_to_their_end():
    with pytest.raises(TooLarge):
        _fetch(Outputs(*[bytes(1 << 20)] * 100), "7")


# ---- the table -------------------------------------------------------------------------------------------------------


def profile(*slow_links, **more):
    model = ModelShape(name="gpt", layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=256, vocab=100)
    rates = {
        "flops": {"bf16": 700e12},
        "worst_flops": {"bf16": 690e12},
        "within_bytes_per_s": 360e9,
        "within_latency_s": 9e-6,
        "memory_bytes_per_s": 2.9e12,
        "storage_bytes_per_s": 1e9,
    }
    nodes = tuple(
        NodeMeasurement(node=f"n{i}", gpu="NVIDIA H100 80GB HBM3", devices=8, link_bytes_per_s=link, **rates)
        for i, link in enumerate(slow_links or (40e9, 40e9, 40e9))
    )
    run = RunMeasurement(
        model=model,
        layout=Layout(tensor=8, replicate=3),
        seq=128,
        step_s=0.25,
        nodes=3,
        gpus_per_node=8,
        gpu=nodes[0].gpu,
    )
    between = InterNodeMeasurement(gpu=nodes[0].gpu, nodes=3, groups=8, all_reduce_bytes_per_s=40e9, latency_s=2e-5)
    return Profile(at="2026-11-21T15:00:00Z", at_s=1.0, nodes=nodes, runs=(run,), between=(between,), **more)


def test_each_figure_stands_beside_the_tables():
    rows = {row.what: row for row in calibration_rows(profile())}
    matmul, within, between = rows["matmul bf16"], rows["all-reduce within nodes"], rows["all-reduce between nodes"]
    assert (matmul.measured, matmul.unit) == (700e12, "FLOP/s")
    assert matmul.ratio is not None
    assert 0.6 < matmul.ratio < 0.8, "700 of some 989 TFLOP/s"
    assert within.expected == 450e9
    assert between.expected == 50e9
    assert rows["latency between nodes"].expected is None
    step = rows["step on 3x8: 8 tensor x 3 data parallel"]
    assert step.measured == 0.25
    assert step.expected is not None, "what the measured parts promise"


def test_an_accelerator_that_no_table_has_is_shown_alone():
    strange = Profile(
        at="x", at_s=1.0, nodes=(NodeMeasurement(node="n0", gpu="abacus", devices=1, flops={"fp32": 3e9}),)
    )
    (row,) = calibration_rows(strange)
    assert (row.what, row.measured, row.expected, row.ratio) == ("matmul fp32", 3e9, None, None)


def test_slow_nodes_and_pairs_are_named_below_the_table():
    text = "\n".join(profile_lines(profile(40e9, 41e9, 20e9), [], SCREEN))
    assert "slow: n2, link: 20.0 GB/s, 50 % below the median" in text
    links = tuple(
        PairMeasurement(first=a, second=b, bytes_per_s=rate)
        for a, b, rate in (("n0", "n1", 40e9), ("n0", "n2", 40e9), ("n1", "n2", 9e9))
    )
    assert "slow: n1 - n2, link: 9.00 GB/s" in "\n".join(profile_lines(profile(pairs=links), [], SCREEN))


def test_a_healthy_fleet_is_said_to_be_one_and_a_stale_profile_why():
    text = "\n".join(profile_lines(profile(), ["n7 was never measured"], SCREEN))
    assert "no node and no link is more than 15 % below the median" in text
    assert "calibrate again: n7 was never measured" in text


def test_a_quick_measurement_accuses_nobody_for_sure():
    assert "calibrate without --quick to confirm" in "\n".join(
        profile_lines(profile(40e9, 40e9, 20e9, quick=True), [], SCREEN)
    )


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (312e12, "FLOP/s", "312 TFLOP/s"),
        (1.25e9, "B/s", "1.25 GB/s"),
        (24.13e-6, "s", "24.1 us"),
        (0.999e9, "B/s", "999 MB/s"),
        (0.99996e9, "B/s", "1.00 GB/s"),
        (0.0, "s", "0 s"),
        (3e-9, "s", "3.0e-09 s"),
        (2.5, "s", "2.50 s"),
    ],
)
def test_amounts_have_three_digits(value, unit, text):
    assert format_amount(value, unit) == text


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def head(monkeypatch, tmp_path):
    fake = FakeHead()
    monkeypatch.setenv("PHALANX_URL", fake.url)
    monkeypatch.setenv("PHALANX_TOKEN", TOKEN)
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path / "home"))
    known = fake.answer

    def answer(method, path, body):
        match method, path:
            case "GET", "/v1/nodes":
                return {"nodes": [node("n0", jobs=["12"]), node("n1")]}
            case "GET", "/v1/me":
                return {"user": "ada", "role": "user", "token_id": "t1", "actions": fake.actions}
            case "GET", "/v1/profile":
                return {"profile": None}
            case _:
                return known(method, path, body)

    fake.actions = ["see", "operate"]
    fake.answer = answer  # type: ignore[method-assign]
    yield fake
    fake.close()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["calibrate"], 75, "1 of 2 nodes is busy with job 12 (wait with --wait, or measure the others with --nodes)"),
        (["calibrate", "--nodes", "n7"], 64, "no node 'n7'"),
        (["calibrate", "--nodes", "n["], 64, "--nodes"),
        (["calibrate", "--nodes", "n1", "--wait"], 64, "--wait and --nodes"),
        (["calibrate", "--show"], 64, "this fleet has no calibration"),
    ],
)
def test_what_cannot_be_is_one_line_and_submits_nothing(head, capsys, words, code, said):
    assert main(words) == code
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.count("\n") == 1
    assert head.sent("POST", "/v1/jobs") == []


def test_who_may_not_store_a_profile_does_not_measure_one(head, capsys):
    head.actions = ["see", "submit"]
    assert main(["calibrate", "--nodes", "n1"]) == 77
    assert "ada may not store the fleet's profile" in capsys.readouterr().err
    assert head.sent("POST", "/v1/jobs") == []


def test_a_fleet_that_its_queue_cannot_admit_is_said_and_released(head, capsys):
    """The command waited with its job for ever."""
    answer, released = head.answer, []

    def watched(method, path, body):
        if method == "DELETE":
            released.append(path)
        return answer(method, path, body)

    head.answer = watched
    head.reservation = {"id": "calibrate-1", "nodes": ["n1"], "start_s": 1.0, "end_s": 2.0, "holders": "ada"}
    head.refuse["/v1/jobs"] = (422, "never_fits", "8 GPUs asked; queue default allows 6 a user", "")
    assert main(["calibrate", "--nodes", "n1"]) == 64
    assert "8 GPUs asked; queue default allows 6 a user" in capsys.readouterr().err
    assert len(released) == 1


def test_a_dry_run_says_what_would_be_measured_and_submits_nothing(head, capsys):
    assert main(["calibrate", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "2 nodes x 8 NVIDIA H100 80GB HBM3: n[0-1]" in shown
    assert "every pair of nodes" in shown
    assert head.sent("POST", "/v1/jobs") == []
