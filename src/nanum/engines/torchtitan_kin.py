"""torchtitan as runs that others published had it. It is asked for by `validate` alone.

Read at torchtitan ba24697 (19 December 2024, when benchmarks/llama3_h100_202412_torchtitan.md was measured):
parallelisms/parallelize_llama.py (`fully_shard` on each layer and on the model, so that embedding, norm and head are
the root's; torch.compile on each layer), train.py (the loss is not compiled), models/norms.py (an eager RMSNorm),
optimizer.py (foreach where not asked otherwise).
"""

from __future__ import annotations

from dataclasses import replace

from nanum.conventions import FUSABLE, Conventions, fp8_gather
from nanum.engines.torchtitan import TORCHTITAN, conventions
from nanum.job import Job
from nanum.layout import Structure
from nanum.model import Model


def of_2024(model: Model, job: Job, structure: Structure) -> Conventions:
    fused = FUSABLE - {"loss"} if structure.compile else frozenset()
    return replace(by_tensors(model, job, structure), fused=fused, units="root", prefetches_units=False)


def by_tensors(model: Model, job: Job, structure: Structure) -> Conventions:
    """fp8 with one scale for a tensor, as it was the default in 2024 and 2025: tensor parallelism gathers in it
    (parallelize.py: `enable_float8_tensorwise_tp`), and FSDP where it is asked to.
    """
    gathers = fp8_gather(job, structure)  # float8.enable_fsdp_float8_all_gather
    return replace(repeating(model, job, structure), fp8_scales="tensor", fp8_gather=gathers, fp8_exchanges=True)


def repeating(model: Model, job: Job, structure: Structure) -> Conventions:
    """Until January 2026 (ff0829c10) keys and values were copied for all heads of queries (model.py: `repeat_kv`)."""
    return replace(conventions(model, job, structure), repeats_keys=True)


def of_llm_foundry(model: Model, job: Job, structure: Structure) -> Conventions:
    """MPT's default attention of its time, FlashAttention 1 in Triton (attn_impl: triton), of one product (`Wqkv`).
    That is apart where selective recompute, which llm-foundry has not, would run some of it again.
    """
    one = () if structure.recompute == "selective" else (("wq", "wk", "wv"),)
    return replace(conventions(model, job, structure), attention_library="triton", stored_as_one=one)


TENSORWISE = replace(TORCHTITAN, version="of 2025, fp8 by tensors", conventions=by_tensors, fp8_gathers=True)
ROWWISE = replace(TORCHTITAN, version="of 2025, fp8 by rows", conventions=repeating)
LLM_FOUNDRY = replace(TORCHTITAN, name="torchtitan for llm-foundry", conventions=of_llm_foundry)
TORCHTITAN_2024 = replace(
    TORCHTITAN,
    version="ba24697 (December 2024)",
    conventions=of_2024,
    fp8_gathers=True,
    recomputes=("every",),  # parallelize_llama.py: selective_ac_option, a number, counted over all of a rank's stages
)
