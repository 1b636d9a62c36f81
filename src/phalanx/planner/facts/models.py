"""Read the table of model shapes, and resolve model names."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from phalanx.core.errors import BadFile, BadRequest
from phalanx.core.work.nearest_match import suggestion
from phalanx.planner.cost.machine import FactSource
from phalanx.planner.cost.model_shape import AttentionWindow, LatentAttention, MixtureOfExperts, ModelShape
from phalanx.planner.facts.table import TableColumns, TableRow, read_named_records
from phalanx.planner.facts.table_files import read_text, shipped_text
from phalanx.planner.facts.validation import validate_model

_MIXTURE_COLUMNS: Final = ("experts", "per_token", "expert_ffn", "shared_ffn", "dense_layers", "groups", "group_limit")
_LATENT_COLUMNS: Final = ("query_rank", "kv_rank", "rope_dim", "value_dim")
_WINDOW_COLUMNS: Final = ("window", "window_layers")
_FLAG_COLUMNS: Final = ("gated", "tied", "positions", "biases", "norm_vectors")
COLUMNS: Final = TableColumns(
    required=("name", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "published_parameters"),
    optional=("aliases", *_FLAG_COLUMNS, *_MIXTURE_COLUMNS, *_LATENT_COLUMNS, *_WINDOW_COLUMNS, "note"),
)
# Suffixes of names that do not change the shape.
_SUFFIXES: Final = re.compile(r"-(?:hf|base|instruct|chat|it|sft|v[0-9]+(?:\.[0-9]+)*)$")
_SIZE: Final = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,3})?)\s*([mbt])")
_FACTORS: Final = {"m": 1e6, "b": 1e9, "t": 1e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One row: the shape, its other names, and the published number of parameters."""

    model: ModelShape
    aliases: tuple[str, ...]
    published_parameters: int
    fact: FactSource
    note: str = ""


def read_models(*paths: str) -> tuple[ModelEntry, ...]:
    """Return the shipped table merged with the tables at `paths`, whose rows replace rows of the same name.

    Raises:
        BadFile: a table is invalid; file, line and column are named.
    """
    entries = {entry.model.name: entry for entry in _shipped()}
    for path in paths:
        # Before the shipped rows, so that an alias of the user takes precedence.
        own = {entry.model.name: entry for entry in parse_model_table(read_text(path), path)}
        entries = own | {name: entry for name, entry in entries.items() if name not in own}
    return tuple(entries.values())


@cache
def _shipped() -> tuple[ModelEntry, ...]:
    return parse_model_table(shipped_text("models.csv"), "models.csv")


def parse_model_table(text: str, where: str) -> tuple[ModelEntry, ...]:
    """Return the models in the text of a table.

    Raises:
        BadFile: as for `read_models`.
    """
    return read_named_records(text, where, COLUMNS, _entry, lambda entry: entry.model.name)


def _entry(row: TableRow) -> ModelEntry:
    model = ModelShape(
        name=row.text("name").lower(),
        layers=row.integer("layers", least=1),
        hidden=row.integer("hidden", least=1),
        heads=row.integer("heads", least=1),
        kv_heads=row.integer("kv_heads", least=1),
        head_dim=row.integer("head_dim", least=1),
        ffn=row.integer("ffn", least=1),
        vocab=row.integer("vocab", least=1),
        gated=row.boolean("gated", default=True),
        tied=row.boolean("tied"),
        positions=row.integer("positions", default=0),
        biases=row.boolean("biases"),
        norm_vectors=row.integer("norm_vectors", least=1, default=1),
        mixture=_mixture(row),
        latent=_latent(row),
        window=_window(row),
    )
    return ModelEntry(
        model=validate_model(model, f"{row.where} line {row.line}", BadFile),
        aliases=row.words("aliases"),
        published_parameters=row.integer("published_parameters", least=1),
        fact=row.fact(),
        note=row.text("note"),
    )


