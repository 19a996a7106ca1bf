"""Adapters (LoRA) and quantized weights beside what others measured of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_trained import TINYLLAMA

from nanum.account.memory import held_after
from nanum.cluster import load as cluster
from nanum.job import ALL, Job, Trained
from nanum.layout import Layout, Structure
from nanum.model import Model
from nanum.model import load as load_model
from nanum.prediction import Prediction, predict
from nanum.units import GB, GIB

PUBLISHED = json.loads((Path(__file__).parent / "data" / "published_adapters.json").read_text())["runs"]
OF_RUN = {
    "all": ALL,
    "lora": Trained("none", 16, "attention"),
    "qlora": Trained("none", 16, "attention", "nf4"),
}


def answer(model: Model, job: Job, gpus: int = 1, recompute: Any = "full", chip: str = "a100-sxm-80gb") -> Prediction:
    at = Layout(
        dp_shard=gpus,
        micro_batch_size=job.global_batch_size // gpus,
        structure=Structure(zero=3 if gpus > 1 else 0, recompute=recompute),
    )
    return predict(model, job, cluster(f"1x{gpus}x{chip}"), at, engine="torch")


@pytest.mark.parametrize("run", PUBLISHED, ids=lambda r: f"{r['model']}-{r['trained']}-{r['gpus']}x{r['sequences']}")
def test_published_bytes_of_adapters(run: dict[str, Any]) -> None:
    """Transformers then had tables of positions in each layer, for all of the context, in fp16: 2·2·128·context·layers,
    taken off. On one GPU what stays is ours to 0.2 %; quantized to 2.5 %, since its adapters are fp32 there, and on two
    of them bitsandbytes' scales are whole on each GPU, of which the gather of torchao's tensors has none. Peaks (of one
    GPU; theirs on two is FSDP1's) are to 7 %: their loss is transformers' own, with copies of its logits.
    """
    model = load_model(run["model"])
    context = 32768 if run["model"].startswith("mistral") else 4096
    tables = 2 * 2 * 128 * context * model.num_hidden_layers
    sequences = run["sequences"] * run["gpus"]
    p = answer(model, Job(4096, sequences, "fp16", trained=OF_RUN[run["trained"]]), run["gpus"])
    at_rest = sum(held_after(p.steps[0].program).values())
    quantized = run["trained"] == "qlora"
    assert at_rest == pytest.approx(run["at_rest_bytes"] - tables, rel=0.025 if quantized else 0.002)
    if "peak_bytes" in run:
        assert p.memory[0].moment.bytes == pytest.approx(run["peak_bytes"] - tables, rel=0.07)


@pytest.mark.parametrize(("gpus", "sequences", "gib"), [(1, 4, 65.0), (2, 2, 36.3)])
def test_qlora_of_llama_70b_halves_over_two_gpus(gpus: int, sequences: int, gib: float) -> None:
    """github.com/foundation-model-stack/fms-acceleration/issues/12: 65.0 GiB of one A100, 36.3 of each of two, as the
    device has them; GPTQ's 61.2 on two are integers that FSDP did not shard, which is no layout here. To 3 %: how long
    sequences were is inferred from the same project's benchmarks (4,096).
    """
    p = answer(load_model("llama-2-70b"), Job(4096, sequences * gpus, "fp16", trained=OF_RUN["qlora"]), gpus)
    assert p.worst.device_bytes / GIB == pytest.approx(gib, rel=0.03)


def test_long_sequences_leave_little_for_adapters_to_save() -> None:
    """github.com/huggingface/peft/issues/1514 (TinyLlama, r=64): LoRA needs far less than full training at short
    sequences and about as much at 8,192. Theirs has dropout before each adapter (a copy of its input and a mask each)
    and fp32 adapters, ours neither: what holds without them is that nothing more is saved at longer sequences, so that
    the share falls.
    """
    peaks: dict[int, list[int]] = {}
    for length in (512, 8192):
        both = (
            answer(TINYLLAMA, Job(length, 1, "bf16", trained=t), recompute="none") for t in (ALL, Trained("none", 64))
        )
        peaks[length] = [p.memory[0].moment.bytes for p in both]
    share = {length: lora / full for length, (full, lora) in peaks.items()}
    assert share[512] < 0.4
    assert share[8192] > 0.7
    gap = {length: full - lora for length, (full, lora) in peaks.items()}
    assert gap[8192] < gap[512]


def test_a_calculator_of_177_gb_for_a_lora_of_7b() -> None:
    """github.com/RahulSChand/gpu_poor/issues/1: CodeLlama 7B, 2,048 tokens: 177 GB by LoRA, 180 by QLoRA, 216 in full,
    where 16 GB were expected of LoRA. Layers recomputed: to 5 % of these, with QLoRA far below and full training above.
    """
    model = replace(load_model("llama-2-7b"), vocab_size=32016)
    kinds = (Trained("none", 8, "qv", "nf4"), Trained("none", 8, "qv"), ALL)
    qlora, lora, full = (
        answer(model, Job(2048, 1, trained=trained), chip="h100-sxm").worst.device_bytes / GB for trained in kinds
    )
    assert lora == pytest.approx(16, rel=0.05)
    assert qlora < 0.5 * lora
    assert full > 4 * lora
