"""Frozen weights, adapters (LoRA) and quantized weights beside hand formulas, and what is refused of them.

That real steps hold and exchange the same is `verify`'s (its matrix has adapters and frozen weights).
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from conftest import Run
from hypothesis import given, settings
from hypothesis import strategies as st

from nanum import engines
from nanum.account.memory import held_after
from nanum.account.traffic import traffic
from nanum.build import build
from nanum.cluster import load as cluster
from nanum.division.parts import emit_parts
from nanum.dtypes import bytes_of
from nanum.errors import Refused
from nanum.job import ALL, Job, LoraTargets, Trained
from nanum.layout import Layout, Structure
from nanum.model import Attention, Mlp, Model
from nanum.model import load as load_model
from nanum.operators.recorder import Op
from nanum.prediction import predict
from nanum.prediction.reference import Reference, parameters, reference

LORA = Trained("none", lora_rank=8)
S, B = 32, 2
TINY = Model(
    "tiny", 64, 512, 3, S, Attention(4, 2, 16), Mlp(160, gated=True, activation="silu"), "rms_norm", "rotary", False
)
TINYLLAMA = Model(
    "TinyLlama", 2048, 32000, 22, 2048, Attention(32, 4, 64), Mlp(5632, gated=True, activation="silu"), "rms_norm",
    "rotary", False,
)  # fmt: skip


def widths(model: Model, targets: LoraTargets) -> int:
    """Of a layer, the inputs and outputs of its linear layers that have adapters."""
    a, d, f = model.attention, model.hidden_size, model.mlp.intermediate_size  # type: ignore[union-attr]
    q, k = a.num_attention_heads * a.head_dim, a.num_key_value_heads * a.head_dim
    if targets == "qv":
        return 2 * d + q + k
    return 4 * d + 2 * q + 2 * k + (3 * (d + f) if targets == "all" else 0)


def projections(model: Model) -> int:
    """Elements of a layer's linear layers."""
    a, d, f = model.attention, model.hidden_size, model.mlp.intermediate_size  # type: ignore[union-attr]
    return d * a.head_dim * 2 * (a.num_attention_heads + a.num_key_value_heads) + 3 * d * f


# --- how many ---------------------------------------------------------------------------------------------------------
@settings(max_examples=25)
@given(
    st.sampled_from(("all", "attention", "qv")), st.integers(1, 40), st.integers(1, 5), st.integers(1, 9),
    st.booleans(),
)  # fmt: skip
def test_adapters_are_as_many_as_their_widths_say(
    targets: LoraTargets, rank: int, layers: int, mlp: int, tied: bool
) -> None:
    """r (in + out) for each linear layer (Hu et al. 2021, section 4.1); PEFT counts the others beside them."""
    model = replace(
        TINY, num_hidden_layers=layers, mlp=Mlp(8 * mlp, gated=True, activation="silu"), tie_word_embeddings=tied
    )
    found = reference(model, 1, Trained("none", rank, targets))
    assert found.trained_parameters == rank * layers * widths(model, targets)
    assert found.parameters == parameters(model) + found.trained_parameters


def test_ends_are_trained_beside_adapters() -> None:
    """PEFT's modules_to_save; a table that both ends share once."""
    d, rows = TINY.hidden_size, TINY.vocab_size
    adapters = reference(TINY, 1, LORA).trained_parameters
    beside = replace(LORA, weights="ends")
    assert reference(TINY, 1, beside).trained_parameters == adapters + 2 * rows * d + d
    tied = replace(TINY, tie_word_embeddings=True)
    assert reference(tied, 1, beside).trained_parameters == adapters + rows * d + d
    assert reference(TINY, 1, Trained("layers")).trained_parameters == parameters(TINY) - 2 * rows * d - d


@pytest.mark.parametrize(
    ("model", "trained", "printed"),
    [
        # github.com/huggingface/peft/issues/1514: 50,462,720 of 1,150,511,104
        (TINYLLAMA, Trained("none", 64), (50_462_720, 1_150_511_104)),
        # github.com/ymcui/Chinese-LLaMA-Alpaca/issues/189, r=8 on q and v; theirs has more tokens
        ("llama-7b", Trained("none", 8, "qv"), (4_194_304, None)),
    ],
    ids=["tinyllama", "llama-7b"],
)
def test_what_peft_printed(model: Model | str, trained: Trained, printed: tuple[int, int | None]) -> None:
    found: Reference = reference(load_model(model) if isinstance(model, str) else model, 1, trained)
    assert found.trained_parameters == printed[0]
    assert printed[1] in (None, found.parameters)


