"""The shipped tables, and what the strict reader says of a table that somebody wrote by hand."""

import csv
import io

import hypothesis.strategies as st
import pytest
from hypothesis import given

from phalanx.core.errors import BadFile, PhalanxError
from phalanx.planner.facts.gpus import parse_gpu_table, read_gpus
from phalanx.planner.facts.instances import read_instances, read_networks
from phalanx.planner.facts.machines import default_figure
from phalanx.planner.facts.mig import find_mig_gpu, parse_mig_tables
from phalanx.planner.facts.models import parse_model_table, read_models
from phalanx.planner.facts.prices import parse_price_table, read_prices
from phalanx.planner.facts.table import TableColumns, is_date, read_rows
from phalanx.planner.facts.table_files import (
    read_json,
    read_text,
    shipped_json,
    shipped_text,
)

COLUMNS = TableColumns(required=("name", "size"), optional=("note",))
SHIPPED = (
    "gpus.csv",
    "instances.csv",
    "networks.csv",
    "prices.csv",
    "models.csv",
    "assumed.csv",
    "hosts.csv",
    "mig_gpus.csv",
    "mig_profiles.csv",
)


def rows(text):
    return read_rows(text, "mine.csv", COLUMNS)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_row_has_a_source_and_a_date(name):
    found = list(csv.DictReader(io.StringIO(shipped_text(name))))
    assert found
    for row in found:
        assert row["source"].strip(), row
        assert is_date(row["date"]), row


def test_every_price_is_of_a_known_gpu_and_is_dated():
    known = {entry.gpu.name for entry in read_gpus()}
    assert len(read_prices()) > 40
    for entry in read_prices():
        assert entry.gpu in known
        assert is_date(entry.price.fact.date)
        assert entry.price.fact.source
        assert entry.price.usd_per_gpu_hour > 0


def test_every_instance_is_of_a_known_gpu_and_the_three_clouds_are_there():
    known = {entry.gpu.name for entry in read_gpus()}
    assert {entry.cloud for entry in read_instances()} == {"AWS", "Azure", "GCP"}
    assert all(entry.gpu in known for entry in read_instances())


def test_a_measured_rate_is_below_the_peak_and_says_who_measured():
    measured = [entry.gpu for entry in read_gpus() if entry.gpu.best_flops]
    assert len(measured) >= 5
    for gpu in measured:
        assert all(0 < rate < gpu.flops[name] for name, rate in gpu.best_flops.items())


def test_a_figure_nobody_stated_is_called_assumed():
    value, fact = default_figure("storage_gb_per_s")
    assert value > 0
    assert fact.source.startswith("assumed")
    assert any(network.name == "ib-ndr" for network in read_networks())


def test_a_table_is_read_with_comments_and_empty_lines_between():
    found = rows("# mine\nname,size,source,date\n\na,1,me,2026\n# older\nb, 2 ,me,2026-11\n")
    assert [(row.text("name"), row.integer("size"), row.line) for row in found] == [("a", 1, 4), ("b", 2, 6)]


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("", "mine.csv: no header", "name,size,note,source,date"),
        ("name,size,source\n", "line 1: missing column 'date'", "required"),
        ("nmae,size,source,date\n", "line 1: unknown column 'nmae'", "did you mean 'name'?"),
        ("name,name,size,source,date\n", "line 1: column 'name' is listed twice", ""),
        ("name,size,source,date\na,1,me\n", "line 2: 3 cells, but the header has 4", "double quotes"),
        ("name,size,source,date\na,1,me,2026\n,1,me,2026\n", "line 3, column name: is empty", ""),
        ("name,size,source,date\na,1,,2026\n", "line 2, column source: is empty; every fact needs a source", ""),
        ("name,size,source,date\na,1,me,\n", "line 2, column date: is empty; every fact needs a date", "2026-11"),
        ("name,size,source,date\na,1,me,lately\n", "column date: 'lately' is not a date", "2026-11"),
        ("name,size,source,date\na,1,me,2026-02-30\n", "column date: '2026-02-30' is not a date", "2026-11"),
        ('name,size,source,date\n"a,1,me,2026\n', "line 2", ""),
    ],
)
def test_what_is_wrong_with_a_table_is_named_by_line_and_column(text, said, hint):
    with pytest.raises(BadFile) as caught:
        rows(text)
    assert said in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize("size", ["much", "-1", "nan", "inf", "1.5", "", "1e999"])
def test_a_size_that_is_no_whole_number_is_refused(size):
    row = rows(f"name,size,note,source,date\na,0,{size},me,2026\n")[0]
    with pytest.raises(BadFile, match=r"mine\.csv line 2, column note"):
        row.integer("note")


def test_a_price_without_a_date_is_refused():
    header = "offer,gpu,kind,region,usd_per_gpu_hour,source,date\n"
    assert (
        parse_price_table(header + "own,h100,on-demand,,2.5,invoice,2026-11\n", "mine.csv")[0].gpu == "h100-sxm5-80gb"
    )
    with pytest.raises(BadFile, match="line 2, column date: is empty"):
        parse_price_table(header + "own,h100,on-demand,,2.5,invoice,\n", "mine.csv")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("own,h100,on-demand,,12.29,invoice,2026-11", ""),
        ("own,h100,on-demand,,98.32,invoice,2026-11", "per GPU and hour is outside 0 to 50"),
        ("own,h100,on-demand,,-1,invoice,2026-11", "must be 0 or more"),
        ("own,h1000,on-demand,,2,invoice,2026-11", "column gpu: unknown GPU 'h1000'"),
    ],
)
def test_a_price_that_cannot_be_is_refused(row, said):
    text = f"offer,gpu,kind,region,usd_per_gpu_hour,source,date\n{row}\n"
    if not said:
        assert len(parse_price_table(text, "mine.csv")) == 1
        return
    with pytest.raises(BadFile) as caught:
        parse_price_table(text, "mine.csv")
    assert said in caught.value.message


