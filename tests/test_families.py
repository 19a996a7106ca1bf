"""What a model of each family is, beside its paper or its published class."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanum.errors import Refused
from nanum.model import Attention, Experts, LatentAttention, Layer, LinearAttention, Mlp, Model, load
from nanum.model.config import from_config
from nanum.model.families import MODULES, TYPES
from nanum.model.pattern import arranged
from nanum.model.presets import presets

CONFIGS = {preset.name: preset.config for preset in presets()}


def changed(name: str, **change: Any) -> Model:
    return from_config({**CONFIGS[name], **change}, name)


def each_layer(model: Model) -> list[Layer]:
    return [model.kinds[kind] for times, kinds in model.runs for _ in range(times) for kind in kinds]


def slides(model: Model) -> list[bool]:
    return [layer.attention.window is not None for layer in each_layer(model)]  # type: ignore[union-attr]


def routes(model: Model) -> list[bool]:
    return [isinstance(layer.mlp, Experts) for layer in each_layer(model)]


# --- the register -----------------------------------------------------------------------------------------------------
def test_a_file_states_the_types_that_the_register_says() -> None:
    for module, types in MODULES.items():
        assert tuple(import_module(f"nanum.model.families.{module}").FAMILIES) == types


def test_every_type_is_a_preset_s() -> None:
    assert set(TYPES) == {config["model_type"] for config in CONFIGS.values()}


# --- layers by their pattern ------------------------------------------------------------------------------------------
@given(st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_arranged_marks_make_the_same_layers(marks: list[int]) -> None:
    leading, group = arranged(marks)
    times = len(marks) // len(group) + 1
    assert [*leading, *(list(group) * times)][: len(marks)] == marks


@given(st.lists(st.integers(0, 1), max_size=4), st.lists(st.integers(0, 1), min_size=1, max_size=6), st.integers(3, 9))
def test_no_more_marks_than_are_needed(leading: list[int], group: list[int], times: int) -> None:
    found = arranged([*leading, *(group * times)])
    assert len(found[0]) + len(found[1]) <= len(leading) + len(group)


# --- windows ----------------------------------------------------------------------------------------------------------
def test_gemma_2_slides_in_every_other_layer_the_first_among_them() -> None:
    """Gemma 2 report (arXiv 2408.00118), section 2: local and global attention in every other layer; both norms."""
    model = load("gemma-2-9b")
    assert slides(model) == [True, False] * 21
    assert model.placement == "sandwich"
    assert {layer.attention.window for layer in model.kinds} == {4096, None}  # type: ignore[union-attr]


def test_gemma_3_has_five_local_layers_to_a_global_one() -> None:
    """Gemma 3 report (arXiv 2503.19786), section 2, which begins with a local layer; queries and keys are normed."""
    model = load("gemma-3-4b")
    assert slides(model) == [(i + 1) % 6 != 0 for i in range(34)]
    assert {layer.attention.qk_norm for layer in model.kinds} == {"head"}  # type: ignore[union-attr]
    stated = ["full_attention"] * 17 + ["sliding_attention"] * 17
    assert slides(changed("gemma-3-4b", layer_types=stated)) == [False] * 17 + [True] * 17


def test_qwen_2_slides_from_a_layer_on_and_only_if_told() -> None:
    assert slides(changed("qwen2.5-7b", sliding_window=4096)) == [False] * 28
    told = changed("qwen2.5-7b", sliding_window=4096, use_sliding_window=True, max_window_layers=20)
    assert slides(told) == [False] * 20 + [True] * 8


def test_gpt_oss_slides_first_and_has_sinks() -> None:
    """gpt-oss model card (arXiv 2508.10925), section 2.2: banded windows of 128 and full attention alternate."""
    model = load("gpt-oss-20b")
    assert slides(model) == [True, False] * 12
    assert {(layer.attention.sinks, layer.attention.window) for layer in model.kinds} == {  # type: ignore[union-attr]
        (True, 128),
        (True, None),
    }


def test_llama_4_turns_three_layers_of_four_in_chunks() -> None:
    scout, maverick = load("llama-4-scout"), load("llama-4-maverick")
    layers = each_layer(scout)
    assert [layer.attention.rotary_dim for layer in layers] == [128, 128, 128, 0] * 12
    assert [layer.attention.window for layer in layers] == [8192, 8192, 8192, None] * 12  # type: ignore[union-attr]
    assert [layer.attention.qk_norm for layer in layers] == [*["bare_head"] * 3, "none"] * 12  # type: ignore[union-attr]
    assert routes(scout) == [True] * 48
    assert routes(maverick) == [False, True] * 24


def test_smollm_3_turns_three_layers_of_four() -> None:
    assert [layer.attention.rotary_dim for layer in each_layer(load("smollm3-3b"))] == [128, 128, 128, 0] * 9


def test_qwen3_next_and_minimax_see_all_in_a_few_layers() -> None:
    """Three layers of the gated delta rule to a gated full one; seven of lightning attention (arXiv 2501.08313)."""
    qwen, minimax = load("qwen3-next-80b-a3b"), load("minimax-m1")
    linear = [isinstance(layer.attention, LinearAttention) for layer in each_layer(qwen)]
    assert linear == [(i + 1) % 4 != 0 for i in range(48)]
    assert qwen.attention == Attention(16, 2, 256, qk_norm="head", rotary=64, gated=True)
    assert qwen.kinds[0].attention == LinearAttention("delta", 16, 32, 128, 128, convolved=4)
    linear = [isinstance(layer.attention, LinearAttention) for layer in each_layer(minimax)]
    assert linear == [i % 8 != 7 for i in range(80)]
    told = ["linear_attention"] * 47 + ["full_attention"]
    layers = each_layer(changed("qwen3-next-80b-a3b", layer_types=told))
    assert [isinstance(layer.attention, LinearAttention) for layer in layers] == [True] * 47 + [False]


# --- experts ----------------------------------------------------------------------------------------------------------
def test_deepseek_v3_has_three_dense_layers_and_one_shared_expert() -> None:
    """DeepSeek-V3 (arXiv 2412.19437), section 4.2."""
    model = load("deepseek-v3")
    assert routes(model) == [False] * 3 + [True] * 58
    experts = Experts(
        256, 8, Mlp(2048, True, "silu"), shared=Mlp(2048, True, "silu"), correction_bias=True, groups=8, group_topk=4
    )
    assert model.kinds == (
        Layer(LatentAttention(128, 1536, 512, 128, 64, 128), Mlp(18432, True, "silu")),
        Layer(LatentAttention(128, 1536, 512, 128, 64, 128), experts),
    )
    assert any("multi-token" in what for what in model.left_out)


def test_shared_experts_are_one_as_wide_as_all() -> None:
    experts = load("deepseek-moe-16b").mlp
    assert isinstance(experts, Experts)
    assert experts.shared == Mlp(2 * 1408, True, "silu")


def test_experts_where_the_config_says() -> None:
    assert routes(changed("qwen3-30b-a3b", decoder_sparse_step=2)) == [False, True] * 24
    assert routes(changed("qwen3-30b-a3b", mlp_only_layers=[0, 1])) == [False] * 2 + [True] * 46
    assert routes(changed("llama-4-scout", moe_layers=[5])) == [i == 5 for i in range(48)]
    assert routes(changed("deepseek-moe-16b", n_routed_experts=None)) == [False] * 28


def test_more_experts_for_a_token_than_there_are() -> None:
    with pytest.raises(Refused, match="num_experts_per_tok=9 exceeds the 8 experts"):
        changed("mixtral-8x7b", num_experts_per_tok=9)


# --- where norms and biases are ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "placement", "norm", "position"),
    [
        ("gpt-j-6b", "parallel", "layer_norm", "rotary"),
        ("gpt-neox-20b", "parallel_two_norms", "layer_norm", "rotary"),
        ("falcon-7b", "parallel", "layer_norm", "rotary"),
        ("falcon-40b", "parallel_two_norms", "layer_norm", "rotary"),
        ("phi-2", "parallel", "layer_norm", "rotary"),
        ("opt-350m", "post_residual", "layer_norm", "learned"),
        ("opt-1.3b", "pre", "layer_norm", "learned"),
        ("bloom", "pre", "layer_norm", "alibi"),
        ("mpt-7b", "pre", "layer_norm_no_bias", "alibi"),
        ("olmo-7b", "pre", "layer_norm_no_weight", "rotary"),
        ("olmo-2-7b", "post", "rms_norm", "rotary"),
    ],
)
def test_the_frame_of_a_layer(name: str, placement: str, norm: str, position: str) -> None:
    model = load(name)
    assert (model.placement, model.norm, model.position) == (placement, norm, position)


def test_one_head_of_keys() -> None:
    for name in ("falcon-7b", "starcoderbase-15.5b", "gemma-2b"):
        assert load(name).attention.num_key_value_heads == 1


def test_a_part_of_each_head_turns() -> None:
    turned = {name: load(name).attention for name in ("gpt-j-6b", "gpt-neox-20b", "phi-2", "phi-4-mini")}
    assert {name: (a.rotary_dim, a.head_dim) for name, a in turned.items()} == {
        "gpt-j-6b": (64, 256),
        "gpt-neox-20b": (24, 96),
        "phi-2": (32, 80),
        "phi-4-mini": (96, 128),
    }
    newer = {**CONFIGS["phi-2"], "rope_parameters": {"partial_rotary_factor": 0.4, "rope_theta": 1e4}}
    del newer["partial_rotary_factor"]
    assert from_config(newer, "phi-2").attention == turned["phi-2"]
    with pytest.raises(Refused, match='partial_rotary_factor = "all" is not a number above 0'):
        from_config({**newer, "rope_parameters": {"partial_rotary_factor": "all"}}, "phi-2")


def test_which_projections_have_biases() -> None:
    def biases(name: str) -> tuple[bool, bool, bool]:
        a, mlp = load(name).attention, load(name).mlp
        assert isinstance(a, Attention)
        return a.qkv_bias, a.output_bias, (mlp.expert if isinstance(mlp, Experts) else mlp).bias

    assert biases("qwen2.5-7b") == (True, False, False)
    assert biases("qwen3-8b") == (False, False, False)
    assert biases("gpt-j-6b") == (False, False, True)
    assert biases("gpt-oss-20b") == (True, True, True)
    assert biases("glm-4.5") == (True, False, False)
    assert biases("phi-3.5-moe") == (True, True, False)


def test_bert_sees_all_and_roberta_leaves_two_rows_of_positions() -> None:
    """Devlin et al. 2018: post-norm layers, segments, and a head with a layer of its own; fairseq's padding takes two
    rows of RoBERTa's 514.
    """
    bert, roberta = load("bert-base-uncased"), load("roberta-base")
    assert (bert.token_types, bert.max_position_embeddings, bert.unused_positions) == (2, 512, 0)
    assert (roberta.token_types, roberta.max_position_embeddings, roberta.unused_positions) == (1, 512, 2)
    for model in (bert, roberta):
        assert isinstance(model.attention, Attention)
        assert not model.attention.causal
        assert model.placement == "post_residual"
        assert model.head_transform
        assert model.head_bias
        assert not model.final_norm


# --- other names, other parts -----------------------------------------------------------------------------------------
def test_keys_that_have_two_names() -> None:
    config = {**CONFIGS["bloom-560m"]}
    again = {**config, "hidden_size": config["n_embed"]}
    assert from_config(again, "x") == from_config(config, "x")
    with pytest.raises(Refused, match="n_embed and hidden_size mean the same, and differ"):
        from_config({**config, "hidden_size": 2048}, "x")
    with pytest.raises(Refused, match="n_embed = -1 is not a whole number"):
        from_config({**config, "n_embed": -1}, "x")


@pytest.mark.parametrize(("whole", "name"), [("gemma3", "gemma-3-4b"), ("llama4", "llama-4-scout")])
def test_the_text_part_of_a_model_of_images(whole: str, name: str) -> None:
    model = from_config({"model_type": whole, "text_config": CONFIGS[name], "vision_config": {"depth": 27}}, name)
    assert (model.kinds, model.runs) == (load(name).kinds, load(name).runs)
    assert any("images" in what for what in model.left_out)
    with pytest.raises(Refused, match="text_config"):
        from_config({"model_type": whole}, "x")


def test_published_weights_may_be_quantized_where_they_are_published_so() -> None:
    quantized = {"quantization_config": {"quant_method": "fp8"}}
    assert any("quantization" in what for what in changed("deepseek-v3", **quantized).left_out)
    with pytest.raises(Refused, match="quantized weights are not modelled"):
        changed("llama-3.1-8b", **quantized)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("mpt-7b", {"attn_config": {"alibi": False}}, "learned positions is not modelled"),
        ("mpt-7b", {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln is set"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "= true is not false"),
        ("falcon-40b", {"num_kv_heads": 7}, "num_kv_heads=7 does not divide"),
        ("gpt-j-6b", {"rotary_dim": 512}, "more than a head has"),
        ("gpt-neox-20b", {"rotary_pct": 0.2}, "turns 19 entries"),
        ("phi-2", {"partial_rotary_factor": 0.25 + 0.0125}, "partial_rotary_factor"),
        ("gemma-7b", {"rope_parameters": [1], "num_key_value_heads": 5}, "num_key_value_heads=5 does not divide"),
        ("qwen3-next-80b-a3b", {"linear_num_value_heads": 24}, "linear_num_key_heads=16 does not divide"),
        ("minimax-m1", {"attn_type_list": [0, 1]}, "attn_type_list has 2 entries"),
        ("minimax-m1", {"rotary_dim": 256}, "more than a head has: 128"),
        ("minimax-m1", {"shared_intermediate_size": 64}, "is not a whole number from 0 to 0"),
        ("deepseek-v2", {"qk_rope_head_dim": 63}, "qk_rope_head_dim=63 is odd"),
        ("smollm3-3b", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for num_hidden_layers=36"),
        ("gemma-2-9b", {"layer_types": ["chunked_attention"] * 42}, "full_attention or sliding_attention"),
        ("bert-base-uncased", {"position_embedding_type": "relative_key"}, "is not absolute, and no other"),
        ("roberta-base", {"max_position_embeddings": 2}, "is not a whole number from 3"),
        ("opt-125m", {"activation_dropout": 0.1}, "dropout within a feed-forward block"),
    ],
)
def test_what_a_family_does_not_have(name: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused) as refused:
        changed(name, **change)
    assert said in str(refused.value)