# --- what is not run --------------------------------------------------------------------------------------------------
def test_frozen_weights_cost_four_flops_and_adapters_six() -> None:
    """Of each token: forward and the input's gradient, and the weight's of what is trained. Nothing before the first
    layer's adapters needs a gradient, so that the first products of q, k and v have none to give.
    """
    d, r, layers = TINY.hidden_size, LORA.lora_rank, TINY.num_hidden_layers
    a = TINY.attention
    head = TINY.vocab_size * d
    frozen, adapters = layers * projections(TINY) + head, r * layers * widths(TINY, "all")
    first = d * a.head_dim * (a.num_attention_heads + 2 * a.num_key_value_heads) + 3 * r * d
    attention = layers * 3 * 2 * S * S * a.num_attention_heads * a.head_dim
    expected = S * (4 * frozen + 6 * adapters - 2 * first) + attention
    assert reference(TINY, S, LORA).model_flops_per_sequence == expected


def test_flops_of_lora_as_megatron_bridge_counts_them() -> None:
    """Megatron-Bridge's docs/performance-summary-archive.md, NeMo 26.06, Llama-3 70B by LoRA on GB300: 2,086 TFLOPS at
    7,481 tokens/s are 4 a parameter, without attention (here 6·layers·hidden·length, causal) and whatever the rank.
    """
    model, length = load_model("llama-3-70b"), 4096
    attention = 6 * model.num_hidden_layers * model.hidden_size * length
    found = reference(model, length, Trained("none", 8, "attention")).model_flops_per_sequence / length
    assert found - attention == pytest.approx(2086e12 / 7481, rel=0.01)


def backward_of(trained: Trained, kind: int) -> tuple[list[Op], Any]:
    structure = Structure(zero=0)
    at = Layout(micro_batch_size=B, structure=structure)
    parts = emit_parts(TINY, Job(S, B, "fp32", trained=trained), at, engines.load("torch"))
    return parts.emitted_layers[kind].tape.backward, parts


def test_the_backward_of_a_frozen_layer() -> None:
    """Only adapters have gradients of weights; an ordinary layer makes its input's, the first none."""
    for kind in (0, 1):
        ops, parts = backward_of(LORA, kind)
        made = {op.name for op in ops}
        weights = {name for name in made if name.startswith("dw_")}
        assert len(weights) == 14
        assert all(name.endswith(("_lora_a", "_lora_b")) for name in weights)
        first = kind == 1
        assert ("dx_wq" in made, "dx_wq_lora_a" in made, "dx_gate" in made) == (not first, not first, True)
        assert parts.bodies.layers[kind].gives_grad == (not first)
    assert not parts.bodies.embedding.backward
    assert parts.layers.runs == ((1, (1,)), (2, (0,)))


def test_what_only_frozen_weights_would_read_is_not_saved() -> None:
    """With adapters in attention alone: the inputs of the feed-forward block's products, of d and of f entries a token,
    and what the norms' weights are multiplied by. All in fp32.
    """
    both = [backward_of(trained, 0)[1].bodies.layers[0] for trained in (ALL, Trained("none", 4, "attention"))]
    saved = [sum(held_after(body.forward).values()) for body in both]
    tokens, d, f = B * S, TINY.hidden_size, 160
    norms = 2 * tokens * d  # what was normed, in two norms: only their weights' gradients read it
    inputs = tokens * (d + f)
    narrow = 4 * 4 * tokens  # what four adapters' B reads, of rank 4
    assert saved[0] - saved[1] == 4 * (norms + inputs - narrow)


# --- bytes ------------------------------------------------------------------------------------------------------------
def step_of(engine: str, zero: int, trained: Trained, data: int, precision: Any = "bf16") -> Any:
    whole = engine == "torch" and zero == 0
    axis = {"dp_replicate": data} if whole or zero == 0 else {"dp_shard": data}
    at = Layout(**axis, micro_batch_size=B, structure=Structure(zero=zero, reshard=True))
    return build(TINY, Job(S, B * data, precision, trained=trained), at, engines.load(engine), 0)


@pytest.mark.parametrize("data", [1, 4])
@pytest.mark.parametrize(
    ("engine", "zero", "frozen", "split", "moments", "own"),
    [
        ("torch", 3, 2, True, 8, 4),  # frozen shards as a checkpoint has them, adapters fp32
        ("accelerate", 3, 2, True, 8, 4),
        ("torchtitan", 3, 4, True, 8, 4),  # all shards are fp32
        ("torch", 0, 2, False, 4, 2),
        ("megatron", 1, 2, False, 12, 2),  # masters and moments, split; gradients (4) are in a buffer
        ("deepspeed", 1, 2, False, 12, 2),
        ("deepspeed", 2, 2, False, 12, 2),
    ],
)
def test_only_what_is_trained_has_states(
    engine: str, zero: int, frozen: int, split: bool, moments: int, own: int, data: int
) -> None:
    """ZeRO's bytes a parameter, of which a frozen one has but its weight (Rajbhandari et al. 2020, section 3; that
    DeepSpeed's own estimator counts all of them is github.com/deepspeedai/DeepSpeed/issues/5304).
    """
    found = reference(TINY, 1, LORA)
    trained, rest = found.trained_parameters, found.parameters - found.trained_parameters
    held = held_after(step_of(engine, zero, LORA, data).resident)
    ways = data if split else 1
    assert held["params"] == rest * frozen // ways + trained * own // ways
    counters = 4 * 42 * (engine in ("torch", "torchtitan", "accelerate"))
    states = trained * moments // (data if zero else 1)
    assert held["optimizer_states"] == pytest.approx(states + counters, abs=16)
    assert held.get("grads", 0) == (4 * trained if engine == "megatron" else 0)


