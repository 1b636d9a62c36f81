"""The picture of a plan: every rank once, in the colour of its stage; a time line as long as the step; files that open."""

from xml.etree import ElementTree

import pytest

from phalanx.cli.plan.picture import picture_format, stack_sheets, write_picture
from phalanx.cli.plan.placement_chart import axis_legend, placement_sheet
from phalanx.cli.plan.step_chart import items_sheet, schedule_sheet
from phalanx.cli.simulate.charts import (
    WIDTH,
    ChartArea,
    ChartLine,
    TextLabel,
)
from phalanx.core.errors import BadRequest
from phalanx.core.work.layout import Axis, parse_layout


def words(sheet):
    return [shape.text for shape in sheet.shapes if isinstance(shape, TextLabel)]


def fleet(text, *, layers=32, nodes=2, gpus_per_node=4):
    return placement_sheet(parse_layout(text), layers=layers, nodes=nodes, gpus_per_node=gpus_per_node, gpu="h100")


def places(sheet):
    for shape in sheet.shapes:
        match shape:
            case ChartLine(points, _, _) | ChartArea(points, _, _, _):
                yield from points
            case TextLabel(x, y, _, _, _, _):
                yield x, y
            case _:
                raise AssertionError(shape)


def test_every_rank_is_drawn_once_with_its_place():
    shown = words(fleet("tp=2,pp=2,fsdp=2"))
    assert [text for text in shown if text.startswith("rank ")] == [f"rank {rank}" for rank in range(8)]
    layout = parse_layout("tp=2,pp=2,fsdp=2")
    for rank in range(8):
        at = layout.coordinates(rank)
        assert shown[shown.index(f"rank {rank}") + 1] == f"T{at[Axis.TENSOR]} F{at[Axis.SHARD]} P{at[Axis.PIPELINE]}"


def test_layers_are_named_for_each_stage():
    assert [text for _, text in axis_legend(parse_layout("pp=2,dp=2"), 7)] == [
        "P0: layers 0 to 3, the embedding",
        "P1: layers 4 to 6, the output and the loss",
        "D0..D1: other samples, a full replica",
    ]
    interleaved = [text for _, text in axis_legend(parse_layout("pp=2,vpp=2,tp=2,sp=1"), 8)]
    assert interleaved[0] == "P0: layers 0 to 1, 4 to 5, the embedding"
    assert interleaved[2] == "T0..T1: 1/2 of the heads and columns of every matrix and of the sequence between them"
    assert (
        next(axis_legend(parse_layout("fsdp=2"), 4))[1]
        == "every rank: layers 0 to 3, the embedding, the output and the loss"
    )


def test_context_ranks_share_the_states_too():
    told = [text for _, text in axis_legend(parse_layout("cp=2,fsdp=4"), 4)]
    assert "F0..F3: other samples" in told
    assert "C and F together: each 1/8 of the parameters, gradients and optimizer states" in told


def test_all_of_a_large_fleet_is_on_its_map():
    sheet = fleet("tp=8,pp=16,dp=8", nodes=128, gpus_per_node=8, layers=80)
    squares = [shape for shape in sheet.shapes if isinstance(shape, ChartArea) and shape.opacity == 0.8]
    assert len(squares) == 1024
    assert "nodes 0 to 127, coloured by pipeline stage" in words(sheet)
    assert "..." in words(sheet)
    assert "and 124 more equal nodes" in words(fleet("dp=1024", nodes=128, gpus_per_node=8))
    beyond = fleet("pp=8,dp=1024", nodes=1024, gpus_per_node=8)
    assert any("512 more continue the pattern" in text for text in words(beyond))


