import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanum import model
from nanum.errors import Refused
from nanum.model.config import from_config
from nanum.model.families import family
from nanum.model.presets import presets

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}


def refusal(config):
    with pytest.raises(Refused) as refused:
        from_config(config, "x")
    return refused.value.reasons


@pytest.mark.parametrize("preset", presets(), ids=lambda preset: preset.name)
def test_a_preset_passes_the_door_that_users_files_pass(preset):
    assert from_config(preset.config, preset.name, source=preset.source) == preset.model()
    assert preset.parameters > 0
    assert preset.source
    assert preset.verified in ("exact", "approx")


def test_names_and_aliases_are_unique():
    names = [name.lower() for preset in presets() for name in (preset.name, *preset.aliases)]
    assert len(names) == len(set(names))


def test_what_must_be_shipped():
    counts = {preset.name: preset.parameters for preset in presets() if preset.verified == "exact"}
    assert counts["gpt2"] == 124_439_808
    assert counts["llama-2-7b"] == 6_738_415_616
    assert counts["llama-3.1-8b"] == 8_030_261_248
    assert counts["llama-3.1-70b"] == 70_553_706_496
    assert counts["llama-3.1-405b"] == 405_853_388_800
    assert {"gpt3-175b", "megatron-1t", "llama-3.2-1b"} <= {preset.name for preset in presets()}


@pytest.mark.parametrize("word", ["llama-3.1-70b", "LLAMA-3.1-70B", "meta-llama/Llama-3.1-70B"])
def test_load_by_name(word):
    loaded = model.load(word)
    assert loaded.name == "llama-3.1-70b"
    assert (loaded.hidden_size, loaded.num_hidden_layers, loaded.vocab_size) == (8192, 80, 128256)
    assert (loaded.attention.num_attention_heads, loaded.attention.num_key_value_heads) == (64, 8)
    assert (loaded.norm, loaded.position, loaded.mlp.gated) == ("rms_norm", "rotary", True)


def test_a_preset_waits_for_neither_pydantic_nor_numpy_nor_torch():
    code = (
        "import sys; from nanum import model, cluster; model.load('gpt2'); cluster.load('8x8xh100-sxm');"
        "sys.exit(bool({'pydantic', 'numpy', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_llama_defaults():
    loaded = from_config(LLAMA, "x")
    assert loaded.attention.num_key_value_heads == 32
    assert loaded.attention.head_dim == 128
    assert loaded.max_position_embeddings == 2048
    assert not loaded.tie_word_embeddings
    biases = (loaded.attention.qkv_bias, loaded.attention.output_bias, loaded.mlp.bias)
    assert biases == (False, False, False)


def test_llama_honours_what_is_stated():
    stated = {
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "hidden_act": "gelu",
    }
    loaded = from_config({**LLAMA, **stated, "num_key_value_heads": 8, "attention_dropout": 0.1}, "x")
    assert loaded.attention.qkv_bias
    assert loaded.attention.output_bias
    assert loaded.mlp.bias
    assert loaded.attention.head_dim == 64
    assert loaded.attention.num_key_value_heads == 8
    assert loaded.attention.dropout == 0.1
    assert loaded.tie_word_embeddings
    assert loaded.mlp.activation == "gelu"


def test_gpt2_defaults():
    loaded = from_config(GPT2, "x")
    assert loaded.mlp.intermediate_size == 4 * 768
    assert loaded.max_position_embeddings == 1024
    assert loaded.tie_word_embeddings
    assert loaded.attention.qkv_bias
    assert loaded.attention.output_bias
    assert loaded.mlp.bias
    assert (loaded.norm, loaded.position, loaded.mlp.activation, loaded.mlp.gated) == (
        "layer_norm",
        "learned",
        "gelu",
        False,
    )
    assert (loaded.attention.dropout, loaded.hidden_dropout) == (0.0, 0.0)


def test_gpt2_honours_what_is_stated():
    stated = {"n_inner": 1000, "n_positions": 2048, "attn_pdrop": 0.1, "resid_pdrop": 0.2, "tie_word_embeddings": False}
    loaded = from_config({**GPT2, **stated}, "x")
    assert loaded.mlp.intermediate_size == 1000
    assert loaded.max_position_embeddings == 2048
    assert (loaded.attention.dropout, loaded.hidden_dropout) == (0.1, 0.2)
    assert not loaded.tie_word_embeddings


def test_every_reason_at_once():
    reasons = refusal(
        {
            "model_type": "llama",
            "hidden_size": -1,
            "intermediate_size": float("nan"),
            "num_attention_heads": "32",
            "vocab_size": 0,
            "num_key_value_head": 8,
            "mlp_bias": 1,
            "hidden_act": "tanh",
            "quantization_config": {"bits": 4},
            "num_local_experts": 8,
        }
    )
    for said in (
        "hidden_size = -1 is not a whole number",
        "intermediate_size = NaN is not a whole number",
        'num_attention_heads = "32" is not a whole number',
        "vocab_size = 0 is not a whole number",
        "num_hidden_layers is missing",
        "unknown key 'num_key_value_head' (did you mean num_key_value_heads?)",
        "mlp_bias = 1 is not true or false",
        'hidden_act = "tanh" is not one of',
        "quantized weights are not modelled",
        "num_local_experts = 8: a llama has no such key",
    ):
        assert sum(said in reason for reason in reasons) == 1, said
    assert len(reasons) == 10
    assert all(reason.startswith("config.json: ") for reason in reasons)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "lama"}, "model_type 'lama' is not modelled (did you mean llama? known: gpt2, gptj, "),
        ({"model_type": "rwkv"}, "model_type 'rwkv' is not modelled (known: gpt2, gptj, "),
        ({"model_type": "albert"}, "model_type 'albert' is not modelled yet: it has an encoder"),
        ({"model_type": "mamba"}, "model_type 'mamba' is not modelled yet: it has a state space"),
        ({"model_type": ["llama"]}, 'model_type ["llama"] is not modelled'),
        ({"model_type": None}, "model_type is missing"),
        ({"hidden_size": True}, "hidden_size = true"),
        ({"hidden_size": 4096.5}, "hidden_size = 4096.5"),
        ({"hidden_size": 10**30}, "hidden_size = 1000"),
        ({"hidden_size": None}, "hidden_size = null"),
        ({"num_attention_heads": 33}, "num_attention_heads=33 does not divide hidden_size=4096"),
        ({"num_key_value_heads": 5}, "num_key_value_heads=5 does not divide num_attention_heads=32"),
        ({"head_dim": 63}, "head_dim=63 is odd"),
        ({"sliding_window": 4096}, "sliding_window = 4096: a llama has no such key"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers=32"),
        ({"attention_dropout": 1.5}, "attention_dropout = 1.5"),
    ],
)
def test_one_reason(change, said):
    (reason,) = refusal({**LLAMA, **change})
    assert said in reason