@pytest.mark.parametrize("trained", [LORA, Trained("layers"), replace(LORA, weights="ends", lora_targets="qv")])
@pytest.mark.parametrize(
    ("engine", "zero"), [("torch", 0), ("torch", 1), ("torch", 3), ("torchtitan", 3), ("accelerate", 3),
                         ("megatron", 0), ("megatron", 1), ("deepspeed", 2)],
)  # fmt: skip
def test_a_step_ends_as_it_began(engine: str, zero: int, trained: Trained) -> None:
    step = step_of(engine, zero, trained, 2)
    before, after = held_after(step.at_rest), held_after(step.program)
    assert {k: v for k, v in after.items() if v} == {k: v for k, v in before.items() if v}


def test_only_trained_gradients_are_exchanged() -> None:
    """FSDP2: all weights are gathered twice, in bf16; what is reduced, in fp32, are the adapters'."""
    found = reference(TINY, 1, LORA)
    rows = {(key.kind, key.phase): total for key, total in traffic(step_of("torch", 3, LORA, 2).program).items()}
    assert rows["reduce_scatter", "backward"].payload_bytes == 4 * found.trained_parameters
    assert rows["reduce_scatter", "backward"].calls == TINY.num_hidden_layers
    assert rows["all_gather", "forward"].payload_bytes == 2 * found.parameters
    assert rows["all_gather", "backward"].payload_bytes == 2 * found.parameters


def test_torchtitan_gathers_a_frozen_embedding_for_nothing() -> None:
    """`_backward_prefetch` takes units in the order of the forward pass, whether or not they have a backward; the head
    stayed gathered (FSDP2, _fsdp_param_group.py).
    """
    rows = {(key.kind, key.phase): total for key, total in traffic(step_of("torchtitan", 3, LORA, 2).program).items()}
    head = TINY.vocab_size * TINY.hidden_size + TINY.hidden_size
    both = [rows["all_gather", phase].payload_bytes for phase in ("forward", "backward")]
    assert both[0] - both[1] == 2 * head


@given(st.integers(1, 10**9))
def test_nf4_takes_what_its_paper_counts(blocks: int) -> None:
    """4 bits, and 8/64 + 32/(64·256) = 0.127 (arXiv 2305.14314, section 3: double quantization)."""
    elements = 64 * 256 * blocks
    assert 8 * bytes_of(elements, "nf4") / elements == 4 + 8 / 64 + 32 / (64 * 256)
    for odd in (1, 63, 65, 64 * 256 + 1):
        assert bytes_of(odd, "nf4") >= 4.127 / 8 * odd


def test_quantized_weights_are_gathered_as_they_are() -> None:
    """A layer's linear weights in NF4, beside norms and adapters: as bytes. Each product reads a bf16 copy."""
    found = reference(TINY, 1, LORA)
    linear = TINY.num_hidden_layers * projections(TINY)
    rest = found.parameters - linear
    step = step_of("torch", 3, replace(LORA, quantize="nf4"), 2)
    rows = [
        (key, total)
        for key, total in traffic(step.program).items()
        if (key.kind, key.phase) == ("all_gather", "forward")
    ]
    assert {key.dtype for key, _ in rows} == {"uint8", "bf16"}  # the root's are not quantized
    assert sum(total.payload_bytes for _, total in rows) == pytest.approx(4.127 / 8 * linear + 2 * rest, rel=1e-3)
    ops, _ = backward_of(replace(LORA, quantize="nf4"), 0)
    assert sum(op.name == "dequantize" for op in ops) == 7


# --- what is refused --------------------------------------------------------------------------------------------------
def refused(trained: Trained, *, model: str = "llama-2-7b", engine: str = "torchtitan", **sizes: Any) -> list[str]:
    structure = Structure(**{"zero": engines.load(engine).default_zero, **sizes.pop("how", {})})
    at = Layout(**{"dp_shard": 1, **sizes}, structure=structure)
    gpus = at.dp_replicate * at.dp_shard * at.tp * at.pp
    with pytest.raises(Refused) as found:
        predict(load_model(model), Job(2048, 16, trained=trained), cluster(f"1x{gpus}xh100-sxm"), at, engine)
    return list(found.value.reasons)


