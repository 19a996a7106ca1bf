"""PyTorch's ring attention, balanced as it is predicted, beside the steps of its last rank as they are verified."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from nanum import engines
from nanum import model as models
from nanum.account.memory import peak
from nanum.account.traffic import flops, traffic
from nanum.build import build, build_rank
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.program import Compute, Repeat

MODEL = replace(models.load("llama-3.2-1b"), num_hidden_layers=3)
B, S, M, L = 2, 1024, 3, 3
H, KAPPA = MODEL.hidden_size, 2 * MODEL.attention.num_key_value_heads * MODEL.attention.head_dim


def layout(kind: str, cp: int, recompute: str = "none") -> Layout:
    structure = Structure(zero=3, cp_kind=kind, recompute=recompute)  # type: ignore[arg-type]
    return Layout(cp=cp, micro_batch_size=B, structure=structure)


def step(kind: str, *, cp: int) -> Any:
    return build(MODEL, Job(S, B * M), layout(kind, cp), engines.load("torchtitan"), 0)


@pytest.mark.parametrize("c", [2, 4, 8])
def test_a_ring_puts_its_steps_together_in_fp32(c: int) -> None:
    """c - 1 merges of a rank's rows, whole: each result made fp32, taken from the sum, scaled, and taken off it; and of
    backward a c-th of the attention in each step, its gradients added to sums, of which those of keys and values are
    joined with what arrived and packed (PyTorch's `_SDPAMerger`, `_partial_update`)."""
    wide, kv = 4 * B * S * H // c, 4 * B * S * KAPPA // c  # bytes of a rank's fp32 queries, and keys with values

    def moved(name: str, phase: str, kind: str) -> int:
        found = step(kind, cp=c).program
        return sum(int(n * node.bytes_moved) for node, n in unrolled(found) if (node.name, node.phase) == (name, phase))

    def of_a_layer(name: str, phase: str) -> Fraction:
        return Fraction(moved(name, phase, "ring") - moved(name, phase, "ulysses"), M * L)

    assert of_a_layer("sub", "forward") == (c - 1) * 2 * 3 * wide
    assert of_a_layer("cat", "backward") == kv + 2 * kv + (c - 1) * 4 * kv  # the first of half precision, to be sent
    assert flops(step("ring", cp=c).program) == pytest.approx(flops(step("ulysses", cp=c).program), rel=1e-12)


def unrolled(nodes: Any, times: int = 1) -> Any:
    for node in nodes:
        if isinstance(node, Repeat):
            yield from unrolled(node.body, times * int(node.count))
        elif isinstance(node, Compute):
            yield node, times


@pytest.mark.parametrize("engine", ["torch", "torchtitan", "accelerate"])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("c", [2, 4])
def test_what_is_predicted_is_what_the_last_rank_does(engine: str, recompute: str, c: int) -> None:
    """Which computes on every block, and whose exchanges and bytes real runs are held against, there without a balance
    of causal attention. Of what selective recompute keeps, log-sum-exps may be copies of others.
    """
    last = dict.fromkeys(("dp_shard", "dp_replicate", "tp", "pp"), 0) | {"cp": c - 1}
    asked = MODEL, Job(S, B * M), layout("ring", c, recompute), engines.load(engine), 0
    predicted, exact = (build_rank(*asked, at=at).program for at in (None, last))
    bytes_of = [int(peak(program).peak) for program in (predicted, exact)]
    assert bytes_of[0] == pytest.approx(bytes_of[1], rel=3e-3 if recompute == "selective" else 0)
    sent = [
        {key: (total.calls, total.payload_bytes) for key, total in traffic(program).items() if key.axes == ("cp",)}
        for program in (predicted, exact)
    ]
    assert sent[0] == sent[1]
