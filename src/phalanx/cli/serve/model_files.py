"""The files of a model: which weights it has, how large they are, and what its config says. From a folder here, or from what a node listed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from phalanx.cli.serve.inference_engines import WeightsFormat
from phalanx.core.errors import BadFile, BadRequest, PhalanxError
from phalanx.core.work.services.model_memory import ModelNeeds

CONFIG_FILE: Final = "config.json"
CONFIG_BYTES_MAX: Final = 1 << 20
FILES_MAX: Final = 100_000
_PART: Final = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_KV_DTYPE_BYTES: Final = 2  # keys and values in bfloat16, as engines keep them unless configured otherwise
_COUNT_MAX: Final = 1 << 30  # more heads or tokens than any model has
_NAMES_MAX: Final = 4  # in one message


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """What lies at a path.

    Attributes:
        path: absolute, as the nodes see it: a folder, or a file.
        sizes: bytes of each file of the folder by name; of a file only itself.
        config: content of its config.json; empty if it has none.
    """

    path: str
    sizes: Mapping[str, int]
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def hugging_face(self) -> list[str]:
        """The files with its weights for engines that load Hugging Face folders, none if it is no such folder."""
        if not self.config:
            return []
        for begin, end in (("model", ".safetensors"), ("", ".safetensors"), ("pytorch_model", ".bin")):
            found = [name for name in self.sizes if name.startswith(begin) and name.endswith(end)]
            if found:
                return found
        return []

    @property
    def gguf(self) -> list[str]:
        """The GGUF files with weights of a language model; of one in parts its first."""
        names = sorted(name for name in self.sizes if name.endswith(".gguf") and not name.startswith("mmproj"))
        return [name for name in names if not _PART.search(name) or "-00001-of-" in name]

    def formats(self) -> list[WeightsFormat]:
        """The formats that it has, the preferred one first.

        Raises:
            BadFile: it has none.
        """
        found = [WeightsFormat.SAFETENSORS] * bool(self.hugging_face) + [WeightsFormat.GGUF] * bool(self.gguf)
        if not found:
            hint = "a Hugging Face folder has config.json and *.safetensors; llama.cpp loads *.gguf"
            raise BadFile(f"{self.path}: no weights of a model there", hint=hint)
        return found

    def weights(self, kind: WeightsFormat) -> tuple[str, int]:
        """Return the path to give to an engine, and the bytes of the weights.

        Raises:
            BadRequest: there are several GGUF models.
        """
        if kind is WeightsFormat.SAFETENSORS:
            return self.path, sum(self.sizes[name] for name in self.hugging_face)
        if len(self.gguf) > 1:
            more = ", ..." if len(self.gguf) > _NAMES_MAX else ""
            raise BadRequest(
                f"{self.path} has {len(self.gguf)} models: {', '.join(self.gguf[:_NAMES_MAX])}{more}",
                hint=f"name one: {os.path.join(self.path, self.gguf[0])}",
            )
        (first,) = self.gguf
        parts = first[: _PART.search(first).start()] if _PART.search(first) else ""  # type: ignore[union-attr]
        size = sum(
            size for name, size in self.sizes.items() if name == first or (parts and name.startswith(parts + "-"))
        )
        return (self.path if self.path.endswith(".gguf") else os.path.join(self.path, first)), size

    def needs(self, kind: WeightsFormat) -> ModelNeeds:
        """Return what it needs of GPUs; without keys and values if its kind of model is not known."""
        size = self.weights(kind)[1]
        if kind is not WeightsFormat.SAFETENSORS:
            return ModelNeeds(weights_bytes=size)
        from phalanx.planner.facts.model_configs import model_from_config

        try:
            model = model_from_config(self.config, self.path, "")
        except PhalanxError:
            return ModelNeeds(weights_bytes=size, heads=self._count("num_attention_heads"))
        latent = model.latent
        width = 2 * model.kv_heads * model.head_dim if latent is None else latent.kv_rank + latent.rope_dim
        return ModelNeeds(
            weights_bytes=size,
            kv_bytes=model.layers * width * _KV_DTYPE_BYTES,
            kv_parts=model.kv_heads if latent is None else 1,
            heads=model.heads,
            tokens_max=self._count("max_position_embeddings"),
        )

    def _count(self, key: str) -> int:
        """Return a count of the config; 0 if it has none that can be."""
        value = self.config.get(key)
        return value if type(value) is int and 0 < value <= _COUNT_MAX else 0


def read_model_files(path: str) -> ModelFiles | None:
    """Return the model at a path of this machine; None if nothing is there.

    Raises:
        BadFile: it cannot be read, or its config is no JSON object.
    """
    path = os.path.abspath(os.path.expanduser(path))
    try:
        if os.path.isfile(path):
            folder, name = os.path.split(path)
            parts = _PART.sub("", name) if _PART.search(name) else name
            listed = [
                one for one in os.listdir(folder) if one == name or (parts != name and one.startswith(parts + "-"))
            ]
            return ModelFiles(path=path, sizes={one: os.path.getsize(os.path.join(folder, one)) for one in listed})
        if not os.path.isdir(path):
            return None
        sizes: dict[str, int] = {}
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_file() and len(sizes) < FILES_MAX:
                    sizes[entry.name] = entry.stat().st_size
        config = os.path.join(path, CONFIG_FILE)
        text = ""
        if os.path.isfile(config):
            with open(config, encoding="utf-8") as file:
                text = file.read(CONFIG_BYTES_MAX)
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(f"{path}: {error}", hint="it must be readable") from None
    return model_files(path, sizes, text)


def model_files(path: str, sizes: Mapping[str, int], config: str) -> ModelFiles:
    """Return the model of a listing and the text of its config.

    Raises:
        BadFile: the config is no JSON object.
    """
    try:
        values = json.loads(config) if config else {}
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise BadFile(f"{path}/{CONFIG_FILE}: not a JSON object", hint="it is the config of a Hugging Face model")
    return ModelFiles(path=path, sizes=sizes, config=values)
