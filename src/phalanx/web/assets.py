"""The files that pages load: read once from the package, compressed once, under a path that holds the hash of their contents.

A browser may keep such a file for ever, since another content has another path. Modules of other projects lie in `static/vendor` byte by
byte as their npm packages have them; `vendor.json` has their versions, licences and SHA-256. They import each other by the names of their
packages, which a browser resolves only with an inline import map, and the pages allow nothing inline. So the served text names the files.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

ROOT_PATH: Final = "/web"
_TYPES: Final = {
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
_VENDOR: Final = "vendor/"
# A script that defines one global, served as a module.
_GLOBALS: Final = {"vendor/uplot.js": b"\nexport default uPlot;\n"}
_FILE_IMPORT: Final = re.compile(rb'\b(?:from|import)\s*"\./([a-z/.-]+)"')
_IMPORT: Final = re.compile(rb'(\bfrom|\bimport)\s*"(@?[a-z][a-z/-]*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """One file. `etag` is the quoted hash of its body; `compressed` is the body by gzip."""

    body: bytes
    compressed: bytes
    media_type: str
    etag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Assets:
    """All files by name. `path`: the folder in the head's URLs, with the hash of all files."""

    path: str
    version: str
    by_name: dict[str, Asset]


@cache
def load_assets() -> Assets:
    """Return all files. About 20 ms at the first call."""
    static = files("phalanx.web").joinpath("static")
    imports = json.loads(static.joinpath("vendor/vendor.json").read_bytes())["imports"]
    by_name = {}
    for name, file in _walk(static, ""):
        kind = _TYPES.get(name.rpartition(".")[2])
        if kind is not None:
            by_name[name] = _asset(_served(name, file.read_bytes(), imports), kind)
    whole = hashlib.sha256("".join(f"{name} {by_name[name].etag}\n" for name in sorted(by_name)).encode())
    version = whole.hexdigest()[:16]
    return Assets(path=f"{ROOT_PATH}/{version}", version=version, by_name=by_name)


@cache
def modules_of(page: str) -> tuple[str, ...]:
    """Return all modules that a page imports, so that a browser loads them at once instead of one import after the other."""
    assets = load_assets()
    found: dict[str, None] = {}
    pending = ["dashboard.js", *([own] if (own := f"{page}.js") in assets.by_name else [])]
    while pending:
        name = pending.pop()
        if name in found or name not in assets.by_name:
            continue
        found[name] = None
        folder = name.rpartition("/")[0]
        imported = [match[1].decode() for match in _FILE_IMPORT.finditer(assets.by_name[name].body)]
        pending += [f"{folder}/{file}" if folder else file for file in imported]
    return tuple(found)


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, Traversable]]:
    found = []
    for one in sorted(folder.iterdir(), key=lambda entry: entry.name):
        found += _walk(one, f"{prefix}{one.name}/") if one.is_dir() else [(prefix + one.name, one)]
    return found


def _served(name: str, body: bytes, imports: dict[str, str]) -> bytes:
    """Return the file as it is served: another project's module imports files of its folder instead of packages."""
    if not name.startswith(_VENDOR):
        return body

    def replace(match: re.Match[bytes]) -> bytes:
        return match[1] + f'"./{imports[match[2].decode()]}"'.encode()

    without_map = re.sub(rb"\n?//# sourceMappingURL=.*", b"", body)
    return _IMPORT.sub(replace, without_map) + _GLOBALS.get(name, b"")


def _asset(body: bytes, media_type: str) -> Asset:
    return Asset(
        body=body,
        compressed=gzip.compress(body, 9, mtime=0),
        media_type=media_type,
        etag=f'"{hashlib.sha256(body).hexdigest()[:32]}"',
    )
