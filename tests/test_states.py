"""What optimizers keep: beside torch.optim's own states, the papers' closed forms, and sums over the ranks."""

from __future__ import annotations

from math import prod
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanum import cluster as clusters
from nanum import engines
from nanum.account.memory import held_after
from nanum.account.traffic import Key, flops, traffic
from nanum.build import build
from nanum.job import Job, Optimizer
from nanum.layout import Layout, Structure
from nanum.model import Attention, Mlp, Model
from nanum.prediction import predict, reasons
from nanum.program import Compute
from nanum.states import BLOCK, LEAST_QUANTIZED, NEWTON_SCHULZ_STEPS, States, is_hidden_matrix, newton_schulz

V, H, F, A, G, L = 512, 64, 192, 4, 2, 3
MODEL = Model(
    "llama", H, V, L, 128, Attention(A, G, H // A), Mlp(F, gated=True, activation="silu"), "rms_norm", "rotary", False
)
MATRICES = [(H, H), (H // 2, H), (H // 2, H), (H, H), (F, H), (F, H), (H, F)]
IN_MATRICES = L * sum(map(prod, MATRICES))
ELSEWHERE = 2 * V * H + (2 * L + 1) * H
DIMS = {1: ("D",), 2: ("F", "D"), 3: ("E", "F", "D")}


def states_bytes(engine: str, optimizer: Optimizer, precision: str = "bf16", **given: Any) -> int:
    """Of the first rank."""
    at = given.pop("at", None)
    zero, tp = given.pop("zero"), given.get("tp", 1)
    structure = Structure(zero=zero, tensor="tensor" if tp > 1 else "none")
    layout = Layout(**given, structure=structure)
    job = Job(128, layout.data_ranks, precision, optimizer)  # type: ignore[arg-type]
    step = build(MODEL, job, layout, engines.load(engine), 0, at=at)
    return held_after(step.program)["optimizer_states"]


# --- torch.optim ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor", "muon"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(96,), (24, 40), (40, 24), (3, 16, 8)])
def test_states_are_those_of_torch(optimizer: Optimizer, dtype: str, shape: tuple[int, ...]) -> None:
    """Tensors of an optimizer that has taken a step, counts of steps among them."""
    torch = pytest.importorskip("torch")
    makes = {
        "adamw": lambda p: torch.optim.AdamW([p]),
        "sgd": lambda p: torch.optim.SGD([p], momentum=0.9),
        "adafactor": lambda p: torch.optim.Adafactor([p]),
        "muon": lambda p: torch.optim.Muon([p]) if len(shape) == 2 else torch.optim.AdamW([p]),
    }
    if optimizer == "muon" and len(shape) == 3:
        pytest.skip("torch.optim.Muon is for two dims")
    p = torch.nn.Parameter(torch.ones(shape, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]))
    made = makes[optimizer](p)
    p.grad = torch.ones_like(p)
    made.step()
    counted = sum(s.numel() * s.element_size() for s in made.state[p].values() if torch.is_tensor(s))
    dims = DIMS[len(shape)]
    states = States(optimizer, dtype, counters=True)
    assert states.bytes(dims, shape) + states.counter_bytes(dims) == counted


# --- closed forms -----------------------------------------------------------------------------------------------------
def test_eight_bits_have_a_scale_a_block_and_spare_small_tensors() -> None:
    """bitsandbytes: two bytes and two fp32 scales for 256 elements, 2.03 bytes; below 4096 elements, 8 bytes."""
    states = States("adamw-8bit", "bf16")
    assert states.bytes(("F", "D"), (4096, 4096)) / 4096**2 == 2 * (1 + 4 / 256)
    assert states.bytes(("D",), (LEAST_QUANTIZED - 1,)) == 8 * (LEAST_QUANTIZED - 1)
    assert states.bytes(("D",), (LEAST_QUANTIZED,)) == 2 * LEAST_QUANTIZED + 2 * 4 * LEAST_QUANTIZED // BLOCK
    assert states.bytes(("D",), (LEAST_QUANTIZED + 1,)) == 2 * (LEAST_QUANTIZED + 1) + 8 * (
        LEAST_QUANTIZED // BLOCK + 1
    )


@pytest.mark.parametrize(
    ("optimizer", "in_matrices", "elsewhere"),
    [("adamw", 8, 8), ("adamw-bf16", 4, 4), ("sgd", 4, 4), ("lion", 4, 4), ("muon", 4, 8)],
)
@pytest.mark.parametrize(
    ("engine", "masters", "zero"), [("megatron", 4, 0), ("torchtitan", 0, 3), ("torchtitan", 0, 0)]
)
def test_bytes_per_parameter(
    optimizer: Optimizer, in_matrices: int, elsewhere: int, engine: str, masters: int, zero: int
) -> None:
    tensors = 7 * L if optimizer == "muon" else 0
    counters = 4 * (3 + 9 * L - tensors) * (engine == "torchtitan" and optimizer in ("adamw", "adamw-bf16", "muon"))
    expected = IN_MATRICES * (in_matrices + masters) + ELSEWHERE * (elsewhere + masters) + counters
    assert states_bytes(engine, optimizer, zero=zero) == expected


def test_adafactor_keeps_rows_and_columns() -> None:
    """Shazeer and Stern 2018: n + m for a matrix, which under FSDP2 has n / d rows, and all of a vector."""
    tables, norms = 2 * [(V, H)], (2 * L + 1) * [H]
    for d in (1, 4):
        factors = sum(rows // d + columns for rows, columns in [*tables, *L * MATRICES])
        counters = 4 * (len(tables) + len(norms) + L * len(MATRICES))
        found = states_bytes("torchtitan", "adafactor", zero=3, dp_shard=d)
        assert found == 4 * (factors + sum(norms) // d) + counters


# --- over ranks -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("optimizer", ["adamw", "adamw-8bit", "sgd", "adafactor", "lion"])
@pytest.mark.parametrize("d", [2, 5])
def test_owners_of_whole_tensors_share_the_states(optimizer: Optimizer, d: int) -> None:
    """ZeRO-1 by tensors: the ranks' states are those of one, whatever they are."""
    whole = states_bytes("torch", optimizer, zero=0)
    shares = [states_bytes("torch", optimizer, zero=1, dp_shard=d, at={"dp_shard": i}) for i in range(d)]
    assert sum(shares) == whole


@given(
    st.sampled_from([o for o in get_args(Optimizer) if o != "adafactor"]),
    st.lists(st.integers(1, 3000), min_size=1, max_size=2),
)
def test_arrays_are_many_layouts(optimizer: Optimizer, sizes: list[int]) -> None:
    """Shapes of arrays give what each layout gives, alone."""
    shape, dims = tuple(np.array([size, 7 * size, 0]) for size in sizes), DIMS[len(sizes)]
    states = States(optimizer, "fp32", masters=True)
    alone = [states.bytes(dims, [q[i] for q in shape]) for i in range(3)]
    assert states.bytes(dims, shape).tolist() == [int(q) for q in alone]
    assert alone[-1] == 0


# --- Muon -------------------------------------------------------------------------------------------------------------
def test_muon_is_for_matrices_between_activations() -> None:
    assert is_hidden_matrix(("F", "D"))
    assert is_hidden_matrix(("E", "F", "D"))
    assert not any(map(is_hidden_matrix, [("V", "D"), ("P", "D"), ("D",)]))


@given(st.integers(1, 500), st.integers(1, 500))
def test_newton_schulz_is_within_jordans_bound(rows: int, columns: int) -> None:
    """At most 6nm^2 FLOPs a step for n >= m, which a square has (kellerjordan.github.io/posts/muon)."""
    m, n = sorted((rows, columns))
    done = flops(newton_schulz((rows, columns)))
    assert done == flops(newton_schulz((columns, rows)))
    assert done <= 6 * n * m**2 * NEWTON_SCHULZ_STEPS
    assert done == NEWTON_SCHULZ_STEPS * (4 * m * m * n + 2 * m**3)


@pytest.mark.parametrize("d", [1, 2, 4])
def test_distributed_muon_works_on_whole_matrices_of_its_own(d: int) -> None:
    """torchtitan's DistMuon: each matrix comes to one rank in fp32 and goes back, and ranks share the work."""
    layout = Layout(dp_shard=d, structure=Structure(zero=3))

    def step(optimizer: Optimizer) -> Any:
        return build(MODEL, Job(128, d, "bf16", optimizer), layout, engines.load("torchtitan"), 0)

    rows = traffic(step("muon").program)
    ways = [rows.get(Key(("dp_shard", "cp"), "all_to_all", "optimizer", what, "fp32")) for what in ("grads", "params")]
    moved = 4 * IN_MATRICES // d
    assert [(int(w.calls), int(w.payload_bytes)) for w in ways if w] == 2 * [(L, moved)] * (d > 1)
    extra = flops(step("muon").program) - flops(step("adamw").program)
    whole = sum(L * flops(newton_schulz(shape)) for shape in MATRICES)
    assert abs(extra - whole / d) <= sum(flops(newton_schulz(shape)) for shape in MATRICES) * (d > 1)


def test_muon_takes_time() -> None:
    """Of which a plan knows nothing but what the Program says: matmuls in the optimizer's phase."""
    layout = Layout(structure=Structure(zero=0), dp_replicate=1)
    cluster = clusters.load("1x1xh100-sxm")
    seconds = {
        o: predict(MODEL, Job(128, 1, "bf16", o), cluster, layout, "torch").time.optimizer_seconds
        for o in ("adamw", "muon")
    }
    assert seconds["muon"] > seconds["adamw"]
    program = build(MODEL, Job(128, 1, "bf16", "muon"), layout, engines.load("torch"), 0).optimizer
    names = {node.name for node in _computes(program)}
    assert names == {"newton_schulz", "optimizer"}


def _computes(nodes: Any) -> list[Compute]:
    inner = (n for node in nodes for n in _computes(getattr(node, "body", ())))
    return [*(node for node in nodes if isinstance(node, Compute)), *inner]


# --- refusals ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("engine", "optimizer", "layout", "said"),
    [
        ("megatron", "adafactor", Layout(dp_replicate=8, structure=Structure(zero=0)), "keep no rows and columns"),
        ("megatron", "adamw-8bit", Layout(dp_replicate=8, structure=Structure(zero=0)), "no blocks of 8 bits"),
        ("megatron", "muon", Layout(dp_shard=8, structure=Structure(zero=1)), "a flat buffer cuts them anywhere"),
        ("torch", "muon", Layout(dp_shard=8, structure=Structure(zero=3)), "gathers FSDP2's shards"),
        ("torch", "muon", Layout(dp_shard=8, structure=Structure(zero=1)), "holds Muon or AdamW, not both"),
        ("torch", "adafactor", Layout(dp_shard=8, structure=Structure(zero=3)), "fails on the DTensors of FSDP2"),
        ("torchtitan", "muon", Layout(tp=2, dp_shard=4, structure=Structure(tensor="tensor")), "use --tp 1"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(engine: str, optimizer: Optimizer, layout: Layout, said: str) -> None:
    job, cluster = Job(128, 8, "bf16", optimizer), clusters.load("1x8xh100-sxm")
    (why,) = reasons(MODEL, job, cluster, layout, engines.load(engine))
    assert said in why
    assert f"--optimizer {optimizer}" in why