def test_gpt2_heads_must_divide():
    assert refusal({**GPT2, "n_head": 7}) == ("config.json: n_head=7 does not divide n_embd=768",)


def test_gpt2_drops_embeddings_where_it_drops_residuals():
    alike = {**GPT2, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
    assert from_config(alike, "x").hidden_dropout == 0.1
    (reason,) = refusal({**alike, "embd_pdrop": 0.0})
    assert "embd_pdrop=0 but resid_pdrop=0.1" in reason


def test_a_mistral_has_a_window_unless_it_says_otherwise():
    mistral = {**LLAMA, "model_type": "mistral"}
    assert from_config(mistral, "x").attention.window == 4096
    assert from_config({**mistral, "sliding_window": 1024}, "x").attention.window == 1024
    assert from_config({**mistral, "sliding_window": None}, "x").attention.window is None
    assert from_config({**mistral, "sliding_window": None}, "x").attention.num_key_value_heads == 8


def test_keys_that_change_no_shape_are_passed_over():
    extra = {
        "architectures": ["LlamaForCausalLM"],
        "rope_scaling": {"factor": 8},
        "torch_dtype": "bfloat16",
        "_commit": "x",
    }
    assert from_config({**LLAMA, **extra}, "x") == from_config(LLAMA, "x")


def test_load_from_a_file_and_a_folder(tmp_path):
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    by_folder, by_file = model.load(str(folder)), model.load(str(folder / "config.json"))
    assert by_folder == by_file
    assert by_folder.name == "my-llama"


def test_a_refused_file_names_its_path(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, "hidden_size": 0, "vocab_size": -5}))
    with pytest.raises(Refused) as refused:
        model.load(str(file))
    assert len(refused.value.reasons) == 2
    assert all(reason.startswith(f"{file}: ") for reason in refused.value.reasons)


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "not JSON (line 1"), ("[1]", "not the JSON object"), ("\xff\xfe", "not JSON"), ("[" * 10**5, "not JSON")],
)
def test_a_file_that_is_no_config(tmp_path, text, said):
    file = tmp_path / "config.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(Refused) as refused:
        model.load(str(file))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("lama-2-7b", "close: llama-2-7b"),
        ("no-such-thing", "`nanum models` lists"),
        ("/no/such/config.json", "no such file"),
        ("", "unknown model ''"),
        ("a" * 5000, "unknown model 'aaa"),
        ("a\0b", "unknown model"),
    ],
)
def test_an_unknown_word(word, said):
    with pytest.raises(Refused) as refused:
        model.load(word)
    assert said in str(refused.value)
    assert len(str(refused.value)) < 300


JUNK = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([1]), st.just({}))
BASES = {preset.config["model_type"]: preset.config for preset in presets()}


@given(st.sampled_from(sorted(BASES)), st.data(), JUNK)
def test_no_value_brings_down_the_door(model_type, data, value):
    key = data.draw(st.sampled_from(sorted(set(family(model_type).keys) | {"rope_parameters", "num_experts"})))
    if key == "rope_parameters":
        value = {"partial_rotary_factor": value}
    try:
        loaded = from_config({**BASES[model_type], key: value}, "x")
    except Refused:
        return  # a reason, and no other error
    assert loaded.hidden_size >= 1
    for kind in loaded.kinds:
        assert kind.attention.num_attention_heads % kind.attention.num_key_value_heads == 0
    assert sum(times * len(kinds) for times, kinds in loaded.runs) == loaded.num_hidden_layers