def test_a_gpu_or_model_that_stands_there_twice_is_refused():
    for name, read in (("gpus.csv", parse_gpu_table), ("models.csv", parse_model_table)):
        text = shipped_text(name)
        with pytest.raises(BadFile, match="is listed twice"):
            read(text + text.splitlines()[1] + "\n", name)


@given(st.text(alphabet='abc,"#\n\r e1-.;=', max_size=200))
def test_any_text_is_a_table_or_refused_in_our_words(text):
    said = "mine.csv is read"
    try:
        rows("name,size,source,date\n" + text)
    except PhalanxError as error:
        said = error.message
    assert said.startswith("mine.csv")


@given(st.integers(2000, 2099), st.integers(0, 13), st.integers(0, 32))
def test_a_date_is_one_of_the_calendar(year, month, day):
    import datetime

    try:
        datetime.date(year, month, day)
        real = True
    except ValueError:
        real = False
    assert is_date(f"{year:04}-{month:02}-{day:02}") is real


def test_a_file_that_is_not_there_or_is_no_text_is_one_line(tmp_path):
    with pytest.raises(BadFile, match="No such file"):
        read_text(str(tmp_path / "none.csv"))
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadFile, match="not UTF-8"):
        read_text(str(tmp_path / "binary.csv"))
    for hostile in ("{", "[" * 100_000, "1" * 10_000):
        (tmp_path / "broken.json").write_text(hostile)
        with pytest.raises(BadFile, match="not valid JSON"):
            read_json(str(tmp_path / "broken.json"))
    with pytest.raises(BadFile, match="missing from this installation"):
        shipped_json("never.json")


def test_every_shipped_table_is_in_the_wheel():
    import tomllib
    from importlib import resources
    from pathlib import Path

    shipped = {path.name for path in resources.files("phalanx.planner.facts").joinpath("tables").iterdir()}
    assert set(SHIPPED) <= shipped
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["*"]
    assert {f"**/*.{name.rsplit('.', 1)[1]}" for name in shipped} <= set(patterns)


MIG_GPUS = "name,aliases,memory_slices,compute_slices,source,date\nx,the x,4,3,me,2026\n"
MIG_PROFILES = "gpu,profile,id,compute_slices,memory_slices,starts,max_instances,memory_mib,source,starts_source,date\n"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("x,1g,19,1,2,0;2,2,64,me,me,2026", ""),
        ("x,1g,19,1,2,0;3,2,64,me,me,2026", "column starts: are not ascending starts of 2 of 4 memory slices"),
        ("x,1g,19,1,2,2;0,2,64,me,me,2026", "column starts: are not ascending"),
        ("x,1g,19,1,2,0;b,2,64,me,me,2026", "column starts: 'b' is not a whole number"),
        ("x,1g,19,4,2,0,2,64,me,me,2026", "column compute_slices: is above 3"),
        ("x,1g,19,1,2,0,2,64,me,,2026", "column starts_source: is empty"),
        ("y,1g,19,1,2,0,2,64,me,me,2026", "x has no row in mig_profiles.csv"),
        ("x,1g,19,1,2,0,2,64,me,me,2026\nx,1g,18,1,2,0,2,64,me,me,2026", "1g of x is listed twice"),
        ("x,1g,19,1,2,0,2,64,me,me,2026\ny,1g,18,1,2,0,2,64,me,me,2026", "y has no row in mig_gpus.csv"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(row, said):
    if not said:
        assert parse_mig_tables(MIG_GPUS, MIG_PROFILES + row + "\n")[0].profiles[0].starts == (0, 2)
        return
    with pytest.raises(BadFile) as caught:
        parse_mig_tables(MIG_GPUS, MIG_PROFILES + row + "\n")
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("h100", "h100-80gb"),
        ("H100:80GB", "h100-80gb"),
        ("NVIDIA H100 NVL", "h100-94gb"),
        ("NVIDIA GH200 480GB", "h100-96gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA A30", "a30-24gb"),
        ("NVIDIA B200", "b200-180gb"),
        ("NVIDIA H200", None),
        ("Tesla T4", None),
        ("virtual", None),
    ],
)
def test_a_gpu_that_can_be_divided_is_found_by_its_names(name, found):
    entry = find_mig_gpu(name)
    assert (None if entry is None else entry.name) == found


def test_the_tables_have_what_people_plan_with():
    assert len(read_gpus()) >= 25
    assert len(read_models()) >= 90


def test_the_page_of_facts_names_every_row_and_every_kind_of_config():
    from pathlib import Path

    from phalanx.planner.facts.model_configs import CONFIG_READERS

    page = (Path(__file__).resolve().parents[2] / "docs" / "facts.md").read_text()
    named = set(page.replace("`", " ").split())
    rows = [entry.gpu.name for entry in read_gpus()] + [entry.model.name for entry in read_models()]
    rows += [entry.name for entry in read_instances()] + [entry.name for entry in read_networks()]
    assert not set(rows) - named
    assert not set(CONFIG_READERS) - named - {"llama4_text"}