@pytest.mark.parametrize(
    ("text", "nodes", "each"), [("single", 1, 1), ("tp=2,pp=2,fsdp=2", 2, 4), ("dp=48", 3, 16), ("dp=72", 9, 8)]
)
def test_nothing_leaves_the_sheet(text, nodes, each):
    layout = parse_layout(f"{text},accumulate=4" if text != "single" else text)
    sheets = [
        placement_sheet(layout, layers=32, nodes=nodes, gpus_per_node=each, gpu="h100"),
        schedule_sheet(layout, step_s=2.0, after_s=0.2),
        items_sheet("memory", [("a", 1.0), ("b", 3.0), ("none", 0.0)], "GB"),
    ]
    for sheet in sheets:
        assert all(0 <= x <= WIDTH and 0 <= y <= sheet.height for x, y in places(sheet))


def test_time_line_ends_with_the_step():
    layout = parse_layout("pp=4,accumulate=8,dp=2")
    sheet = schedule_sheet(layout, step_s=3.0, after_s=0.5)
    boxes = [shape for shape in sheet.shapes if isinstance(shape, ChartArea) and shape.colour in {"s0", "s2"}]
    drawn = [box for box in boxes if box.base < 34.0 + 4 * 26.0]
    assert len(drawn) == 4 * 8 * 2
    ends = [
        shape for shape in sheet.shapes if isinstance(shape, ChartArea) and shape.colour == "s3" and shape.base < 138.0
    ]
    last = max(box.points[1][0] for box in drawn)
    assert last == pytest.approx(ends[0].points[0][0], abs=1.0)
    assert ends[0].points[1][0] == pytest.approx(WIDTH - 16.0)


def test_long_step_shows_its_first_micro_batches_and_says_so():
    sheet = schedule_sheet(parse_layout("pp=16,accumulate=1024"), step_s=30.0, after_s=0.5)
    assert words(sheet)[0] == "One step of 30.0 s, stage by stage: 96 of 1024 micro-batches, the rest repeat the middle"


def test_items_stand_largest_first_with_their_share():
    shown = words(items_sheet("step", [("small", 1.0), ("large", 3.0), ("none", 0.0)], "s"))
    assert shown == ["step", "large", "3 s  75%", "small", "1 s  25%"]


def test_what_is_left_of_the_memory_stays_empty():
    sheet = items_sheet("memory", [("states", 20.0)], "GB", whole=80.0)
    assert "20 GB  25%" in words(sheet)
    bar = max((shape for shape in sheet.shapes if isinstance(shape, ChartArea)), key=lambda area: area.points[-1][0])
    assert bar.points[-1][0] == pytest.approx(0.25 * WIDTH, rel=0.02)


def sheets():
    return [fleet("tp=2,fsdp=4"), schedule_sheet(parse_layout("tp=2,fsdp=4"), step_s=1.0, after_s=0.1)]


def test_svg_is_xml_and_needs_no_page(tmp_path):
    path = tmp_path / "plan.svg"
    write_picture(str(path), sheets(), title="a < b & c", lead="$49,000 a run", command="phalanx plan", version="1")
    root = ElementTree.parse(path).getroot()
    assert root.attrib["aria-label"] == "a < b & c"
    assert "var(" not in path.read_text()


def test_page_holds_every_sheet_and_the_command(tmp_path):
    path = tmp_path / "plan.html"
    write_picture(str(path), sheets(), title="t", lead="<b>", command="phalanx plan '<x>'", version="1")
    text = path.read_text()
    assert text.count("<svg") == 2
    assert "phalanx plan &#x27;&lt;x&gt;&#x27;" in text
    assert "<b>" not in text.split("</style>")[1]


def test_png_is_one(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    write_picture(str(path), sheets(), title="t", lead="costs $1", command="c", version="1")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_sheets_stand_below_each_other():
    whole = stack_sheets(sheets(), "title", "lead " * 60)
    assert whole.height > sum(sheet.height for sheet in sheets())
    assert all(0 <= y <= whole.height for _, y in places(whole))


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("plan.gif", "must end in one of svg, png, html"),
        ("nowhere/plan.svg", "does not exist"),
        ("folder.svg", "is a folder"),
    ],
)
def test_no_place_for_a_picture_is_told_before_anything_is_planned(tmp_path, monkeypatch, path, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(BadRequest, match=told):
        picture_format(path)
