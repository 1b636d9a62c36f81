"""Charts as a PNG file, drawn here with NumPy alone: a plotting library would be the largest thing in an installation of Phalanx.

Coverage of each pixel is reckoned from distances, so that edges are smooth. Letters come as ready-made bitmaps (glyphs.json).
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.cli.simulate.charts import HEIGHT, WIDTH, Area, Line, Shape, Words

_SCALE: Final = 1.6  # pixels per unit: 1,600 across
_MARGIN: Final = 40  # pixels around
_HEAD: Final = 128  # pixels for title and figures
_THEME: Final = {
    "page": "ffffff", "ink": "16181d", "soft": "5c626d", "line": "b9bec7", "grid": "e8eaee", "s0": "2a6fd0", "s1": "e0930a", "s2": "2e9c6a",
    "s3": "d8433d", "s4": "8b63d1", "s5": "14a3b8", "s6": "b0578d", "s7": "7a7f32",
}  # fmt: skip
_LABEL, _TITLE = 22, 34  # sizes in glyphs.json

Image = NDArray[np.float64]


class _Font(NamedTuple):
    glyphs: dict[str, list[float]]  # advance, left, top, width, height, offset
    alpha: NDArray[np.uint8]
    ascent: int


def png(sheets: Sequence[Sequence[Shape]], *, title: str, lines: Sequence[str]) -> bytes:
    """The sheets one below the other, under a title and lines of text."""
    tall = int(HEIGHT * _SCALE)
    image = np.empty((_HEAD + len(sheets) * (tall + 12) + 2 * _MARGIN, int(WIDTH * _SCALE) + 2 * _MARGIN, 3))
    image[:] = _rgb("page")
    _write(image, _MARGIN, _MARGIN + 30, title, "ink", "start", _TITLE)
    for number, line in enumerate(lines):
        _write(image, _MARGIN, _MARGIN + 68 + 30 * number, line, "soft", "start", _LABEL)
    for number, shapes in enumerate(sheets):
        left, top = float(_MARGIN), float(_MARGIN + _HEAD + number * (tall + 12))
        for shape in shapes:
            _draw(image, shape, left, top)
    return _encoded(np.clip(image + 0.5, 0, 255).astype(np.uint8))


def _draw(image: Image, shape: Shape, left: float, top: float) -> None:
    if isinstance(shape, Words):
        _write(
            image, left + shape.x * _SCALE, top + shape.y * _SCALE, shape.text, shape.colour, shape.anchor, _LABEL, strong=shape.strong
        )  # fmt: skip
        return
    points = np.array(shape.points) * _SCALE + (left, top)
    if isinstance(shape, Line):
        _line(image, points, shape.colour, shape.width * _SCALE / 2)
    else:
        _area(image, points, top + shape.base * _SCALE, shape)


def _line(image: Image, points: Image, colour: str, half: float) -> None:
    """Blend a polyline: a pixel is covered as far as it lies within `half` of the nearest segment."""
    reach = half + 1.0
    low = np.maximum(np.floor(points.min(axis=0) - reach), 0).astype(int)
    high = np.ceil(points.max(axis=0) + reach).astype(int) + 1
    mask = np.zeros((high[1] - low[1], high[0] - low[0]))
    for start, end in zip(points - low, points[1:] - low, strict=False):
        x0, y0 = np.maximum(np.floor(np.minimum(start, end) - reach), 0).astype(int)
        x1, y1 = np.ceil(np.maximum(start, end) + reach).astype(int) + 1
        ys, xs = np.mgrid[y0:y1, x0:x1] + 0.5
        way = end - start
        along = np.clip(((xs - start[0]) * way[0] + (ys - start[1]) * way[1]) / max(float(way @ way), 1e-9), 0.0, 1.0)
        far = np.hypot(xs - start[0] - along * way[0], ys - start[1] - along * way[1])
        part = mask[y0:y1, x0:x1]
        np.maximum(part, np.clip(half + 0.5 - far, 0.0, 1.0)[: part.shape[0], : part.shape[1]], out=part)
    _blend(image, low[0], low[1], mask, colour)


def _area(image: Image, points: Image, base: float, shape: Area) -> None:
    """Blend what is between the polyline and the base, column by column."""
    first, last = int(np.floor(points[0, 0])), int(np.ceil(points[-1, 0]))
    columns = np.arange(first, last) + 0.5
    edges = np.interp(columns, points[:, 0], points[:, 1])
    low, high = int(np.floor(min(edges.min(), base))), int(np.ceil(max(edges.max(), base)))
    rows = np.arange(low, high)[:, None]
    tops, bottoms = np.minimum(edges, base), np.maximum(edges, base)
    mask = np.clip(np.minimum(rows + 1, bottoms) - np.maximum(rows, tops), 0.0, 1.0)
    across = np.clip(np.minimum(columns + 0.5, points[-1, 0]) - np.maximum(columns - 0.5, points[0, 0]), 0.0, 1.0)
    _blend(image, first, low, mask * across * shape.opacity, shape.colour)


def _write(
    image: Image, x: float, y: float, text: str, colour: str, anchor: str, size: int, *, strong: bool = False
) -> None:
    font = _font(size)
    glyphs = [font.glyphs.get(char, font.glyphs["?"]) for char in text]
    wide = sum(glyph[0] for glyph in glyphs)
    at = x - (wide if anchor == "end" else wide / 2 if anchor == "middle" else 0.0)
    for advance, left, top, width, height, offset in glyphs:
        if width:
            mask = font.alpha[int(offset) : int(offset + width * height)].reshape(int(height), int(width)) / 255.0
            for shift in (0, 1) if strong else (0,):
                _blend(image, round(at + left) + shift, round(y - font.ascent + top), mask, colour)
        at += advance


def _blend(image: Image, x: int, y: int, mask: Image, colour: str) -> None:
    """Lay a colour over the image as far as the mask covers; what lies outside is cut off."""
    part = image[max(y, 0) : y + mask.shape[0], max(x, 0) : x + mask.shape[1]]
    mask = mask[max(-y, 0) :, max(-x, 0) :][: part.shape[0], : part.shape[1], None]
    part += (_rgb(colour) - part) * mask


@cache
def _font(size: int) -> _Font:
    found: dict[str, Any] = json.loads(
        files("phalanx.cli.simulate").joinpath("glyphs.json").read_text(encoding="utf-8")
    )
    face = found["sizes"][str(size)]
    alpha = np.frombuffer(zlib.decompress(base64.b64decode(face["alpha"])), dtype=np.uint8)
    return _Font(face["glyphs"], alpha, face["ascent"])


@cache
def _rgb(name: str) -> Image:
    return np.array([int(_THEME[name][at : at + 2], 16) for at in (0, 2, 4)], dtype=float)


def _encoded(pixels: NDArray[np.uint8]) -> bytes:
    """The PNG file: 8 bits a channel, no filter."""
    tall, wide, _ = pixels.shape
    rows = np.concatenate([np.zeros((tall, 1), dtype=np.uint8), pixels.reshape(tall, wide * 3)], axis=1)

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", wide, tall, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows.tobytes(), 9))
        + chunk(b"IEND", b"")
    )