@pytest.mark.parametrize(
    ("trained", "asked", "words"),
    [
        (Trained("none"), {}, "--train none leaves no layer to train"),
        (Trained("ends"), {}, "--train ends is modelled beside adapters alone"),
        (Trained("all", 8), {}, "--lora-rank 8 with --train all"),
        (Trained("none", -1), {}, "lora_rank=-1 is not a whole number"),
        (Trained(quantize="nf4"), {"engine": "torch"}, "--quantize nf4 is of frozen weights"),
        (Trained("none", 8, quantize="nf4"), {}, "--quantize nf4 is not for torchtitan"),
        (LORA, {"tp": 2}, "tp=2 with --lora-rank 8"),
        (LORA, {"model": "mixtral-8x7b"}, "mixtral-8x7b has experts"),
        (LORA, {"model": "deepseek-v3"}, "deepseek-v3 has experts"),
        (LORA, {"pp": 2, "how": {"schedule": "zb-h1", "virtual_stages": 2}}, "schedule=zb-h1 makes weights' gradients"),
        (LORA, {"model": "gpt2", "pp": 12, "engine": "torch"}, "pp=12 leaves the head alone on a stage"),
        (LORA, {"engine": "nanotron"}, "--lora-rank 8 is not for nanotron"),
        (Trained("layers"), {"engine": "nanotron"}, "--train layers is not for nanotron"),
        (LORA, {"engine": "deepspeed"}, "--lora-rank 8 is not for deepspeed"),
        (LORA, {"engine": "megatron", "how": {"zero": 3}}, "--lora-rank 8 is not for megatron"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_so_is_refused(trained: Trained, asked: dict[str, Any], words: str) -> None:
    reasons = refused(trained, **asked)
    assert [reason for reason in reasons if reason.startswith(words)], reasons


def test_every_word_that_cannot_be_read_is_said_at_once(nanum: Run) -> None:
    words = ("--lora-rank", "0", "--lora-targets", "mlp", "--train", "most", "--quantize", "int8")
    done = nanum("predict", "llama-2-7b", "1x8xh100-sxm", *words)
    assert done.returncode == 2
    for reason in (
        "--lora-rank 0 must be at least 1",
        "--lora-targets mlp: must be all, attention or qv",
        "--train most: must be all, layers, ends or none",
        "--quantize int8 is not modelled yet: choose none or nf4",
    ):
        assert reason in done.stderr
    alone = nanum("predict", "llama-2-7b", "1x8xh100-sxm", "--lora-targets", "qv")
    assert "add --lora-rank" in alone.stderr


def test_the_answer_says_what_is_trained(nanum: Run) -> None:
    words = "predict", "llama-2-7b", "1x8xh100-sxm", "--engine", "torch", "--zero", "3", "--lora-rank", "16"
    document = json.loads(nanum(*words, "--quantize", "nf4", "--json").stdout)
    assert document["model"]["trained_parameters"] == 39_976_960
    assert document["job"]["trained"] == {
        "weights": "none", "lora_rank": 16, "lora_targets": "all", "quantize": "nf4",
    }  # fmt: skip
    assert any("quantized weights were not run" in what for what in document["unmodelled"])
    told = " ".join(nanum(*words).stdout.split())
    assert "39,976,960 parameters trained · adapters of rank 16" in told


@pytest.mark.parametrize("engine", ["torchtitan", "torch", "accelerate"])
@pytest.mark.parametrize("weights", ["all", "layers", "ends"])
@pytest.mark.parametrize("reshard", [True, False])
def test_stages_with_frozen_parts_leave_what_they_found(engine: str, weights: Any, reshard: bool) -> None:
    """An embedding that no backward gathers is gathered, and freed, in every forward pass of a pipeline."""
    model = replace(load_model("tiny-llama"), num_hidden_layers=4)
    for pp, micro_batches in ((1, 2), (2, 1), (2, 4), (4, 4)):
        structure = Structure(zero=3, reshard=reshard, pipelined=pp > 1)
        job = Job(64, 2 * micro_batches, trained=Trained(weights))
        for stage in range(pp):
            layout = Layout(dp_shard=2, pp=pp, structure=structure)
            step = build(model, job, layout, engines.load(engine), stage)
            at_rest, after = held_after(step.at_rest), held_after(step.program)
            assert {k: after.get(k, 0) - at_rest.get(k, 0) for k in {*at_rest, *after}} == dict.fromkeys(
                {*at_rest, *after}, 0
            )
