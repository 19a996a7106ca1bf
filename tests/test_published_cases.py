"""What people who split training jobs saw beside what is predicted: each as far as its numbers allow.

DeepSpeed's cases are in `test_engines`, SimuMax's runs in `test_validate`. Sizes that an address does not state are
said to be inferred.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import nanum
from nanum import cluster
from nanum.cluster import Cluster
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import Attention, Mlp, Model
from nanum.model import load as load_model
from nanum.prediction.reference import parameters, reference
from nanum.units import GB, GIB, MIB

FULLY, SPLIT_STATES = Structure(zero=3), Structure(zero=1)


def answer(model: Model, machine: Cluster | str, layout: Layout, job: Job, engine: str) -> dict[str, Any]:
    where = cluster.load(machine) if isinstance(machine, str) else machine
    return nanum.predict(model, job, where, layout, engine=engine).to_dict()


def slow_network(word: str, gb_per_second: float) -> Cluster:
    """The same machines, with so much between nodes for each GPU."""
    machine = cluster.load(word)
    rate = replace(machine.inter_node.bytes_per_second, value=gb_per_second * GB)
    return replace(machine, inter_node=replace(machine.inter_node, bytes_per_second=rate))


@pytest.mark.parametrize(("compiled", "drop"), [(False, 82.4 - 67.0), (True, 77.0 - 62.0)])
def test_llama_8b_on_8_and_128_gpus(compiled: bool, drop: float) -> None:
    """github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412: reserved memory falls by 15.0 to 15.4 GiB, of which
    16 bytes a parameter over 8 and over 128 ranks are 14.0. Our peak is at the loss, where gradients (4 of the 16) are
    not there yet, but the pool of the stream that makes them is; and of reserved memory we take 104 %. States are held
    to 0.1 GiB, the drop to a twentieth. Throughput keeps 97.3 to 97.8 % of itself: to 5 points.
    """
    model = load_model("llama-3.1-8b")
    structure = replace(FULLY, recompute="selective", compile=compiled)
    few, many = (
        answer(
            model,
            f"{g // 8}x8xh100-sxm",
            Layout(dp_shard=g, micro_batch_size=2, structure=structure),
            job,
            "torchtitan",
        )
        for g, job in ((8, Job(8192, 16)), (128, Job(8192, 256)))
    )
    at_rest = [d["memory"]["stages"][0]["by_category"] for d in (few, many)]
    states = [
        (4 * c["optimizer_states"] / 8 + c["optimizer_states"]) / GIB for c in at_rest
    ]  # and as many, twice halved
    assert states[0] - states[1] == pytest.approx(8.03e9 * 12 * (1 / 8 - 1 / 128) / GIB, abs=0.1)
    reserved = [d["memory"]["worst"]["reserved_bytes"] / GIB for d in (few, many)]
    assert reserved[0] - reserved[1] == pytest.approx(drop, rel=0.05)
    kept = many["throughput"]["tokens_per_second_per_gpu"] / few["throughput"]["tokens_per_second_per_gpu"]
    assert kept == pytest.approx(0.975, abs=0.05)


def test_llama_8b_on_32_and_64_gpus() -> None:
    """github.com/pytorch/torchtitan, benchmarks/llama3-8b_h200_202506: 47.96 and 46.97 GiB, 98.3 % of the throughput.
    16 bytes a parameter would be 1.9 GiB less, of which we take 104 %; they saw 0.99, and we say between the two.
    """
    model = load_model("llama-3.1-8b")
    structure = replace(FULLY, recompute="selective", compile=True)
    found = [
        answer(
            model,
            f"{g // 8}x8xh200-sxm",
            Layout(dp_shard=g, micro_batch_size=2, structure=structure),
            job,
            "torchtitan",
        )
        for g, job in ((32, Job(8192, 64)), (64, Job(8192, 128)))
    ]
    few, many = (d["memory"]["worst"]["reserved_bytes"] / GIB for d in found)
    assert 0.99 <= few - many <= 1.9 * 1.04
    assert few == pytest.approx(47.96, rel=0.03)
    speeds = [d["throughput"]["tokens_per_second_per_gpu"] for d in found]
    assert speeds[1] / speeds[0] == pytest.approx(0.983, abs=0.03)


def test_a_reduction_s_input_is_one_unit_s_however_many_layers() -> None:
    """github.com/ISEEKYAN/Megatron-LM/issues/158: M-FSDP kept the input of every layer's reduction to the end of
    backward, 58.1 GiB beside FSDP2's 43.3. Of FSDP2 we hold two units' at most.
    """
    found = []
    for layers in (4, 16):
        model = replace(load_model("llama-3.1-8b"), num_hidden_layers=layers)
        d = answer(model, "2x8xh100-sxm", Layout(dp_shard=16, structure=FULLY), Job(128, 16), "torch")
        found.append(max(stage["by_category"]["buffers"] for stage in d["memory"]["stages"]))
    assert found[0] == found[1]


def test_a_stack_of_equal_units_needs_few_of_them_at_once() -> None:
    """github.com/NVIDIA/Megatron-LM/issues/6471: two units gathered and two being reduced, and three after a change.
    FSDP2's in bf16, with hardly an activation: between three and four, a reduction in fp32 being two.
    """
    small = Attention(8, 8, 64)
    model = Model("stack", 512, 64, 16, 64, small, Mlp(65536, True, "silu"), "rms_norm", "rotary", False)
    d = answer(model, "1x8xh100-sxm", Layout(dp_shard=8, structure=FULLY), Job(8, 8), "torchtitan")
    unit = 2 * (3 * 512 * 65536 + 4 * 512 * 512)
    n = parameters(model)
    resident = (4 + 8 + 4) * n // 8  # shards of parameters, states and gradients
    transient = d["memory"]["worst"]["allocated_bytes"] - resident
    assert 3 * unit <= transient <= 5 * unit


def test_scaling_of_data_parallelism_has_its_knee_at_the_node() -> None:
    """github.com/pytorch/pytorch/issues/17159, BERT by DDP: 0.94, 0.91, 0.90 of one GPU's speed on 2, 4 and 8, and 0.66
    on two machines of 8. An ordering: the model's like, and the network a card of 10 Gb/s.
    """
    model = replace(load_model("gpt2-medium"), vocab_size=30522)
    speed = {}
    for nodes, gpus in ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8)):
        machine = slow_network(f"{nodes}x{gpus}xv100-sxm-32gb", 10 / 8 / 8)
        n = nodes * gpus
        layout = Layout(dp_replicate=n, micro_batch_size=8, structure=Structure(zero=0))
        d = answer(model, machine, layout, Job(512, 8 * n, "fp16"), "torch")
        speed[n] = d["throughput"]["tokens_per_second_per_gpu"]
    kept = {n: speed[n] / speed[1] for n in speed}
    assert 1 >= kept[2] >= kept[4] >= kept[8] > kept[16]
    assert kept[8] > 0.85
    assert kept[16] < 0.8


def test_copies_of_shards_beat_shards_over_a_slow_network() -> None:
    """github.com/oumi-ai/oumi/pull/213, 2B on 4 nodes of GCP: 74.4 samples a second by HSDP, 55.3 by FSDP over all. An
    ordering, and no ratio: the network, 100 Gb/s a node, and the model's widths are inferred.
    """
    attention, mlp = Attention(20, 20, 128), Mlp(6912, True, "silu")
    model = Model("2b", 2560, 128256, 24, 2048, attention, mlp, "rms_norm", "rotary", True)
    machine = slow_network("4x8xa100-sxm-40gb", 12.5 / 8)
    hybrid, full = (
        answer(model, machine, Layout(**sizes, micro_batch_size=4, structure=FULLY), Job(2048, 128), "torchtitan")
        for sizes in ({"dp_replicate": 4, "dp_shard": 8}, {"dp_shard": 32})
    )
    assert full["time"]["step_seconds"] > hybrid["time"]["step_seconds"]


def test_utilization_is_of_the_dense_peak() -> None:
    """github.com/foundation-model-stack/fms-fsdp/issues/89: 9,600 tokens a second and GPU are 0.46 of 989 TFLOPS, and
    not 0.24 of 1,979, which sparsity would need. They count attention whole; we the causal half.
    """
    model = load_model("llama-2-7b")
    peak = cluster.load("1x8xh100-sxm").chip.peak_flops_per_second["bf16"].value
    assert peak == pytest.approx(989e12, rel=1e-3)
    per_token = reference(model, 4096).model_flops_per_sequence / 4096
    unseen = 6 * 32 * 4096 * 4096  # FLOPs a token of the other half: 2 products of 2 S h, 3 passes, half
    tables = 6 * 32000 * 4096  # they count the embedding, which computes nothing
    assert 9600 * (per_token + unseen + tables) / peak == pytest.approx(0.455, abs=0.002)


@pytest.mark.parametrize(
    ("layout", "batch", "seen"),
    [
        (Layout(dp_shard=4, pp=2, micro_batch_size=2, structure=SPLIT_STATES), 2048, 49.8),
        (Layout(tp=8, micro_batch_size=4, structure=replace(SPLIT_STATES, tensor="tensor")), 128, 28.8),
    ],
)
def test_llama_2_7b_by_megatron(layout: Layout, batch: int, seen: float) -> None:
    """github.com/NVIDIA/Megatron-LM/pull/482: 49.8 and 28.8 GB of a GPU, which of PyTorch's counters is not said. A
    sequence of 2,048 and no sequence parallelism are inferred: their own estimate of 49.5 fits no other. Reserved, to
    3 %.
    """
    d = answer(load_model("llama-2-7b"), "1x8xh100-sxm", layout, Job(2048, batch), "megatron")
    assert d["memory"]["worst"]["reserved_bytes"] / GB == pytest.approx(seen, rel=0.03)


def test_the_fullest_stage_is_reported() -> None:
    """github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5077: an estimate by the average stage was 32 % low. Its toy's sizes
    are not stated.
    """
    model = replace(load_model("llama-3.1-8b"), num_hidden_layers=9)
    d = answer(model, "1x8xh100-sxm", Layout(dp_shard=2, pp=4, structure=FULLY), Job(2048, 16), "torchtitan")
    peaks = [stage["allocated_peak_bytes"] for stage in d["memory"]["stages"]]
    assert d["memory"]["worst"]["allocated_bytes"] == max(peaks) > 1.1 * sum(peaks) / len(peaks)


def test_a_peak_follows_the_tokens_of_a_rank() -> None:
    """github.com/NVIDIA/Megatron-LM/pull/7220, hidden 512, vocabulary 50,257: 2,279 MiB at cp 1 and micro-batch 4, and
    1,276.5 both at cp 2 and at micro-batch 2. By its ratios: 1.79 between them, to a tenth; gathered keys are 2 % of
    ours. The sequence (1,024) and the layers (8) are inferred.
    """
    model = Model(
        "toy", 512, 50257, 8, 4096, Attention(8, 8, 64), Mlp(2048, False, "gelu"), "layer_norm", "rotary", True
    )

    def peak(cp: int, dp_shard: int, micro_batch_size: int) -> float:
        structure = replace(FULLY, cp_kind="none" if cp == 1 else "allgather")
        layout = Layout(cp=cp, dp_shard=dp_shard, micro_batch_size=micro_batch_size, structure=structure)
        job = Job(1024, micro_batch_size * dp_shard)
        d = answer(model, "1x8xh100-sxm", layout, job, "torchtitan")
        return float(d["memory"]["worst"]["allocated_bytes"]) / MIB

    whole, split, fewer = peak(1, 8, 4), peak(2, 4, 4), peak(1, 8, 2)
    assert split == pytest.approx(fewer, rel=0.03)
    assert whole / fewer == pytest.approx(2279.1 / 1276.5, rel=0.1)


def test_scores_that_are_kept_grow_with_the_square() -> None:
    """github.com/VITA-MLLM/Long-VITA/issues/7, a layer of Qwen2.5-14B at tp 4: 4,026, 12,110 and 43,931 MB at 4,096,
    8,192 and 16,384 tokens. What doubling adds grows 3.9 times: scores (4 and more), not a flash kernel's (2).
    """
    attention, mlp = Attention(40, 8, 128, qkv_bias=True), Mlp(13824, True, "silu")
    model = Model("layer", 5120, 152064, 1, 131072, attention, mlp, "rms_norm", "rotary", False)

    def growth(kernel: Any) -> float:
        structure = Structure(zero=0, tensor="tensor", attention=kernel)
        peaks = [
            answer(model, "1x4xh100-sxm", Layout(tp=4, structure=structure), Job(s, 1), "megatron")["memory"]["worst"]
            for s in (4096, 8192, 16384)
        ]
        a, b, c = (float(peak["allocated_bytes"]) for peak in peaks)
        return (c - b) / (b - a)

    seen = (43931 - 12110) / (12110 - 4026)
    assert growth("flash") == pytest.approx(2, rel=0.05)
    assert growth("eager") == pytest.approx(seen, rel=0.25)


@pytest.mark.parametrize(
    ("count", "gigabytes"),
    [
        (1.225e9, 19.6),  # huggingface.co/facebook/incoder-1B, discussions/3: 8 times the weights' 2.45 GB in fp16
        (70.55e9, 1130),  # github.com/huggingface/blog/issues/2245: 16 bytes a parameter, and neither 300 nor 519 GB
    ],
)
def test_adam_needs_sixteen_bytes_a_parameter(count: float, gigabytes: float) -> None:
    """Estimators said four times the weights, whatever they are in; mixed precision holds 16 bytes a parameter."""
    d = answer(load_model("llama-3.1-70b"), "1x1xh100-sxm", Layout(structure=FULLY), Job(16, 1), "torchtitan")
    held = d["memory"]["stages"][0]["by_category"]
    each = (held["params"] + held["grads"] + held["optimizer_states"]) / parameters(load_model("llama-3.1-70b"))
    states = held["optimizer_states"] / parameters(load_model("llama-3.1-70b"))
    assert states == pytest.approx(8, rel=1e-3)
    assert each == pytest.approx(16, rel=0.06)  # one unit is there gathered, too
    assert 16 * count / GB == pytest.approx(gigabytes, rel=0.01)
