"""The table of model shapes, and what a user means by a model's name."""

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

COLUMNS: Final = Columns(
    needed=("name", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "published_parameters"),
    free=("aliases", "gated", "tied", "positions", "biases", "norm_vectors", "experts", "per_token", "expert_ffn",
          "shared_ffn", "dense_layers", "query_rank", "kv_rank", "rope_dim", "value_dim", "note"),
)  # fmt: skip
# What people and hubs append to a name without changing the shape.
_SUFFIXES: Final = re.compile(r"-(?:hf|base|instruct|chat|it|sft|v[0-9]+(?:\.[0-9]+)*)$")
_SIZE: Final = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,3})?)\s*([mbt])")
_TIMES: Final = {"m": 1e6, "b": 1e9, "t": 1e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One row: the shape, other names of it, and the number of parameters that its makers publish."""

    model: Model
    aliases: tuple[str, ...]
    published_parameters: int
    fact: Fact
    note: str = ""


def read_models(*paths: str) -> tuple[ModelEntry, ...]:
    """The shipped table, then the tables at `paths`: a row there replaces the one of its name.

    Raises:
        BadFile: a table is not what it should be; file, line and column are named.
    """
    entries = {entry.model.name: entry for entry in _shipped()}
    for path in paths:
        # Ahead of the shipped ones, so that an alias of the user's is met first.
        own = {entry.model.name: entry for entry in models_in(text_at(path), path)}
        entries = own | {name: entry for name, entry in entries.items() if name not in own}
    return tuple(entries.values())


@cache
def _shipped() -> tuple[ModelEntry, ...]:
    return models_in(shipped_text("models.csv"), "models.csv")


def models_in(text: str, where: str) -> tuple[ModelEntry, ...]:
    """The models of one table's text.

    Raises:
        BadFile: as `read_models`.
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
    """The model of that name: "llama3-70b", "Llama-3.1-70B", "meta-llama/Llama-3.1-70B-Instruct"; case does not count. A bare size ("70b")
    means the row that bears it as an alias, or else the dense model of nearest size; `notes` is then told which.

    Raises:
        BadRequest: no such model.
    """
    table = read_models() if models is None else models
    said = [] if notes is None else notes
    by_word = _by_word(tuple(table))
    words = _spellings(text)
    size = _SIZE.fullmatch(text.strip().lower())
    for word in words:
        if (entry := by_word.get(word)) is not None:
            if size:
                said.append(f"{text.strip()} is taken as {entry.model.name}")
            if entry.note:
                said.append(f"{entry.model.name}: {entry.note}")
            return entry.model
    if size and float(size[1]) > 0:
        return _nearest_size(float(size[1]) * _TIMES[size[2]], text.strip(), table, said)
    names = sorted({name for entry in table for name in (entry.model.name, *entry.aliases)})
    close = nearest(text.rstrip("/").rsplit("/", 1)[-1], names)
    raise BadRequest(f"model: unknown model {text!r}",
                     hint=f"did you mean {close!r}?" if close else
                     "give a name (docs/facts.md), a config.json, or layers=..,hidden=..,heads=..,vocab=..")  # fmt: skip


def _nearest_size(parameters: float, text: str, table: Sequence[ModelEntry], notes: list[str]) -> Model:
    dense = [entry.model for entry in table if entry.model.mixture is None]
    found = min(dense, key=lambda model: (abs(math.log(model.parameters / parameters)), model.name))
    notes.append(
        f"no model of {text} is listed; {found.name} with {found.parameters / 1e9:.3g}B parameters is the nearest dense one"
    )
    return found


@cache
def _by_word(table: tuple[ModelEntry, ...]) -> dict[str, ModelEntry]:
    """Rows by name and alias, as `_plain` spells them; where two bear a word, the first."""
    by_word: dict[str, ModelEntry] = {}
    for entry in table:
        by_word.setdefault(_plain(entry.model.name), entry)
    for entry in table:
        for alias in entry.aliases:
            by_word.setdefault(_plain(alias), entry)
    return by_word


def _spellings(text: str) -> list[str]:
    """The name as it may stand in the table: without its owner on a hub, and without endings that change no shape."""
    word = text.strip().lower().rstrip("/").rsplit("/", 1)[-1].replace("_", "-").replace(" ", "-")
    found = [_plain(word)]
    while _SUFFIXES.search(word):
        word = _SUFFIXES.sub("", word)
        found.append(_plain(word))
    return found


def _plain(word: str) -> str:
    """Hyphens do not count, and neither does the maker before a name that says it anyway ("meta-llama-3-8b")."""
    return re.sub(r"[-_ ]", "", word.lower().removeprefix("meta-"))
