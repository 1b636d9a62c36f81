"""Model shapes against the counts that their makers publish, and what a model's name or sizes mean."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from phalanx.core.errors import BadFile, BadRequest, PhalanxError
from phalanx.planner.facts.model_argument import ALL_SIZES, parse_model_argument
from phalanx.planner.facts.models import find_model, parse_model_table, read_models
from phalanx.planner.facts.table_files import shipped_text

LLAMA = "layers=32,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256"


@pytest.mark.parametrize("entry", read_models(), ids=lambda entry: entry.model.name)
def test_every_shape_has_the_published_number_of_parameters(entry):
    assert entry.model.parameters == pytest.approx(entry.published_parameters, rel=0.01)


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("mixtral-8x7b", 12.9e9),  # Jiang et al., Mixtral of Experts, 2024: 13B active
        ("deepseek-v3", 37.0e9),  # DeepSeek-V3 Technical Report, 2024: 37B
        ("deepseek-v2", 21.0e9),  # DeepSeek-V2, 2024: 21B
        ("qwen3-235b-a22b", 22.0e9),
        ("kimi-k2", 32.6e9),
        ("llama-4-scout", 17.0e9),
    ],
)
def test_a_mixture_visits_as_many_parameters_per_token_as_published(name, active):
    assert find_model(name).active_parameters == pytest.approx(active, rel=0.05)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("llama3-70b", "llama-3-70b"),
        ("Llama-3.1-70B", "llama-3.1-70b"),
        ("meta-llama/Llama-3.1-70B", "llama-3.1-70b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Llama-2-70b-chat-hf", "llama-2-70b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),
        ("qwen2_5-7b", None),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
        ("gpt-175b", "gpt3-175b"),
        (" GPT2-XL ", "gpt2-xl"),
    ],
)
def test_a_model_is_known_by_the_names_people_and_hubs_give_it(text, name):
    if name is None:
        with pytest.raises(BadRequest, match="unknown model"):
            parse_model_argument(text)
        return
    assert parse_model_argument(text).name == name


def test_every_name_and_alias_leads_to_its_own_row():
    claimed: dict[str, str] = {}
    for entry in read_models():
        assert find_model(entry.model.name) == entry.model
        for alias in entry.aliases:
            assert claimed.setdefault(alias, entry.model.name) == entry.model.name, alias
            assert find_model(alias) == entry.model


def test_a_bare_size_is_the_usual_model_of_it_and_that_is_said():
    notes: list[str] = []
    assert parse_model_argument("70b", notes=notes).name == "llama-3.1-70b"
    assert notes == ["took 70b as llama-3.1-70b"]


def test_a_bare_size_that_nobody_has_is_the_nearest_dense_one():
    notes: list[str] = []
    found = parse_model_argument("500B", notes=notes)
    assert found.name == "megatron-530b"
    assert "no model of size 500B is listed" in notes[0]
    assert "530B parameters" in notes[0]


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(BadRequest, match="unknown model 'lama-2-7b'") as caught:
        parse_model_argument("lama-2-7b")
    assert caught.value.hint == "did you mean 'llama-2-7b'?"
    with pytest.raises(BadRequest) as caught:
        parse_model_argument("zzzzzzzz")
    assert "config.json" in caught.value.hint


def test_sizes_written_out_are_the_model_of_the_table():
    written = parse_model_argument(LLAMA)
    assert written.parameters == find_model("llama-3-8b").parameters
    assert written.gated


def test_sizes_without_ffn_are_a_gpt_and_that_is_said():
    notes: list[str] = []
    model = parse_model_argument(
        "layers=24,hidden=2048,heads=16,vocab=50257,positions=2048,tied=1,biases=1", notes=notes
    )
    assert (model.ffn, model.gated) == (8192, False)
    assert "four times the hidden size" in notes[0]
    assert model.parameters == pytest.approx(1.32e9, rel=0.01)


def test_sizes_may_state_a_mixture():
    model = parse_model_argument(
        f"{LLAMA},experts=8,per_token=2,shared_ffn=0,dense_layers=1".replace("128256", "32000")
    )
    assert model.mixture is not None
    assert (model.mixture.experts, model.mixture.per_token, model.mixture.ffn) == (8, 2, 14336)
    assert model.active_parameters < model.parameters


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("layers=32,hidden=4096,heads=32", "vocab is missing", "required: layers, hidden, heads, vocab"),
        ("layers=32,hiden=4096,heads=32,vocab=1", "unknown size 'hiden'", "did you mean 'hidden'?"),
        ("layers=32,layers=4,hidden=4096,heads=32,vocab=1", "layers is given twice", ""),
        ("layers=-1,hidden=4096,heads=32,vocab=1", "layers is -1", ""),
        ("layers=0,hidden=4096,heads=32,vocab=1", "layers is 0", ""),
        ("layers=4,hidden=4096,heads=32,vocab=99999999", "vocab is 99999999", ""),
        ("layers=99999,hidden=4096,heads=32,vocab=1", "layers is 99999", ""),
        ("layers=4,hidden=100,heads=32,vocab=1", "32 heads do not divide the hidden size 100", "head_dim"),
        ("layers=4,hidden=128,heads=4,kv_heads=3,vocab=1", "heads 4 do not divide by kv_heads 3", ""),
        ("layers=4,hidden=128,heads=4,vocab=1,gated=2", "gated is 2", ""),
        ("layers=4,hidden=128,heads=4,vocab=1,experts=4", "experts needs per_token", "per_token=2"),
        ("layers=4,hidden=128,heads=4,vocab=1,per_token=4", "per_token needs experts", "experts=8"),
        ("layers=4,hidden=128,heads=4,vocab=1,experts=4,per_token=5", "visits 5 experts, but a layer has only 4", ""),
        ("layers=4,hidden=128,heads=4,vocab=1,experts=4,per_token=1,dense_layers=5", "5 dense layers", ""),
        ("layers=four,hidden=128", "'layers=four' is not a size", "layers=32"),
        ("", "name is empty", "llama3-70b"),
        ("x" * 5000, "longer than 4096 characters", ""),
    ],
)
def test_sizes_that_cannot_be_are_one_clear_line(text, said, hint):
    with pytest.raises(BadRequest) as caught:
        parse_model_argument(text)
    assert said in caught.value.message
    assert "\n" not in caught.value.message
    assert hint in caught.value.hint


@given(st.dictionaries(st.sampled_from(ALL_SIZES), st.integers(-2, 5000), min_size=1))
def test_any_sizes_are_a_model_with_parameters_or_refused_in_our_words(sizes):
    model, refused = None, ""
    try:
        model = parse_model_argument(",".join(f"{name}={value}" for name, value in sizes.items()))
    except PhalanxError as error:
        refused = error.message
    if model is None:
        assert refused.startswith("model")
    else:
        assert 0 < model.active_parameters <= model.parameters


@given(st.text(max_size=60))
def test_any_text_is_a_model_or_refused_in_our_words(text):
    said = "a model"
    try:
        parse_model_argument(text)
    except PhalanxError as error:
        said = error.message
    assert said


def test_a_users_own_model_goes_before_the_shipped_one(tmp_path):
    (tmp_path / "facts").mkdir()
    header, first = shipped_text("models.csv").splitlines()[:2]
    row = first.replace("gpt2,", "ours-1,", 1).replace("gpt2-small", "70b")
    (tmp_path / "facts" / "models.csv").write_text(f"{header}\n{row}\n")
    assert parse_model_argument("ours-1", home=str(tmp_path)).layers == 12
    assert parse_model_argument("70b", home=str(tmp_path)).name == "ours-1"
    assert parse_model_argument("llama3-70b", home=str(tmp_path)).name == "llama-3-70b"


def test_a_row_with_sizes_that_contradict_each_other_is_refused_by_line():
    header = "name,layers,hidden,heads,kv_heads,head_dim,ffn,vocab,published_parameters,source,date\n"
    with pytest.raises(BadFile, match=r"mine\.csv line 2: heads 4 do not divide by kv_heads 3"):
        parse_model_table(header + "ours,2,64,4,3,16,256,100,1000,me,2026\n", "mine.csv")
