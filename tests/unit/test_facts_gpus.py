"""What is meant by a GPU's name, and which machine a request means."""

import pytest

from phalanx.core.errors import BadFile, BadRequest
from phalanx.core.work.gpus import parse_gpus
from phalanx.planner.facts.gpus import find_gpu, read_gpus
from phalanx.planner.facts.machines import build_machine, read_fact_tables
from phalanx.planner.facts.prices import find_price, read_prices

GPU_HEADER = (
    "name,aliases,memory_gb,memory_mib,memory_gb_per_s,bf16_tflops,link_kind,link_gb_per_s,link_domain,pcie_gb_per_s,"
    "watts,gpus_per_node,network_gbit_per_gpu,network_kind,network_source,source,date\n"
)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h100", "h100-sxm5-80gb"),
        ("H100:80GB", "h100-sxm5-80gb"),
        ("h100-96hbm2e", "h100-96hbm2e"),
        ("H100-96HBM2e", "h100-96hbm2e"),
        ("h100-96gb", "h100-96hbm2e"),
        ("a100-80gb", "a100-sxm4-80gb"),
        ("a100-40gb", "a100-sxm4-40gb"),
        ("A100-40", "a100-sxm4-40gb"),
        ("a100-sxm4-40gb", "a100-sxm4-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm5-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA H100 NVL", "h100-nvl-94gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA H200", "h200-sxm-141gb"),
        ("NVIDIA GB200", "gb200-nvl72"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090-24gb"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090-24gb"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090-32gb"),
        ("NVIDIA RTX A6000", "rtx-a6000-48gb"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada-48gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000-96gb"),
        ("Tesla V100-SXM2-16GB", "v100-sxm2-16gb"),
        ("AMD Instinct MI300X", "mi300x-192gb"),
        ("cpu", "virtual"),
    ],
)
def test_a_gpu_is_known_by_the_names_of_people_and_of_its_driver(text, name):
    assert find_gpu(text).gpu.name == name


def test_every_gpu_is_found_by_its_own_name_and_every_alias_leads_to_one():
    for entry in read_gpus():
        assert find_gpu(entry.gpu.name) == entry
        for alias in entry.gpu.aliases:
            assert alias in find_gpu(alias).gpu.aliases


def test_memory_tells_two_gpus_of_one_name_apart():
    assert find_gpu("a100", memory_gib=40).gpu.name == "a100-sxm4-40gb"
    assert find_gpu("a100", memory_gib=64).gpu.name == "a100-sxm4-80gb"
    with pytest.raises(BadRequest, match="no a100 has 96 GB") as caught:
        find_gpu("a100", memory_gib=96)
    assert "a100-sxm4-80gb (80 GB)" in caught.value.hint


def test_a_name_of_several_gpus_is_the_first_of_them_and_that_is_said():
    notes: list[str] = []
    assert find_gpu("a100", notes=notes).gpu.name == "a100-sxm4-80gb"
    assert notes == ["took a100 as a100-sxm4-80gb; other variants: a100-sxm4-40gb, a100-pcie-80gb"]
    notes.clear()
    find_gpu("a100-80gb", notes=notes)
    assert notes == []


@pytest.mark.parametrize(("text", "near"), [("h1oo", "h100"), ("rtx-4091", "rtx-4090"), ("zzz", "known: a10-24gb")])
def test_an_unknown_gpu_is_refused_with_the_nearest(text, near):
    with pytest.raises(BadRequest, match="unknown GPU") as caught:
        find_gpu(text)
    assert near in caught.value.hint


def test_the_machine_of_a_shape_has_its_nodes_and_the_usual_network_with_its_source():
    notes: list[str] = []
    machine = build_machine(parse_gpus("4xh100:8"), notes=notes)
    assert (machine.gpu.name, machine.nodes, machine.gpus_per_node, machine.gpus) == ("h100-sxm5-80gb", 4, 8, 32)
    assert machine.network_bytes_per_s == 50e9
    assert machine.network_fact.source
    assert any("network between nodes not stated: assumed 400 Gbit/s per GPU" in note for note in notes)


@pytest.mark.parametrize(
    ("text", "nodes", "per_node"),
    [
        ("h100:8", 1, 8),
        ("h100:4", 1, 4),
        ("h100:16", 2, 8),
        ("h100:12", 2, 6),
        ("gb200:72", 18, 4),
        ("virtual:2", 1, 2),
    ],
)
def test_a_total_becomes_equal_nodes_as_full_as_they_go(text, nodes, per_node):
    machine = build_machine(parse_gpus(text))
    assert (machine.nodes, machine.gpus_per_node) == (nodes, per_node)


def test_an_instance_brings_gpu_network_storage_and_price():
    machine = build_machine(parse_gpus("16"), instance="p4de.24xlarge")
    assert (machine.gpu.name, machine.nodes, machine.network_kind) == ("a100-sxm4-80gb", 2, "efa")
    assert machine.network_bytes_per_s == pytest.approx(50e9 / 8)
    assert machine.storage_bytes_per_s == pytest.approx(2.375e9)
    assert machine.price is not None
    assert machine.price.offer == "AWS p4de.24xlarge"


def test_a_price_of_servers_with_a_slower_network_than_planned_says_so():
    notes: list[str] = []
    build_machine(parse_gpus("2xa100-80gb:8"), notes=notes)
    assert any("p4de.24xlarge" in note and "50 Gbit/s" in note for note in notes)
    notes.clear()
    build_machine(parse_gpus("a100-80gb:8"), notes=notes)
    assert notes == []


