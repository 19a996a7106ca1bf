"""torchtitan as published runs had it: keys repeated, fp8 by tensors, and which of tensor parallelism's exchanges run
beside a product by a pass of PyTorch (torch/_inductor/fx_passes/micro_pipeline_tp.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from nanum import engines
from nanum import model as models
from nanum.build import build
from nanum.engines.engine import Engine
from nanum.engines.torchtitan_kin import LLM_FOUNDRY, ROWWISE, TENSORWISE, TORCHTITAN_2024
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import Model
from nanum.parallel.pipeline import Step
from nanum.program import Collective, Compute, Node, Repeat

LLAMA = models.load("llama-3.2-1b")  # of 32 heads, 8 of keys
S, B, LAYERS = 1024, 2, LLAMA.num_hidden_layers
TODAY = engines.load("torchtitan")


def step(
    engine: Engine,
    model: Model = LLAMA,
    *,
    precision: Any = "bf16",
    tp: int = 1,
    compile: bool = True,
    tp_overlap: bool = False,
) -> Step:
    tensor = "sequence" if tp > 1 else "none"
    structure = Structure(zero=3, tensor=tensor, compile=compile, tp_overlap=tp_overlap)  # type: ignore[arg-type]
    layout = Layout(dp_shard=2, tp=tp, micro_batch_size=B, structure=structure)
    return build(model, Job(S, 2 * B, precision), layout, engine, 0)


def nodes(of: tuple[Node, ...], times: int = 1) -> Iterator[tuple[Compute | Collective, int]]:
    for node in of:
        if isinstance(node, Repeat):
            yield from nodes(node.body, times * int(node.count))
        elif isinstance(node, Compute | Collective) and times:
            yield node, times


@pytest.mark.parametrize("engine", [TORCHTITAN_2024, TENSORWISE, ROWWISE], ids=lambda engine: engine.version)
def test_keys_and_values_are_copied_for_each_head_of_queries(engine: Engine) -> None:
    """`repeat_kv`: reads 8 heads of keys, and of values, and writes 32; the gradients of copies are summed likewise."""
    width = LLAMA.attention.head_dim * 2 * B * S  # bytes of a head of the rank's tokens
    moved: Counter[tuple[str, int]] = Counter()
    for node, times in nodes(step(engine).program):
        if isinstance(node, Compute) and "repeat" in node.name:
            moved[node.name, int(node.bytes_moved)] += times
    assert moved == {("repeat", 40 * width): 2 * LAYERS, ("d_repeat", 40 * width): 2 * LAYERS}


def test_nothing_is_copied_where_each_has_its_own_nor_today() -> None:
    own = replace(LLAMA, attention=replace(LLAMA.attention, num_key_value_heads=32))
    for found in (step(TORCHTITAN_2024, own), step(TODAY), step(LLM_FOUNDRY)):
        assert not [node for node, _ in nodes(found.program) if getattr(node, "name", "") in ("repeat", "d_repeat")]


def behind(engine: Engine, precision: str) -> Counter[tuple[str, str]]:
    """By kind and phase, how many of a step's exchanges of activations run beside a product."""
    found: Counter[tuple[str, str]] = Counter()
    for node, times in nodes(step(engine, precision=precision, tp=2, tp_overlap=True).program):
        if isinstance(node, Collective) and node.axes == ("tp",) and node.behind:
            found[node.kind, node.phase] += times
    return found


def test_a_product_s_own_exchanges_run_beside_it() -> None:
    """Forward: gathers before attention, the feed-forward block and the head; scatters of `wo` and `down`, and not that
    of the table. Backward: the gathers of gradients of these two's results; what is scattered is a sum of two products
    or three, but the head's.
    """
    assert behind(TENSORWISE, "bf16") == {
        ("all_gather", "forward"): 2 * LAYERS + 1,
        ("reduce_scatter", "forward"): 2 * LAYERS,
        ("all_gather", "backward"): 2 * LAYERS,
        ("reduce_scatter", "backward"): 1,
    }


def test_what_is_quantized_when_it_has_been_gathered_does_not() -> None:
    """By tensors, fp8 is gathered; by rows, what is quantized then, so that no product reads a gather."""
    tensors, rows = behind(TENSORWISE, "fp8"), behind(ROWWISE, "fp8")
    assert tensors["all_gather", "forward"] > 0
    assert rows["all_gather", "forward"] + rows["all_gather", "backward"] == 1  # the head's, which is no fp8
    assert rows["reduce_scatter", "forward"] == tensors["reduce_scatter", "forward"] == 2 * LAYERS
