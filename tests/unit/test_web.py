"""The dashboard's files: what lies in the package is what its list says, and markup is escaped."""

import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from phalanx.web.assets import load_assets
from phalanx.web.html import element, join, page_path, table
from phalanx.wire.api.cell_states import CellState

STATIC = files("phalanx.web").joinpath("static")
VENDOR = STATIC.joinpath("vendor")
LIST = json.loads(VENDOR.joinpath("vendor.json").read_bytes())


class Parsed(HTMLParser):
    """The tags with their attributes, and the text, as a browser reads them."""

    def __init__(self, markup):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(markup)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def test_every_file_of_another_project_is_listed_with_version_licence_and_hash():
    listed = {file["name"]: file["sha256"] for package in LIST["packages"] for file in package["files"]}
    there = {one.name: one.read_bytes() for one in VENDOR.iterdir() if one.name != "vendor.json"}
    assert {name: hashlib.sha256(body).hexdigest() for name, body in there.items()} == listed
    for package in LIST["packages"]:
        assert re.fullmatch(r"\d+\.\d+\.\d+", package["version"])
        assert package["licence"] in ("MIT", "Apache-2.0")
        assert len(package["licence_text"]) > 500


def test_modules_import_only_files_that_are_served():
    assets = load_assets().by_name
    for name, asset in assets.items():
        folder = name.rpartition("/")[0]
        for imported in re.findall(rb'(?:\bfrom|\bimport)\s*\(?"([^"]+)"', asset.body) if name.endswith(".js") else []:
            assert imported.startswith(b"./"), (name, imported)
            assert f"{folder}/{imported.decode()[2:]}".lstrip("/") in assets, (name, imported)


def test_own_files_hold_no_address_of_another_host():
    for name, asset in load_assets().by_name.items():
        if not name.startswith("vendor/"):
            found = set(re.findall(rb"https?://[^\s\"')]+", asset.body))
            assert found <= {b"http://www.w3.org/2000/svg"}, name


def test_every_state_has_a_letter_and_a_colour_of_its_own():
    style = load_assets().by_name["dashboard.css"].body.decode()
    assert len({state.letter for state in CellState}) == len(CellState)
    for state in CellState:
        assert f".cell.{state.value} {{ background: var(--c-{state.value});" in style
        assert style.count(f"--c-{state.value}:") == 2  # light and dark


def test_path_of_the_files_changes_with_their_content():
    assets = load_assets()
    assert assets.path == f"/web/{assets.version}"
    assert all(len(asset.compressed) < max(200, len(asset.body)) for asset in assets.by_name.values())


@pytest.mark.parametrize(
    "text", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "' onmouseover='x", "&lt;"]
)
def test_text_never_becomes_markup(text):
    shown = element("a", text, title=text, href=page_path("jobs", text, q=text))
    parsed = Parsed(shown)
    ((tag, attributes),) = parsed.tags
    assert (tag, sorted(attributes), attributes["title"], parsed.text) == ("a", ["href", "title"], text, text)
    assert element("td", join(text)) == element("td", text)
    assert "<script" not in table((text,), [(text,)], caption=text, empty="")


@pytest.mark.parametrize("segment", ["..", ".", "a/../b", "//evil", "?x", "#y", "a b"])
def test_a_name_in_a_path_stays_one_segment(segment):
    path = page_path("nodes", segment)
    assert path.count("/") == 2
    assert not set("?# ") & set(path)
    assert path.rpartition("/")[2].strip(".")
