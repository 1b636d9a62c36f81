"""Read a Hugging Face `config.json` as a `Model`. One function per family of model types; unknown types are rejected by name.

Biases on queries, keys and values only (Qwen) are not counted: they are under 0.1 % of any such model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from phalanx.core.errors import BadFile
from phalanx.core.work.nearest_match import nearest_match
from phalanx.planner.cost.model_shape import AttentionWindow, LatentAttention, MixtureOfExperts, ModelShape
from phalanx.planner.facts.model_config_reader import SIZE_MAX, ModelConfigReader
from phalanx.planner.facts.table_files import read_json
from phalanx.planner.facts.validation import validate_model

CONFIG_FILE: Final = "config.json"
_COUNTED: Final = "a network of another kind is planned from its torch.nn.Module: docs/planner.md, Other networks"


def read_config(path: str) -> ModelShape:
    """Return the model of a config file, or of a folder with one.

    Raises:
        BadFile: the file cannot be read, its `model_type` is not supported, or a key is missing or invalid; the key is named.
    """
    file = os.path.join(path, CONFIG_FILE) if os.path.isdir(path) else path
    values = read_json(file)
    if not isinstance(values, Mapping):
        raise BadFile(f"{file}: a config must be a JSON object, not {type(values).__name__}")
    name = os.path.basename(os.path.dirname(os.path.abspath(file))) if os.path.basename(file) == CONFIG_FILE else ""
    return model_from_config(values, file, name or os.path.splitext(os.path.basename(file))[0])


def model_from_config(values: Mapping[str, Any], where: str, name: str) -> ModelShape:
    """Return the model of a parsed config.

    Args:
        values: the parsed JSON.
        where: name of the config in errors.
        name: name of the model, unless the config has one (`_name_or_path`).

    Raises:
        BadFile: as for `read_config`.
    """
    keys = ModelConfigReader(where=where, values=values)
    kind = values.get("model_type")
    nested = kind not in CONFIG_READERS or not keys.has("hidden_size")
    if isinstance(kind, str) and nested and _text_model_type(values) in CONFIG_READERS:
        # A multimodal model: the planner uses its text decoder.
        keys, kind = keys.section("text_config"), _text_model_type(values)
    if not isinstance(kind, str) or not kind:
        diffusers = values.get("_class_name")
        if isinstance(diffusers, str) and diffusers:
            raise BadFile(f"{where}: {diffusers[:60]} is not a language model", hint=_COUNTED)
        raise BadFile(f"{where}: model_type is missing", hint="use the config.json of a Hugging Face checkpoint")
    reader = CONFIG_READERS.get(kind)
    if reader is None:
        known = ", ".join(sorted(CONFIG_READERS))
        close = nearest_match(kind, CONFIG_READERS)
        raise BadFile(
            f"{where}: model_type {kind[:60]!r} is not supported",
            hint=(f"did you mean {close!r}? " if close else "") + f"supported: {known}; {_COUNTED}",
        )
    path = values.get("_name_or_path")
    name = os.path.basename(path.rstrip("/")) if isinstance(path, str) and path.strip("./") else name
    return validate_model(reader(keys, name), where, BadFile)


def _text_model_type(values: Mapping[str, Any]) -> str:
    text = values.get("text_config")
    kind = text.get("model_type") if isinstance(text, Mapping) else None
    return kind if isinstance(kind, str) else ""


def _llama(keys: ModelConfigReader, name: str, *, ffn: int | None = None, **more: Any) -> ModelShape:
    """Return a model of the shape of Llama: RMSNorm, gated MLP, grouped queries, rotary positions. `more` overrides fields."""
    hidden = keys.integer("hidden_size")
    heads = keys.integer("num_attention_heads")
    shape: dict[str, Any] = {
        "tied": keys.boolean("tie_word_embeddings", default=False),
        "biases": keys.boolean("attention_bias", default=False) and keys.boolean("mlp_bias", default=False),
    }
    return ModelShape(
        name=name,
        layers=keys.integer("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=keys.integer("num_key_value_heads", default=heads),
        head_dim=keys.head_dim(hidden, heads),
        ffn=keys.integer("intermediate_size") if ffn is None else ffn,
        vocab=keys.integer("vocab_size"),
        **(shape | more),
    )


def _window(keys: ModelConfigReader, *, first: int = 0, full: int = 0, tokens: int = 0) -> AttentionWindow | None:
    """Return the sliding window of a config; None if it has none, or one as long as the longest context.

    Args:
        keys: of the config; `layer_types`, where it has them, say which layers slide.
        first: the first layer that slides.
        full: every `full`-th layer sees the whole context; 0 for none.
        tokens: the window of a config that has none; 0 for no window.
    """
    layers = keys.integer("num_hidden_layers")
    tokens = keys.integer("sliding_window", "attention_chunk_size", least=0, default=tokens)
    if not tokens or tokens >= keys.integer("max_position_embeddings", default=SIZE_MAX):
        return None
    sliding = layers - min(first, layers) - (layers // full if full else 0)
    if keys.list_length("layer_types"):
        sliding = sum(kind in ("sliding_attention", "chunked_attention") for kind in keys.values["layer_types"])
    elif keys.list_length("no_rope_layers"):
        sliding = sum(
            kind == 1 for kind in keys.values["no_rope_layers"]
        )  # Llama 4: 1 has rotary positions, and is chunked
    return AttentionWindow(tokens=tokens, layers=min(sliding, layers)) if sliding else None


def _mistral(keys: ModelConfigReader, name: str) -> ModelShape:
    return _llama(keys, name, window=_window(keys))


def _qwen_window(keys: ModelConfigReader) -> AttentionWindow | None:
    """Qwen has a `sliding_window` that counts only with `use_sliding_window`, from layer `max_window_layers` on."""
    if not keys.boolean("use_sliding_window", default=False):
        return None
    return _window(keys, first=keys.integer("max_window_layers", least=0, default=0))


def _qwen(keys: ModelConfigReader, name: str) -> ModelShape:
    return _llama(keys, name, window=_qwen_window(keys))


def _phi(keys: ModelConfigReader, name: str) -> ModelShape:
    """Phi 1 and 2: attention and MLP in parallel after one LayerNorm, biases, no gate."""
    return _llama(keys, name, gated=False, biases=True)


def _starcoder2(keys: ModelConfigReader, name: str) -> ModelShape:
    return _llama(
        keys,
        name,
        gated=False,
        tied=keys.boolean("tie_word_embeddings", default=True),
        biases=keys.boolean("use_bias", default=True),
        norm_vectors=2,
        window=_window(keys),
    )


def _gemma(keys: ModelConfigReader, name: str) -> ModelShape:
    return _llama(keys, name, tied=keys.boolean("tie_word_embeddings", default=True))


def _gemma2(keys: ModelConfigReader, name: str) -> ModelShape:
    """Gemma 2: four RMSNorms per layer, which have as many vectors as two LayerNorms."""
    tied = keys.boolean("tie_word_embeddings", default=True)
    return _llama(keys, name, tied=tied, norm_vectors=2, window=_window(keys, full=2, tokens=4096))


def _gemma3(keys: ModelConfigReader, name: str) -> ModelShape:
    """Gemma 3: as Gemma 2, with five layers of a short window for each of the whole context. Its configs leave sizes out."""
    defaults = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208}
    given = {key: value for key, value in keys.values.items() if value is not None}
    keys = ModelConfigReader(where=keys.where, values=defaults | given)
    full = keys.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    tied = keys.boolean("tie_word_embeddings", default=True)
    return _llama(keys, name, tied=tied, norm_vectors=2, window=_window(keys, full=full, tokens=4096))


def _smollm3(keys: ModelConfigReader, name: str) -> ModelShape:
    return _llama(keys, name, tied=keys.boolean("tie_word_embeddings", default=True))


def _nemotron(keys: ModelConfigReader, name: str) -> ModelShape:
    """Nemotron: squared ReLU without a gate, LayerNorm."""
    return _llama(keys, name, gated=False, norm_vectors=2)


def _mixtral(keys: ModelConfigReader, name: str) -> ModelShape:
    mixture = MixtureOfExperts(
        experts=keys.integer("num_local_experts"),
        per_token=keys.integer("num_experts_per_tok", "experts_per_token"),
        ffn=keys.integer("intermediate_size"),
    )
    return _llama(keys, name, mixture=mixture, window=_window(keys))


def _phimoe(keys: ModelConfigReader, name: str) -> ModelShape:
    return replace(_mixtral(keys, name), biases=keys.boolean("attention_bias", default=False), norm_vectors=2)


def _gpt_oss(keys: ModelConfigReader, name: str) -> ModelShape:
    biases = keys.boolean("attention_bias", default=True)
    return replace(_mixtral(keys, name), biases=biases, window=_window(keys, full=2, tokens=128))


def _qwen_moe(keys: ModelConfigReader, name: str) -> ModelShape:
    """Qwen 2 MoE with a shared expert, Qwen 3 MoE without."""
    layers = keys.integer("num_hidden_layers")
    every = keys.integer("decoder_sparse_step", default=1)
    dense = min(layers, layers - layers // every + keys.list_length("mlp_only_layers"))
    mixture = MixtureOfExperts(
        experts=keys.integer("num_experts"),
        per_token=keys.integer("num_experts_per_tok"),
        ffn=keys.integer("moe_intermediate_size"),
        shared_ffn=keys.integer("shared_expert_intermediate_size", least=0, default=0),
        dense_layers=dense,
    )
    return _llama(keys, name, mixture=mixture, window=_qwen_window(keys))


def _llama4(keys: ModelConfigReader, name: str) -> ModelShape:
    """Llama 4: every `interleave_moe_layer_step`-th layer is a mixture with one shared expert, the others are dense."""
    layers = keys.integer("num_hidden_layers")
    width = keys.integer("intermediate_size")
    mixture = MixtureOfExperts(
        experts=keys.integer("num_local_experts"),
        per_token=keys.integer("num_experts_per_tok"),
        ffn=width,
        shared_ffn=width,
        dense_layers=layers - layers // keys.integer("interleave_moe_layer_step", default=1),
    )
    window = _window(keys, full=keys.integer("no_rope_layer_interval", default=4), tokens=8192)
    return _llama(keys, name, ffn=keys.integer("intermediate_size_mlp"), mixture=mixture, window=window)


def _routed(keys: ModelConfigReader) -> MixtureOfExperts:
    """Return the mixture of DeepSeek, with shared experts, after the first dense layers."""
    expert = keys.integer("moe_intermediate_size")
    return MixtureOfExperts(
        experts=keys.integer("n_routed_experts"),
        per_token=keys.integer("num_experts_per_tok"),
        ffn=expert,
        shared_ffn=expert * keys.integer("n_shared_experts", least=0, default=0),
        dense_layers=keys.integer("first_k_dense_replace", least=0, default=0),
        groups=keys.integer("n_group", default=1),
        group_limit=keys.integer("topk_group", default=1),
    )


def _glm4_moe(keys: ModelConfigReader, name: str) -> ModelShape:
    """GLM 4.5: grouped queries with the mixture of DeepSeek."""
    return _llama(keys, name, mixture=_routed(keys))


def _deepseek(keys: ModelConfigReader, name: str) -> ModelShape:
    """DeepSeek: multi-head latent attention, and a mixture with shared experts after the first dense layers."""
    latent = LatentAttention(
        query_rank=keys.integer("q_lora_rank", least=0, default=0),
        kv_rank=keys.integer("kv_lora_rank"),
        rope_dim=keys.integer("qk_rope_head_dim"),
        value_dim=keys.integer("v_head_dim"),
    )
    heads = keys.integer("num_attention_heads")
    return ModelShape(
        name=name,
        layers=keys.integer("num_hidden_layers"),
        hidden=keys.integer("hidden_size"),
        heads=heads,
        kv_heads=heads,
        head_dim=keys.integer("qk_nope_head_dim"),
        ffn=keys.integer("intermediate_size"),
        vocab=keys.integer("vocab_size"),
        tied=keys.boolean("tie_word_embeddings", default=False),
        mixture=_routed(keys) if keys.has("n_routed_experts") else None,
        latent=latent,
    )


def _gpt2(keys: ModelConfigReader, name: str) -> ModelShape:
    hidden, heads = keys.integer("n_embd", "hidden_size"), keys.integer("n_head", "num_attention_heads")
    return ModelShape(
        name=name,
        layers=keys.integer("n_layer", "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=keys.head_dim(hidden, heads),
        ffn=keys.integer("n_inner", default=4 * hidden),
        vocab=keys.integer("vocab_size"),
        gated=False,
        tied=keys.boolean("tie_word_embeddings", default=True),
        positions=keys.integer("n_positions", "n_ctx", "max_position_embeddings"),
        biases=True,
        norm_vectors=2,
    )


def _gpt_neox(keys: ModelConfigReader, name: str) -> ModelShape:
    return _llama(keys, name, gated=False, biases=keys.boolean("attention_bias", default=True), norm_vectors=2)


def _falcon(keys: ModelConfigReader, name: str) -> ModelShape:
    """Falcon: attention and MLP in parallel. The older design has one key-value head and one norm, the newer one `num_kv_heads`."""
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads", "n_head")
    newer = keys.boolean("new_decoder_architecture", default=False)
    if newer:
        kv_heads = keys.integer("num_kv_heads", "n_head_kv", default=heads)
    else:
        kv_heads = 1 if keys.boolean("multi_query", default=True) else heads
    one_norm = keys.boolean("parallel_attn", default=True) and not newer
    return ModelShape(
        name=name,
        layers=keys.integer("num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=keys.head_dim(hidden, heads),
        ffn=keys.integer("ffn_hidden_size", default=4 * hidden),
        vocab=keys.integer("vocab_size"),
        gated=False,
        tied=keys.boolean("tie_word_embeddings", default=True),
        biases=keys.boolean("bias", default=False),
        norm_vectors=1 if one_norm else 2,
    )


def _mpt(keys: ModelConfigReader, name: str) -> ModelShape:
    hidden, heads = keys.integer("d_model"), keys.integer("n_heads")
    attention = keys.section("attn_config")
    learned = keys.boolean("learned_pos_emb", default=True) and not attention.boolean("alibi", default=False)
    biased = not keys.boolean("no_bias", default=True)
    return ModelShape(
        name=name,
        layers=keys.integer("n_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=attention.integer("kv_n_heads", default=heads),
        head_dim=keys.head_dim(hidden, heads),
        ffn=round(keys.number("expansion_ratio", default=4.0) * hidden),
        vocab=keys.integer("vocab_size"),
        gated=False,
        tied=keys.boolean("tie_word_embeddings", default=True),
        positions=keys.integer("max_seq_len") if learned else 0,
        biases=biased,
        norm_vectors=2 if biased else 1,
    )


CONFIG_READERS: Final[Mapping[str, Callable[[ModelConfigReader, str], ModelShape]]] = {
    **dict.fromkeys(("llama", "granite", "olmo2"), _llama),
    **dict.fromkeys(("mistral", "phi3"), _mistral),
    **dict.fromkeys(
        ("qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3", "qwen3_vl_text"), _qwen
    ),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text"), _qwen_moe),
    **dict.fromkeys(("llama4", "llama4_text"), _llama4),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _deepseek),
    "gemma": _gemma,
    "gemma2": _gemma2,
    **dict.fromkeys(("gemma3", "gemma3_text"), _gemma3),
    "nemotron": _nemotron,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "phi": _phi,
    "phimoe": _phimoe,
    "starcoder2": _starcoder2,
    "smollm3": _smollm3,
    "glm4_moe": _glm4_moe,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "falcon": _falcon,
    "mpt": _mpt,
}
"""The reader for each supported `model_type`."""
