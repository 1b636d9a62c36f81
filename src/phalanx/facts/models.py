"""Read the table of model shapes, and resolve model names."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from phalanx.core.errors import BadFile, BadRequest
from phalanx.core.performance.machine import Fact
from phalanx.core.performance.model import LatentAttention, Mixture, Model
from phalanx.core.work.nearest import nearest
from phalanx.facts.files import shipped_text, text_at
from phalanx.facts.sane import sane
from phalanx.facts.table import Columns, Row, named_of

_MIXTURE_COLUMNS: Final = ("experts", "per_token", "expert_ffn", "shared_ffn", "dense_layers")
_LATENT_COLUMNS: Final = ("query_rank", "kv_rank", "rope_dim", "value_dim")
_FLAG_COLUMNS: Final = ("gated", "tied", "positions", "biases", "norm_vectors")
COLUMNS: Final = Columns(
    needed=("name", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "published_parameters"),
    free=("aliases", *_FLAG_COLUMNS, *_MIXTURE_COLUMNS, *_LATENT_COLUMNS, "note"),
)
# Suffixes of names that do not change the shape.
_SUFFIXES: Final = re.compile(r"-(?:hf|base|instruct|chat|it|sft|v[0-9]+(?:\.[0-9]+)*)$")
_SIZE: Final = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,3})?)\s*([mbt])")
_FACTORS: Final = {"m": 1e6, "b": 1e9, "t": 1e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One row: the shape, its other names, and the published number of parameters."""

    model: Model
    aliases: tuple[str, ...]
    published_parameters: int
    fact: Fact
    note: str = ""


def read_models(*paths: str) -> tuple[ModelEntry, ...]:
    """Return the shipped table merged with the tables at `paths`, whose rows replace rows of the same name.

    Raises:
        BadFile: a table is invalid; file, line and column are named.
    """
    entries = {entry.model.name: entry for entry in _shipped()}
    for path in paths:
        # Before the shipped rows, so that an alias of the user takes precedence.
        own = {entry.model.name: entry for entry in models_in(text_at(path), path)}
        entries = own | {name: entry for name, entry in entries.items() if name not in own}
    return tuple(entries.values())


@cache
def _shipped() -> tuple[ModelEntry, ...]:
    return models_in(shipped_text("models.csv"), "models.csv")


def models_in(text: str, where: str) -> tuple[ModelEntry, ...]:
    """Return the models in the text of a table.

    Raises:
        BadFile: as for `read_models`.
    """
    return named_of(text, where, COLUMNS, _entry, lambda entry: entry.model.name)


def _entry(row: Row) -> ModelEntry:
    model = Model(
        name=row.text("name").lower(),
        layers=row.whole("layers", least=1),
        hidden=row.whole("hidden", least=1),
        heads=row.whole("heads", least=1),
        kv_heads=row.whole("kv_heads", least=1),
        head_dim=row.whole("head_dim", least=1),
        ffn=row.whole("ffn", least=1),
        vocab=row.whole("vocab", least=1),
        gated=row.truth("gated", default=True),
        tied=row.truth("tied"),
        positions=row.whole("positions", default=0),
        biases=row.truth("biases"),
        norm_vectors=row.whole("norm_vectors", least=1, default=1),
        mixture=_mixture(row),
        latent=_latent(row),
    )
    return ModelEntry(
        model=sane(model, f"{row.where} line {row.line}", BadFile),
        aliases=row.words("aliases"),
        published_parameters=row.whole("published_parameters", least=1),
        fact=row.fact(),
        note=row.text("note"),
    )


def _mixture(row: Row) -> Mixture | None:
    if not row.text("experts"):
        return None
    return Mixture(
        experts=row.whole("experts", least=1),
        per_token=row.whole("per_token", least=1),
        ffn=row.whole("expert_ffn", least=1),
        shared_ffn=row.whole("shared_ffn", default=0),
        dense_layers=row.whole("dense_layers", default=0),
    )


def _latent(row: Row) -> LatentAttention | None:
    if not row.text("kv_rank"):
        return None
    return LatentAttention(
        query_rank=row.whole("query_rank", default=0),
        kv_rank=row.whole("kv_rank", least=1),
        rope_dim=row.whole("rope_dim"),
        value_dim=row.whole("value_dim", least=1),
    )


def model_named(text: str, *, models: Sequence[ModelEntry] | None = None, notes: list[str] | None = None) -> Model:
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
    close = nearest(text.rstrip("/").rsplit("/", 1)[-1], names)
    forms = "give a name (docs/facts.md), a config.json, or layers=..,hidden=..,heads=..,vocab=.."
    raise BadRequest(f"model: unknown model {text!r}", hint=f"did you mean {close!r}?" if close else forms)


def _nearest_size(parameters: float, text: str, table: Sequence[ModelEntry], notes: list[str]) -> Model:
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
