"""Hugging Face config files: each supported kind against the shape of the table, and each bad key by name."""

import json

import pytest

from phalanx.core.errors import BadFile
from phalanx.planner.facts.model_argument import parse_model_argument
from phalanx.planner.facts.model_configs import CONFIG_READERS, model_from_config
from phalanx.planner.facts.models import find_model


def llama(kind="llama", **more):
    return {
        "model_type": kind,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    } | more


def config(kind, layers, hidden, heads, kv_heads, ffn, vocab, **more):
    return llama(
        kind,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ffn,
        vocab_size=vocab,
        **more,
    )


MLA = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}

CASES = {
    "llama-3.1-8b": llama(rope_theta=500000.0, torch_dtype="bfloat16", head_dim=None),
    "llama-3.2-1b": config("llama", 16, 2048, 32, 8, 8192, 128256, tie_word_embeddings=True),
    "mistral-nemo-12b": config("mistral", 40, 5120, 32, 8, 14336, 131072, head_dim=128),
    "mixtral-8x7b": config("mixtral", 32, 4096, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2),
    "qwen2.5-7b": config("qwen2", 28, 3584, 28, 4, 18944, 152064),
    "qwen2-57b-a14b": config(
        "qwen2_moe",
        28,
        3584,
        28,
        4,
        18944,
        151936,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=2560,
        shared_expert_intermediate_size=20480,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "qwen3-8b": config("qwen3", 36, 4096, 32, 8, 12288, 151936, head_dim=128),
    "qwen3-30b-a3b": config(
        "qwen3_moe",
        48,
        2048,
        32,
        4,
        6144,
        151936,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "gpt2-xl": {
        "model_type": "gpt2",
        "n_layer": 48,
        "n_embd": 1600,
        "n_head": 25,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "gpt-neox-20b": {
        "model_type": "gpt_neox",
        "num_hidden_layers": 44,
        "hidden_size": 6144,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
        "vocab_size": 50432,
    },
    "gemma-7b": {
        "model_type": "gemma",
        "num_hidden_layers": 28,
        "hidden_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "intermediate_size": 24576,
        "vocab_size": 256000,
    },
    "gemma-2-9b": config("gemma2", 42, 3584, 16, 8, 14336, 256000, head_dim=256),
    "falcon-7b": {
        "model_type": "falcon",
        "num_hidden_layers": 32,
        "hidden_size": 4544,
        "num_attention_heads": 71,
        "multi_query": True,
        "vocab_size": 65024,
    },
    "falcon-40b": {
        "model_type": "falcon",
        "num_hidden_layers": 60,
        "hidden_size": 8192,
        "num_attention_heads": 128,
        "num_kv_heads": 8,
        "new_decoder_architecture": True,
        "vocab_size": 65024,
    },
    "mpt-7b": {
        "model_type": "mpt",
        "n_layers": 32,
        "d_model": 4096,
        "n_heads": 32,
        "expansion_ratio": 4,
        "no_bias": True,
        "max_seq_len": 2048,
        "vocab_size": 50432,
        "attn_config": {"alibi": True},
    },
    "phi-3-medium": config("phi3", 40, 5120, 40, 10, 17920, 32064),
    "deepseek-v2-lite": config("deepseek_v2", 27, 2048, 16, 16, 10944, 102400, q_lora_rank=None, **MLA),
    "gpt-oss-20b": config(
        "gpt_oss",
        24,
        2880,
        64,
        8,
        2880,
        201088,
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        attention_bias=True,
        sliding_window=128,
    ),
    "nemotron-4-15b": config("nemotron", 32, 6144, 48, 8, 24576, 256000),
    "llama-4-maverick": {
        "model_type": "llama4",
        "vision_config": {},
        "text_config": config(
            "llama4_text",
            48,
            5120,
            40,
            8,
            8192,
            202048,
            head_dim=128,
            intermediate_size_mlp=16384,
            num_local_experts=128,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
        ),
    },
}


@pytest.mark.parametrize("name", CASES)
def test_a_config_of_each_kind_is_the_shape_of_the_table(name):
    values = CASES[name]
    read, listed = model_from_config(values, "config.json", "x"), find_model(name)
    assert read.parameters == listed.parameters
    assert read.active_parameters == listed.active_parameters
    assert read.window == listed.window
    assert read.flops_per_token(16384) == listed.flops_per_token(16384)


GLM = {
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}

PUBLISHED = {
    # parameters without vision towers and biases of queries, keys and values, as published with the checkpoints
    "gemma3": (
        27.0e9,
        {
            "model_type": "gemma3",
            "vision_config": {"hidden_size": 1152},
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 5376,
                "intermediate_size": 21504,
                "num_attention_heads": 32,
                "num_hidden_layers": 62,
                "num_key_value_heads": 16,
                "head_dim": 128,
                "sliding_window": 1024,
            },
        },
    ),
    "gemma3_text": (
        3.88e9,
        {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
    ),
    "phi": (2.78e9, config("phi", 32, 2560, 32, 32, 10240, 51200)),
    "phimoe": (41.9e9, config("phimoe", 32, 4096, 32, 8, 6400, 32064, num_local_experts=16, num_experts_per_tok=2)),
    "starcoder2": (7.17e9, config("starcoder2", 32, 4608, 36, 4, 18432, 49152, sliding_window=4096)),
    "smollm3": (3.08e9, config("smollm3", 36, 2048, 16, 4, 11008, 128256)),
    "glm4_moe": (106.9e9, config("glm4_moe", 46, 4096, 96, 8, 10944, 151552, head_dim=128, **GLM)),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_config_has_as_many_parameters_as_were_published(kind):
    published, values = PUBLISHED[kind]
    assert model_from_config(values, "config.json", "x").parameters == pytest.approx(published, rel=0.005)


@pytest.mark.parametrize(
    ("values", "tokens", "layers"),
    [
        (llama("mistral", sliding_window=4096, max_position_embeddings=32768), 4096, 32),
        (llama("mistral", sliding_window=None), None, 0),
        (llama("phi3", sliding_window=262144, max_position_embeddings=131072), None, 0),
        (llama("qwen2", sliding_window=4096, use_sliding_window=False, max_window_layers=28), None, 0),
        (llama("qwen2", sliding_window=4096, use_sliding_window=True, max_window_layers=28), 4096, 4),
        (llama("gemma2", head_dim=256), 4096, 16),
        (PUBLISHED["gemma3"][1], 1024, 52),
        (
            llama(
                "qwen3",
                sliding_window=512,
                use_sliding_window=True,
                layer_types=["full_attention"] * 31 + ["sliding_attention"],
            ),
            512,
            1,
        ),
        (CASES["llama-4-maverick"], 8192, 36),
    ],
)
def test_a_window_limits_the_layers_that_the_config_says(values, tokens, layers):
    window = model_from_config(values, "config.json", "x").window
    assert (window and window.tokens, window.layers if window else 0) == (tokens, layers)


def test_a_window_saves_the_work_of_the_positions_outside_it():
    plain = model_from_config(llama("mistral"), "config.json", "x")
    limited = model_from_config(llama("mistral", sliding_window=1024), "config.json", "x")
    assert limited.flops_per_token(1024) == plain.flops_per_token(1024)
    seq = 8192
    pairs = sum(min(place, 1024) for place in range(1, seq + 1)) / sum(range(1, seq + 1))
    assert limited.attended(seq) / seq == pytest.approx(pairs, rel=1e-3)


def test_every_supported_kind_has_a_case_or_is_read_like_one():
    tried = {values["model_type"] for values in CASES.values()} | set(PUBLISHED) | {"llama4_text"}
    untried = set(CONFIG_READERS) - tried
    assert {CONFIG_READERS[kind] for kind in untried} <= {CONFIG_READERS[kind] for kind in tried & set(CONFIG_READERS)}


def test_deepseek_v3_is_read_like_its_forebear_with_narrow_queries():
    more = MLA | {
        "q_lora_rank": 1536,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
    }
    values = config("deepseek_v3", 61, 7168, 128, 128, 18432, 129280, **more)
    assert model_from_config(values, "config.json", "x").parameters == find_model("deepseek-v3").parameters


def test_a_config_is_found_as_a_file_or_in_its_folder(tmp_path):
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(llama()))
    assert parse_model_argument(str(folder)) == parse_model_argument(str(folder / "config.json"))
    assert parse_model_argument(str(folder)).name == "my-llama"
    other = tmp_path / "tiny.json"
    other.write_text(json.dumps(llama(_name_or_path="meta-llama/Llama-3.1-8B")))
    assert parse_model_argument(str(other)).name == "Llama-3.1-8B"


@pytest.mark.parametrize("kind", ["bert", "t5", "whisper", "mamba", "clip"])
def test_an_unsupported_kind_is_refused_by_name_with_what_is_supported(kind):
    with pytest.raises(BadFile, match=f"model_type '{kind}' is not supported") as caught:
        model_from_config({"model_type": kind, "hidden_size": 768}, "config.json", "x")
    assert "supported: " in caught.value.hint
    assert "qwen3_moe" in caught.value.hint
    assert caught.value.hint.endswith("docs/planner.md, Other networks")


def test_a_config_of_diffusers_is_refused_by_its_class():
    with pytest.raises(BadFile, match="UNet2DConditionModel is not a language model") as caught:
        model_from_config({"_class_name": "UNet2DConditionModel", "sample_size": 128}, "config.json", "x")
    assert "torch.nn.Module" in caught.value.hint


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": -4096}, "hidden_size is -4096; it must be 1 or more"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'; it must be a whole number"),
        ({"hidden_size": 4096.5}, "hidden_size is '4096.5'"),
        ({"hidden_size": True}, "hidden_size is 'True'"),
        ({"hidden_size": float("nan")}, "hidden_size is 'nan'"),
        ({"hidden_size": float("inf")}, "hidden_size is 'inf'"),
        ({"hidden_size": 10**12}, "hidden is 1000000000000; it must be 1 to"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": 33}, "33 heads do not divide the hidden size 4096"),
        ({"num_key_value_heads": 5}, "heads 32 do not divide by kv_heads 5"),
        ({"vocab_size": []}, "vocab_size is '[]'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; it must be true or false"),
        ({"model_type": None}, "model_type is missing"),
        ({"model_type": 7}, "model_type is missing"),
        ({"model_type": "mixtral"}, "num_local_experts is missing"),
        (
            {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3},
            "visits 3 experts, but a layer has only 2",
        ),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ({"model_type": "mpt", "d_model": 64, "n_heads": 4, "n_layers": 2, "attn_config": 3}, "attn_config is '3'"),
        ({"model_type": "mistral", "sliding_window": "4k"}, "sliding_window is '4k'; it must be a whole number"),
        ({"model_type": "gemma2", "layer_types": 3}, "layer_types is '3'; it must be a list"),
        ({"model_type": "qwen2_moe", "mlp_only_layers": 2}, "mlp_only_layers is '2'; it must be a list"),
    ],
)
def test_a_bad_key_is_one_line_that_names_it(change, said):
    with pytest.raises(BadFile) as caught:
        model_from_config(llama(**change), "some/config.json", "x")
    assert said in caught.value.message
    assert caught.value.message.startswith("some/config.json")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "said"), [("{", "line 1: not valid JSON"), ("[]", "not list"), ("7", "not int"), ("", "not valid JSON")]
)
def test_a_file_that_is_no_config_is_refused(tmp_path, text, said):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(BadFile) as caught:
        parse_model_argument(str(path))
    assert said in caught.value.message


def test_a_path_that_leads_nowhere_is_said(tmp_path):
    with pytest.raises(BadFile, match="no such file"):
        parse_model_argument(str(tmp_path / "none.json"))
    with pytest.raises(BadFile, match=r"the folder has no config\.json"):
        parse_model_argument(str(tmp_path))
