"""Read a Hugging Face `config.json` as a `Model`. One function per family of model types; unknown types are rejected by name.

Biases on queries, keys and values only (Qwen) are not counted: they are under 0.1 % of any such model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from phalanx.core.errors import BadFile
from phalanx.core.performance.model import LatentAttention, Mixture, Model
from phalanx.core.work.nearest import nearest
from phalanx.facts.files import json_at
from phalanx.facts.keys import Keys
from phalanx.facts.sane import sane

CONFIG: Final = "config.json"


def config_at(path: str) -> Model:
    """Return the model of a config file, or of a folder with one.

    Raises:
        BadFile: the file cannot be read, its `model_type` is not supported, or a key is missing or invalid; the key is named.
    """
    file = os.path.join(path, CONFIG) if os.path.isdir(path) else path
    values = json_at(file)
    if not isinstance(values, Mapping):
        raise BadFile(f"{file}: a config must be a JSON object, not {type(values).__name__}")
    name = os.path.basename(os.path.dirname(os.path.abspath(file))) if os.path.basename(file) == CONFIG else ""
    return model_of(values, file, name or os.path.splitext(os.path.basename(file))[0])


def model_of(values: Mapping[str, Any], where: str, name: str) -> Model:
    """Return the model of a parsed config.

    Args:
        values: the parsed JSON.
        where: name of the config in errors.
        name: name of the model, unless the config has one (`_name_or_path`).

    Raises:
        BadFile: as for `config_at`.
    """
    keys = Keys(where=where, values=values)
    kind = values.get("model_type")
    if isinstance(kind, str) and kind not in KINDS and _text_model_type(values) in KINDS:
        # A multimodal model: the planner uses its text decoder.
        keys, kind = keys.part("text_config"), _text_model_type(values)
    if not isinstance(kind, str) or not kind:
        raise BadFile(f"{where}: model_type is missing", hint="use the config.json of a Hugging Face checkpoint")
    reader = KINDS.get(kind)
    if reader is None:
        known = ", ".join(sorted(KINDS))
        close = nearest(kind, KINDS)
        raise BadFile(
            f"{where}: model_type {kind[:60]!r} is not supported",
            hint=(f"did you mean {close!r}? " if close else "") + f"supported: {known}",
        )
    path = values.get("_name_or_path")
    name = os.path.basename(path.rstrip("/")) if isinstance(path, str) and path.strip("./") else name
    return sane(reader(keys, name), where, BadFile)


def _text_model_type(values: Mapping[str, Any]) -> str:
    text = values.get("text_config")
    kind = text.get("model_type") if isinstance(text, Mapping) else None
    return kind if isinstance(kind, str) else ""


def _llama(keys: Keys, name: str, *, ffn: int | None = None, **more: Any) -> Model:
    """Return a model of the shape of Llama: RMSNorm, gated MLP, grouped queries, rotary positions. `more` overrides fields."""
    hidden = keys.whole("hidden_size")
    heads = keys.whole("num_attention_heads")
    shape: dict[str, Any] = {
        "tied": keys.truth("tie_word_embeddings", default=False),
        "biases": keys.truth("attention_bias", default=False) and keys.truth("mlp_bias", default=False),
    }
    return Model(
        name=name,
        layers=keys.whole("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=keys.whole("num_key_value_heads", default=heads),
        head_dim=keys.head_dim(hidden, heads),
        ffn=keys.whole("intermediate_size") if ffn is None else ffn,
        vocab=keys.whole("vocab_size"),
        **(shape | more),
    )


def _gemma(keys: Keys, name: str) -> Model:
    return _llama(keys, name, tied=keys.truth("tie_word_embeddings", default=True))


def _gemma2(keys: Keys, name: str) -> Model:
    """Gemma 2: four RMSNorms per layer, which have as many vectors as two LayerNorms."""
    return _llama(keys, name, tied=keys.truth("tie_word_embeddings", default=True), norm_vectors=2)


def _nemotron(keys: Keys, name: str) -> Model:
    """Nemotron: squared ReLU without a gate, LayerNorm."""
    return _llama(keys, name, gated=False, norm_vectors=2)


def _mixtral(keys: Keys, name: str) -> Model:
    mixture = Mixture(
        experts=keys.whole("num_local_experts"),
        per_token=keys.whole("num_experts_per_tok", "experts_per_token"),
        ffn=keys.whole("intermediate_size"),
    )
    return _llama(keys, name, mixture=mixture)


def _gpt_oss(keys: Keys, name: str) -> Model:
    return replace(_mixtral(keys, name), biases=keys.truth("attention_bias", default=True))


def _qwen_moe(keys: Keys, name: str) -> Model:
    """Qwen 2 MoE with a shared expert, Qwen 3 MoE without."""
    layers = keys.whole("num_hidden_layers")
    every = keys.whole("decoder_sparse_step", default=1)
    dense = min(layers, layers - layers // every + keys.count("mlp_only_layers"))
    mixture = Mixture(
        experts=keys.whole("num_experts"),
        per_token=keys.whole("num_experts_per_tok"),
        ffn=keys.whole("moe_intermediate_size"),
        shared_ffn=keys.whole("shared_expert_intermediate_size", least=0, default=0),
        dense_layers=dense,
    )
    return _llama(keys, name, mixture=mixture)


def _llama4(keys: Keys, name: str) -> Model:
    """Llama 4: every `interleave_moe_layer_step`-th layer is a mixture with one shared expert, the others are dense."""
    layers = keys.whole("num_hidden_layers")
    width = keys.whole("intermediate_size")
    mixture = Mixture(
        experts=keys.whole("num_local_experts"),
        per_token=keys.whole("num_experts_per_tok"),
        ffn=width,
        shared_ffn=width,
        dense_layers=layers - layers // keys.whole("interleave_moe_layer_step", default=1),
    )
    return _llama(keys, name, ffn=keys.whole("intermediate_size_mlp"), mixture=mixture)


def _deepseek(keys: Keys, name: str) -> Model:
    """DeepSeek: multi-head latent attention, and a mixture with shared experts after the first dense layers."""
    latent = LatentAttention(
        query_rank=keys.whole("q_lora_rank", least=0, default=0),
        kv_rank=keys.whole("kv_lora_rank"),
        rope_dim=keys.whole("qk_rope_head_dim"),
        value_dim=keys.whole("v_head_dim"),
    )
    mixture = None
    if keys.has("n_routed_experts"):
        expert = keys.whole("moe_intermediate_size")
        mixture = Mixture(
            experts=keys.whole("n_routed_experts"),
            per_token=keys.whole("num_experts_per_tok"),
            ffn=expert,
            shared_ffn=expert * keys.whole("n_shared_experts", least=0, default=0),
            dense_layers=keys.whole("first_k_dense_replace", least=0, default=0),
        )
    heads = keys.whole("num_attention_heads")
    return Model(
        name=name,
        layers=keys.whole("num_hidden_layers"),
        hidden=keys.whole("hidden_size"),
        heads=heads,
        kv_heads=heads,
        head_dim=keys.whole("qk_nope_head_dim"),
        ffn=keys.whole("intermediate_size"),
        vocab=keys.whole("vocab_size"),
        tied=keys.truth("tie_word_embeddings", default=False),
        mixture=mixture,
        latent=latent,
    )


def _gpt2(keys: Keys, name: str) -> Model:
    hidden, heads = keys.whole("n_embd", "hidden_size"), keys.whole("n_head", "num_attention_heads")
    return Model(
        name=name,
        layers=keys.whole("n_layer", "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=keys.head_dim(hidden, heads),
        ffn=keys.whole("n_inner", default=4 * hidden),
        vocab=keys.whole("vocab_size"),
        gated=False,
        tied=keys.truth("tie_word_embeddings", default=True),
        positions=keys.whole("n_positions", "n_ctx", "max_position_embeddings"),
        biases=True,
        norm_vectors=2,
    )


def _gpt_neox(keys: Keys, name: str) -> Model:
    return _llama(keys, name, gated=False, biases=keys.truth("attention_bias", default=True), norm_vectors=2)


def _falcon(keys: Keys, name: str) -> Model:
    """Falcon: attention and MLP in parallel. The older design has one key-value head and one norm, the newer one `num_kv_heads`."""
    hidden, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads", "n_head")
    newer = keys.truth("new_decoder_architecture", default=False)
    if newer:
        kv_heads = keys.whole("num_kv_heads", "n_head_kv", default=heads)
    else:
        kv_heads = 1 if keys.truth("multi_query", default=True) else heads
    one_norm = keys.truth("parallel_attn", default=True) and not newer
    return Model(
        name=name,
        layers=keys.whole("num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=keys.head_dim(hidden, heads),
        ffn=keys.whole("ffn_hidden_size", default=4 * hidden),
        vocab=keys.whole("vocab_size"),
        gated=False,
        tied=keys.truth("tie_word_embeddings", default=True),
        biases=keys.truth("bias", default=False),
        norm_vectors=1 if one_norm else 2,
    )


def _mpt(keys: Keys, name: str) -> Model:
    hidden, heads = keys.whole("d_model"), keys.whole("n_heads")
    attention = keys.part("attn_config")
    learned = keys.truth("learned_pos_emb", default=True) and not attention.truth("alibi", default=False)
    biased = not keys.truth("no_bias", default=True)
    return Model(
        name=name,
        layers=keys.whole("n_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=attention.whole("kv_n_heads", default=heads),
        head_dim=keys.head_dim(hidden, heads),
        ffn=round(keys.number("expansion_ratio", default=4.0) * hidden),
        vocab=keys.whole("vocab_size"),
        gated=False,
        tied=keys.truth("tie_word_embeddings", default=True),
        positions=keys.whole("max_seq_len") if learned else 0,
        biases=biased,
        norm_vectors=2 if biased else 1,
    )


KINDS: Final[Mapping[str, Callable[[Keys, str], Model]]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3"), _llama),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), _qwen_moe),
    **dict.fromkeys(("llama4", "llama4_text"), _llama4),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _deepseek),
    "gemma": _gemma,
    "gemma2": _gemma2,
    "nemotron": _nemotron,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "falcon": _falcon,
    "mpt": _mpt,
}
"""The reader for each supported `model_type`."""
