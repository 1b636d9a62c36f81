"""Engines by name: the built-in ones, those of other packages, and packages that are broken."""

import pytest

from phalanx.core.errors import BadRequest
from phalanx.engines import registry
from phalanx.ports.engine import EngineOption, EngineType


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Install packages with these entry points; `far` is a good one."""
    (tmp_path / "far_engine.py").write_text(
        "from phalanx.ports.engine import EngineType\nclass Far(EngineType):\n    name, title = 'far', 'Far'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def install(**points):
        folder = tmp_path / "far-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: far\nVersion: 1.0\n")
        lines = "".join(f"{name} = {value}\n" for name, value in points.items())
        (folder / "entry_points.txt").write_text(f"[phalanx.engines]\n{lines}")

    for cached in (registry._installed, registry._load):
        cached.cache_clear()
    yield install
    for cached in (registry._installed, registry._load):
        cached.cache_clear()


def names():
    return [engine.name for engine in registry.selectable_engines()]


def test_built_in_engines_need_no_metadata(monkeypatch):
    monkeypatch.setattr(registry, "_installed", tuple)
    assert names() == ["local", "ray", "slurm", "kubernetes"]
    assert registry.engine_type("joined").selectable is False


def test_an_engine_of_another_package_comes_after_them(packages):
    packages(far="far_engine:Far")
    assert names() == ["local", "ray", "slurm", "kubernetes", "far"]
    assert registry.engine_type("far").title == "Far"


def test_a_built_in_name_cannot_be_taken_over(packages):
    packages(slurm="far_engine:Far")
    assert registry.engine_type("slurm").title == "Slurm"
    assert names() == ["local", "ray", "slurm", "kubernetes"]


def test_a_package_that_cannot_be_imported_stops_no_other(packages, caplog):
    packages(broken="nowhere:Engine", far="far_engine:Far")
    assert names() == ["local", "ray", "slurm", "kubernetes", "far"]
    assert "the engine broken cannot be imported" in caplog.text
    with pytest.raises(BadRequest, match="the engine broken cannot be imported: No module named 'nowhere'"):
        registry.engine_type("broken")
    with pytest.raises(BadRequest, match="the engine other is not installed here"):
        registry.engine_type("other")


def test_an_option_is_as_given_else_as_stored_else_empty():
    class Example(EngineType):
        name = title = "example"
        options = (EngineOption(name="place", metavar="P", help="", reset="off"),)

    assert Example().resolve({}, None) == {"place": ""}
    assert Example().resolve({}, {"place": "a", "of an older release": "x"}) == {"place": "a"}
    assert Example().resolve({"place": "b"}, {"place": "a"}) == {"place": "b"}
    assert Example().resolve({"place": "off"}, {"place": "a"}) == {"place": ""}