def _mixture(row: TableRow) -> MixtureOfExperts | None:
    if not row.text("experts"):
        return None
    return MixtureOfExperts(
        experts=row.integer("experts", least=1),
        per_token=row.integer("per_token", least=1),
        ffn=row.integer("expert_ffn", least=1),
        shared_ffn=row.integer("shared_ffn", default=0),
        dense_layers=row.integer("dense_layers", default=0),
        groups=row.integer("groups", least=1, default=1),
        group_limit=row.integer("group_limit", least=1, default=1),
    )


def _latent(row: TableRow) -> LatentAttention | None:
    if not row.text("kv_rank"):
        return None
    return LatentAttention(
        query_rank=row.integer("query_rank", default=0),
        kv_rank=row.integer("kv_rank", least=1),
        rope_dim=row.integer("rope_dim"),
        value_dim=row.integer("value_dim", least=1),
    )


def _window(row: TableRow) -> AttentionWindow | None:
    if not row.text("window"):
        return None
    return AttentionWindow(tokens=row.integer("window", least=1), layers=row.integer("window_layers", least=1))


def find_model(text: str, *, models: Sequence[ModelEntry] | None = None, notes: list[str] | None = None) -> ModelShape:
    """Return the model with this name: "llama3-70b", "Llama-3.1-70B", "meta-llama/Llama-3.1-70B-Instruct". Case is ignored.

    A bare size ("70b") means the row with this alias, or else the dense model of the nearest size; `notes` then receives its name.

    Raises:
        BadRequest: unknown model.
    """
    table = read_models() if models is None else models
    notes = [] if notes is None else notes
    by_word = _by_word(tuple(table))
    words = _spellings(text)
    size = _SIZE.fullmatch(text.strip().lower())
    for word in words:
        if (entry := by_word.get(word)) is not None:
            if size:
                notes.append(f"took {text.strip()} as {entry.model.name}")
            if entry.note:
                notes.append(f"{entry.model.name}: {entry.note}")
            return entry.model
    if size and float(size[1]) > 0:
        return _nearest_size(float(size[1]) * _FACTORS[size[2]], text.strip(), table, notes)
    names = sorted({name for entry in table for name in (entry.model.name, *entry.aliases)})
    forms = "give a name (docs/facts.md), a config.json, or layers=..,hidden=..,heads=..,vocab=.."
    hint = suggestion(text.rstrip("/").rsplit("/", 1)[-1], names, forms, form="{!r}")
    raise BadRequest(f"model: unknown model {text!r}", hint=hint)


def _nearest_size(parameters: float, text: str, table: Sequence[ModelEntry], notes: list[str]) -> ModelShape:
    dense = [entry.model for entry in table if entry.model.mixture is None]
    found = min(dense, key=lambda model: (abs(math.log(model.parameters / parameters)), model.name))
    notes.append(
        f"no model of size {text} is listed; took the nearest dense one, {found.name} with {found.parameters / 1e9:.3g}B parameters"
    )
    return found


@cache
def _by_word(table: tuple[ModelEntry, ...]) -> dict[str, ModelEntry]:
    """Return rows by normalised name and alias; the first row takes precedence."""
    by_word: dict[str, ModelEntry] = {}
    for entry in table:
        by_word.setdefault(_plain(entry.model.name), entry)
    for entry in table:
        for alias in entry.aliases:
            by_word.setdefault(_plain(alias), entry)
    return by_word


def _spellings(text: str) -> list[str]:
    """Return the spellings to look up: without the owner on a hub, and without suffixes that do not change the shape."""
    word = text.strip().lower().rstrip("/").rsplit("/", 1)[-1].replace("_", "-").replace(" ", "-")
    found = [_plain(word)]
    while _SUFFIXES.search(word):
        word = _SUFFIXES.sub("", word)
        found.append(_plain(word))
    return found


def _plain(word: str) -> str:
    """Normalise a name: remove hyphens and the prefix "meta-"."""
    return re.sub(r"[-_ ]", "", word.lower().removeprefix("meta-"))
