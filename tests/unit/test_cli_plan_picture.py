"""The picture of a plan: every rank once, in the colour of its stage; a time line as long as the step; files that open."""

from xml.etree import ElementTree

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from phalanx.cli.figure_files import WIDTH, inline_svg, picture_format, render
from phalanx.cli.figure_page import FORMATS, write_picture
from phalanx.cli.plan.placement_chart import axis_legend, placement_diagram
from phalanx.cli.plan.step_chart import items_diagram, schedule_chart
from phalanx.core.errors import BadRequest
from phalanx.core.work.layouts.layout import Axis, parse_layout

FORWARD, BACKWARD, AFTER = "#2a6fd0", "#2e9c6a", "#d8433d"


def words(diagram):
    return [label.text for label in diagram.labels]


def fleet(text, *, layers=32, nodes=2, gpus_per_node=4):
    return placement_diagram(parse_layout(text), layers=layers, nodes=nodes, gpus_per_node=gpus_per_node, gpu="h100")


def plotted(chart):
    """The axes of a chart, as matplotlib will draw them."""
    axes = Figure().subplots()
    chart.plot(axes)
    return axes


def spans(axes, *colours):
    """(start, end) of each bar on the axes in one of the colours."""
    found = []
    for bars in axes.collections:
        for path, paint in zip(bars.get_paths(), bars.get_facecolors(), strict=False):
            if to_hex(paint) in colours:
                xs = path.vertices[:, 0]
                found.append((min(xs), max(xs)))
    return found


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
    squares = [box for box in sheet.boxes if box.opacity == 0.8]
    assert len(squares) == 1024
    assert "nodes 0 to 127, coloured by pipeline stage" in words(sheet)
    assert "..." in words(sheet)
    assert "and 124 more equal nodes" in words(fleet("dp=1024", nodes=128, gpus_per_node=8))
    beyond = fleet("pp=8,dp=1024", nodes=1024, gpus_per_node=8)
    assert any("512 more continue the pattern" in text for text in words(beyond))


@pytest.mark.parametrize(
    ("text", "nodes", "each"), [("single", 1, 1), ("tp=2,pp=2,fsdp=2", 2, 4), ("dp=48", 3, 16), ("dp=72", 9, 8)]
)
def test_nothing_leaves_the_diagram(text, nodes, each):
    layout = parse_layout(f"{text},accumulate=4" if text != "single" else text)
    diagrams = [
        placement_diagram(layout, layers=32, nodes=nodes, gpus_per_node=each, gpu="h100"),
        items_diagram("memory", [("a", 1.0), ("b", 3.0), ("none", 0.0)], "GB"),
    ]
    for diagram in diagrams:
        assert all(box.x >= 0 and box.x + box.width <= WIDTH for box in diagram.boxes)
        assert all(box.y >= 0 and box.y + box.height <= diagram.height for box in diagram.boxes)
        assert all(0 <= label.x <= WIDTH and 0 <= label.y <= diagram.height for label in diagram.labels)


def test_time_line_ends_with_the_step():
    axes = plotted(schedule_chart(parse_layout("pp=4,accumulate=8,dp=2"), step_s=3.0, after_s=0.5))
    work, after = spans(axes, FORWARD, BACKWARD), spans(axes, AFTER)
    assert len(work) == 4 * 8 * 2
    assert max(end for _, end in work) == pytest.approx(2.5)
    assert after == [(pytest.approx(2.5), pytest.approx(3.0))] * 4
    assert axes.get_xlim() == (0.0, 3.0)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["P0", "P1", "P2", "P3"]
    assert axes.get_xlabel() == "seconds"


def test_long_step_shows_its_first_micro_batches_and_says_so():
    axes = plotted(schedule_chart(parse_layout("pp=16,accumulate=1024"), step_s=30.0, after_s=0.5))
    title = "One step of 30.0 s, stage by stage: 96 of 1024 micro-batches, the rest repeat the middle"
    assert axes.get_title(loc="left") == title


def test_items_stand_largest_first_with_their_share():
    shown = words(items_diagram("step", [("small", 1.0), ("large", 3.0), ("none", 0.0)], "s"))
    assert shown == ["step", "large", "3 s  75%", "small", "1 s  25%"]


def test_what_is_left_of_the_memory_stays_empty():
    diagram = items_diagram("memory", [("states", 20.0)], "GB", whole=80.0)
    assert "20 GB  25%" in words(diagram)
    filled = [box for box in diagram.boxes if box.opacity and box.height == 28]
    assert [box.x + box.width for box in filled] == [pytest.approx(0.25 * WIDTH, rel=0.02)]


def panels():
    layout = parse_layout("tp=2,fsdp=4")
    return [("placement", fleet("tp=2,fsdp=4")), ("step", schedule_chart(layout, step_s=1.0, after_s=0.1))]


def test_svg_is_xml_and_needs_no_page(tmp_path):
    path = tmp_path / "plan.svg"
    write_picture(str(path), panels(), title="a < b & c", lead="$49,000 a run", command="phalanx plan")
    root = ElementTree.parse(path).getroot()
    assert root.attrib["aria-label"] == "a < b & c"
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b & c", "$49,000 a run", "rank 7", "forward", "One step of 1.00 s"} <= set(texts)
    assert "var(" not in path.read_text()


def test_page_holds_every_panel_and_the_command(tmp_path):
    path = tmp_path / "plan.html"
    write_picture(str(path), panels(), title="t", lead="<b>", command="phalanx plan '<x>'")
    text = path.read_text()
    assert text.count("<svg") == 2
    assert "<table" not in text.split("</style>")[1]
    assert "phalanx plan &#x27;&lt;x&gt;&#x27;" in text
    assert "<b>" not in text.split("</style>")[1]


def test_part_of_a_bar_names_itself_under_the_pointer():
    svg = inline_svg(items_diagram("memory", [("a & b", 20.0)], "GB"), "memory")
    assert "<title>a &amp; b: 20 GB</title>" in svg
    assert ' id="tip' not in svg


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_equal_plans_give_equal_files_of_each_kind(kind, magic):
    first, second = (render([panel for _, panel in panels()], kind, title="t", lines=["costs $1"]) for _ in range(2))
    assert first.startswith(magic)
    assert first == second


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("plan.gif", "must end in .svg, .png or .html"),
        ("nowhere/plan.svg", "does not exist"),
        ("folder.svg", "is a folder"),
    ],
)
def test_no_place_for_a_picture_is_told_before_anything_is_planned(tmp_path, monkeypatch, path, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(BadRequest, match=told):
        picture_format(path, FORMATS)