@pytest.mark.parametrize(
    ("text", "options", "said", "hint"),
    [
        ("8", {}, "has no GPU model", "h100:8"),
        ("h100:0", {}, "at least one GPU", "h100:8"),
        ("h100:13", {}, "13 GPUs do not divide into equal nodes of up to 8", "request 8 or 16"),
        ("h1oo:8", {}, "unknown GPU 'h1oo'", "h100"),
        ("h100:8", {"instance": "p5.48xlarg"}, "unknown instance 'p5.48xlarg'", "p5.48xlarge"),
        ("a100:8", {"instance": "p5.48xlarge"}, "p5.48xlarge has h100-sxm5-80gb", "not both"),
        ("1xh100:16", {"instance": "p5.48xlarge"}, "p5.48xlarge has 8 GPUs", ""),
        ("h100:16", {"network": "ib-nr"}, "unknown network 'ib-nr'", "ib-ndr"),
        ("h100:16", {"network_gbit_per_gpu": -1.0}, "-1 Gbit/s", ""),
        ("h100:16", {"network_gbit_per_gpu": float("nan")}, "nan Gbit/s", ""),
        ("h100:16", {"storage_gb_per_s": 0.0}, "0 GB/s per node", ""),
        ("h100:8", {"price": 2.5}, "has no date", "give price_date 2026-11"),
        ("h100:8", {"price": 2.5, "price_date": "soon"}, "'soon' is not a date", "2026-11"),
        ("h100:8", {"price": -2.5, "price_date": "2026"}, "-2.5 US dollars", ""),
        ("h100:8", {"price_kind": "spt"}, "unknown kind of price 'spt'", "spot"),
    ],
)
def test_a_machine_that_cannot_be_is_one_clear_line(text, options, said, hint):
    with pytest.raises(BadRequest) as caught:
        build_machine(parse_gpus(text), **options)
    assert said in caught.value.message
    assert hint in caught.value.hint


def test_what_the_user_states_goes_before_the_tables():
    machine = build_machine(
        parse_gpus("h100:16"), network_gbit_per_gpu=100.0, storage_gb_per_s=5.0, price=2.5, price_date="2026-11"
    )
    assert machine.network_bytes_per_s == 12.5e9
    assert machine.storage_bytes_per_s == 5e9
    assert machine.price is not None
    assert (machine.price.usd_per_gpu_hour, machine.price.fact.date) == (2.5, "2026-11")


def test_the_listed_price_is_the_newest_and_then_the_cheapest_of_the_clouds():
    machine = build_machine(parse_gpus("h100:8"))
    assert machine.price is not None
    assert machine.price.offer == "AWS p5.48xlarge"
    azure = find_price("h100-sxm5-80gb", read_prices(), offers=["azure nd96isr_h100_v5"])
    assert azure is not None
    assert azure.usd_per_gpu_hour == 12.29
    assert find_price("h100-96hbm2e", read_prices()) is None


def test_a_users_own_rows_are_laid_over_the_shipped_ones(tmp_path):
    facts = tmp_path / "facts"
    facts.mkdir()
    (facts / "gpus.csv").write_text(
        GPU_HEADER
        + "h999,h9,192,196608,9000,5000,nvlink,900,8,63,1000,8,800,infiniband,our switches,our bench,2026-11\n"
    )
    own = tmp_path / "prices.csv"
    own.write_text(
        "offer,gpu,kind,region,usd_per_gpu_hour,source,date\n"
        "our contract,h9,on-demand,,1.5,contract,2026-10\n"
        "our contract,h100,on-demand,,2.0,contract,2020-01\n"
    )
    tables = read_fact_tables(str(tmp_path), (str(own),))
    assert build_machine(parse_gpus("h9:16"), tables=tables).gpu.name == "h999"
    assert cost("h9:16", tables) == ("our contract", 1.5)
    assert cost("h100:8", tables) == ("our contract", 2.0)
    assert cost("h100:8", read_fact_tables(str(tmp_path / "empty"))) == ("AWS p5.48xlarge", 6.88)


def cost(text, tables):
    price = build_machine(parse_gpus(text), tables=tables).price
    assert price is not None
    return price.offer, price.usd_per_gpu_hour


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("nvlink", "string"), "column link_kind: 'string' is not one of nvlink, xgmi, pcie"),
        (("infiniband", "pigeons"), "column network_kind: 'pigeons'"),
        (("5000", "0"), "no precision has a rate above 0"),
        (("196608", "0"), "column memory_mib: 0 must be 1 or more"),
    ],
)
def test_a_gpu_that_cannot_be_is_refused_by_column(tmp_path, change, said):
    row = "h999,,192,196608,9000,5000,nvlink,900,8,63,1000,8,800,infiniband,our switches,our bench,2026-11\n"
    path = tmp_path / "gpus.csv"
    path.write_text(GPU_HEADER + row.replace(*change))
    with pytest.raises(BadFile) as caught:
        read_gpus(str(path))
    assert said in caught.value.message
    assert f"{path} line 2" in caught.value.message


def test_a_virtual_device_says_that_its_figures_are_assumed():
    notes: list[str] = []
    machine = build_machine(parse_gpus("3xvirtual:4"), notes=notes)
    assert machine.gpu.virtual
    assert machine.gpu.fact.source.startswith("assumed")
    assert any("calibrate" in note for note in notes)
    assert machine.price is None
