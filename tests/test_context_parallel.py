"""Context parallelism as papers state it, beside the ledgers that are derived from the Program.

Letters as in `test_closed_forms`; c ranks share a sequence, q = a·d the width of the queries, κ = 2·g·d that of keys
and values together. ρ(n) = (n - 1)/n is what a ring sends of a gathered buffer, and an all-to-all of what it deals out.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any, get_args

import numpy as np
import pytest

from nanum import cluster, engines
from nanum import model as models
from nanum.account.coefficients import coefficients
from nanum.account.memory import held_after, peak
from nanum.account.traffic import Key, Total, flops, traffic
from nanum.build import build
from nanum.conventions import Conventions
from nanum.division.parts import emit_parts
from nanum.engines.engine import Engine
from nanum.job import Job
from nanum.layout import ContextParallel, Layout, Structure
from nanum.model import Attention, Mlp, Model
from nanum.parallel.pipeline import Step
from nanum.prediction import Prediction, consistent, predict, reasons
from nanum.program import Held
from nanum.search import plan
from nanum.search.candidates import candidates

TORCH, TORCHTITAN, MEGATRON = (engines.load(name) for name in ("torch", "torchtitan", "megatron"))
KINDS = tuple(kind for kind in get_args(ContextParallel) if kind != "none")
B, S, H, A, G, F, V, L = 2, 128, 256, 8, 4, 704, 1024, 3
Q, KAPPA = H, 2 * G * (H // A)
X = 2 * B * S * H
M = 3
LLAMA, JOB = models.load("llama-3.2-1b"), Job(8192, 8)


def rho(n: int) -> Fraction:
    return Fraction(n - 1, n)


def llama(layers: int = L) -> Model:
    return Model(
        "llama", H, V, layers, S, Attention(A, G, H // A), Mlp(F, gated=True, activation="silu"), "rms_norm", "rotary",
        tie_word_embeddings=False,
    )  # fmt: skip


def layout(kind: str = "none", *, sp: bool = True, sizes: dict[str, Any], **structure: Any) -> Layout:
    tensor = "none" if np.all(sizes.get("tp", 1) == 1) else "sequence" if sp else "tensor"
    pipelined = bool(np.any(sizes.get("pp", 1) > 1))
    stated = Structure(zero=3, tensor=tensor, pipelined=pipelined, cp_kind=kind, **structure)  # type: ignore[arg-type]
    return Layout(**sizes, micro_batch_size=B, structure=stated)


def passing_on(model: Model, job: Job, structure: Structure) -> Conventions:
    return replace(TORCHTITAN.conventions(model, job, structure), ring_gathers=False)


def step(
    kind: str,
    *,
    layers: int = L,
    stage: int = 0,
    engine: Engine = TORCHTITAN,
    sp: bool = True,
    recompute: str = "none",
    **sizes: int,
) -> Step:
    at = layout(kind, sizes=sizes, sp=sp, recompute=recompute)
    return build(llama(layers), Job(S, B * M * at.data_ranks), at, engine, stage)


def rows(program: Step, axis: str, what: str = "activations") -> dict[Key, Total]:
    return {k: t for k, t in traffic(program.program).items() if axis in k.axes and k.what == what}


def of_a_layer(axis: str, kind: str, **given: Any) -> tuple[int, int]:
    """Bytes that one layer sends over an axis in a micro-batch, and in how many calls."""
    more, fewer = (rows(step(kind, layers=n, **given), axis).values() for n in (L + 1, L))
    sent, calls = (
        sum(int(getattr(t, field)) for t in more) - sum(int(getattr(t, field)) for t in fewer)
        for field in ("wire_bytes", "calls")
    )
    assert sent % M == 0
    assert calls % M == 0
    return sent // M, calls // M


@pytest.mark.parametrize("t", [1, 2])
@pytest.mark.parametrize("c", [2, 4])
def test_bytes_of_ulysses(c: int, t: int) -> None:
    """2ρ(c)·2·b·(s/c)·(2q + κ)/t in four all-to-alls forward and four backward (Jacobs et al., 2023, section 3.2); half
    as much again with full recompute."""
    a_pass = rho(c) * 2 * B * Fraction(S, c) * (2 * Q + KAPPA) / t
    assert of_a_layer("cp", "ulysses", cp=c, tp=t) == (2 * a_pass, 8)
    assert of_a_layer("cp", "ulysses", cp=c, tp=t, recompute="full") == (3 * a_pass, 12)


@pytest.mark.parametrize("t", [1, 2])
@pytest.mark.parametrize("c", [2, 4, 8])
def test_bytes_of_gathered_keys(c: int, t: int) -> None:
    """Keys and values are gathered, their gradients reduced to their owners: 2ρ(c)·2·b·s·κ/t in two and two calls."""
    a_pass = rho(c) * 2 * B * S * KAPPA / t
    assert of_a_layer("cp", "allgather", cp=c, tp=t) == (2 * a_pass, 4)


@pytest.mark.parametrize("t", [1, 2])
@pytest.mark.parametrize("c", [2, 4, 8])
def test_bytes_of_a_ring(c: int, t: int) -> None:
    """(c - 1)·2·b·(s/c)·κ/t forward and again backward (Liu et al., 2023, section 3), and backward fp32 gradients of
    keys and values in c turns, the last of which brings them home. PyTorch gathers what forward and backward pass on:
    as many bytes in one call."""
    block = 2 * B * Fraction(S, c) * KAPPA / t
    expected = 2 * (c - 1) * block + c * 2 * block
    engine = replace(TORCHTITAN, conventions=passing_on)
    assert of_a_layer("cp", "ring", cp=c, tp=t, engine=engine) == (expected, 2 * (c - 1) + c)
    assert of_a_layer("cp", "ring", cp=c, tp=t) == (expected, 2 + c)


@pytest.mark.parametrize("t", [1, 2])
@pytest.mark.parametrize("c", [2, 4, 8])
def test_bytes_of_megatron_s_ring(c: int, t: int) -> None:
    """3(c - 1)·2·b·(s/c)·κ/t: keys and values forward, both and their gradients backward, each beside attention
    (Transformer Engine's p2p); the core's recompute, and full recompute, send forward's again."""
    block = 2 * B * Fraction(S, c) * KAPPA / t
    given = {"cp": c, "tp": t, "engine": MEGATRON}
    assert of_a_layer("cp", "ring", **given) == (3 * (c - 1) * block, c - 1 + c)
    for recompute in ("selective", "full"):
        assert of_a_layer("cp", "ring", recompute=recompute, **given) == (4 * (c - 1) * block, 2 * (c - 1) + c)


@pytest.mark.parametrize("c", [2, 4])
def test_megatron_s_ring_saves_what_attention_does(c: int) -> None:
    """Of a rank's own rows: q, keys and values in one buffer, the output and its log-sum-exp."""

    def saved(kind: str, rows: int, **sizes: int) -> int:
        at = layout(kind, sizes=sizes)
        return int(peak(emit_parts(llama(), Job(rows, B), at, MEGATRON).bodies.layers[0].forward).net)

    assert saved("ring", S, cp=c) == saved("none", S // c)


@pytest.mark.parametrize("t", [1, 2])
@pytest.mark.parametrize("c", [2, 4, 8])
def test_bytes_of_megatron_s_gather(c: int, t: int) -> None:
    """ρ(c)·2·b·s·κ/t three times: keys and values are gathered forward, and again backward, where their gradients are
    reduced too (Transformer Engine's AttnFuncWithCPAndKVAllGather); full recompute gathers them once more.
    """
    once = rho(c) * 2 * B * S * KAPPA / t
    given = {"cp": c, "tp": t, "engine": MEGATRON}
    assert of_a_layer("cp", "allgather", **given) == (3 * once, 6)
    for recompute in ("selective", "full"):
        assert of_a_layer("cp", "allgather", recompute=recompute, **given) == (4 * once, 8)
    found = {(k.kind, k.phase): int(x.calls) for k, x in rows(step("allgather", **given), "cp").items()}
    assert found == {
        ("all_gather", "forward"): 2 * L * M,
        ("all_gather", "backward"): 2 * L * M,
        ("reduce_scatter", "backward"): 2 * L * M,
    }


@pytest.mark.parametrize("c", [2, 4])
def test_megatron_s_gather_saves_a_rank_s_own_rows(c: int) -> None:
    """As attention to so many rows would; while it runs, all keys and values are there, in order."""

    def layer(kind: str, rows: int, **sizes: int) -> Any:
        return emit_parts(llama(), Job(rows, B), layout(kind, sizes=sizes), MEGATRON).bodies.layers[0]

    gathered, alone = layer("allgather", S, cp=c), layer("none", S // c)
    assert peak(gathered.forward).net == peak(alone.forward).net
    for nodes in (gathered.forward, gathered.backward):
        ordered = [int(n.bytes) for n in nodes if isinstance(n, Held) and n.name == "order_of_sequence" and n.bytes > 0]
        assert sum(ordered) == 2 * B * S * KAPPA


def test_megatron_s_gather_does_the_same_operations() -> None:
    alone, gather = (step(k, engine=MEGATRON, **sizes) for k, sizes in (("none", {}), ("allgather", {"cp": 4})))
    assert flops(gather.program) * 4 == pytest.approx(flops(alone.program), rel=1e-12)


def test_megatron_s_gather_takes_windows_and_latent_attention() -> None:
    """Which its ring refuses."""
    at = Layout(cp=4, dp_shard=2, structure=Structure(zero=1, cp_kind="allgather"))
    for name in ("gemma-3-1b", "deepseek-v2-lite"):
        found = predict(models.load(name), Job(4096, 8), cluster.load("1x8xh100-sxm"), at, engine="megatron")
        kinds = {row.kind for row in found.communication if row.axis == "cp"}
        assert kinds == {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize("c", [2, 4])
def test_megatron_s_ring_does_the_same_operations(c: int) -> None:
    """A c-th of the causal attention at each of c steps, forward, and twice backward."""
    alone, ring = (step(kind, engine=MEGATRON, **sizes) for kind, sizes in (("none", {}), ("ring", {"cp": c})))
    assert flops(ring.program) * c == pytest.approx(flops(alone.program), rel=1e-12)


def test_megatron_s_ring_runs_beside_its_attention() -> None:
    """Long blocks hide what is passed on; without streams of their own the same exchanges are waited for."""
    model, job = models.load("llama-3.2-1b"), Job(2**16, 8)
    at = Layout(cp=8, structure=Structure(zero=1, cp_kind="ring"))
    found = predict(model, job, cluster.load("1x8xh100-sxm"), at, engine="megatron")
    passed = [row for row in found.communication if row.kind == "permute"]
    assert {row.phase for row in passed} == {"forward", "backward"}
    beside = coefficients().fitted.beside.value  # what the compute loses meanwhile is exposed
    assert sum(row.exposed_seconds for row in passed) < (0.05 + beside) * sum(row.seconds for row in passed)
    short = predict(model, Job(1024, 8), cluster.load("8x1xh100-sxm"), at, engine="megatron")
    passed = [row for row in short.communication if row.kind == "permute"]
    assert sum(row.exposed_seconds for row in passed) > 0.3 * sum(row.seconds for row in passed)


def test_megatron_s_optimizer_is_split_over_cp_too() -> None:
    found = rows(step("ring", engine=MEGATRON, cp=2, dp_shard=2), "cp", "grads")
    assert {tuple(axes) for axes in (key.axes for key in found)} == {("dp_shard", "cp")}


@pytest.mark.parametrize(
    ("model", "seq_len", "kind", "why"),
    [
        ("llama-3.2-1b", 1028, "ring", "2·cp=8 does not divide seq_len=1028"),
        ("llama-3.2-1b", 1028, "allgather", "2·cp=8 does not divide seq_len=1028"),
        ("gemma-3-1b", 1024, "ring", "which Transformer Engine's p2p refuses"),
    ],
)
def test_what_megatron_refuses(model: str, seq_len: int, kind: str, why: str) -> None:
    at = Layout(cp=4, dp_shard=2, structure=Structure(zero=1, cp_kind=kind))  # type: ignore[arg-type]
    engine = engines.load("megatron")
    said = reasons(models.load(model), Job(seq_len, 8), cluster.load("1x8xh100-sxm"), at, engine)
    assert any(why in reason for reason in said), said


def test_selective_recompute_of_a_ring() -> None:
    """Plain PyTorch sees the kernels that a ring is made of: it keeps their outputs, and exchanges again to put them
    together (so real steps on gloo did). torchtitan's ring is one operation, whose output is kept."""
    block = 2 * B * Fraction(S, 4) * KAPPA
    without = (2 * 3 + 4 * 2) * block
    assert of_a_layer("cp", "ring", cp=4, engine=TORCH, recompute="selective") == (without + 3 * block, 3 + 4)
    assert of_a_layer("cp", "ring", cp=4, recompute="selective") == (without, 2 + 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sp", [True, False])
def test_tensor_parallel_exchanges_are_of_a_ranks_rows(kind: str, sp: bool) -> None:
    """8ρ(t)·X/c, as without context parallelism of a c-th of the rows."""
    assert of_a_layer("tp", kind, cp=4, tp=2, sp=sp)[0] == 8 * rho(2) * X / 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("d", "c"), [(1, 4), (2, 2)])
def test_weights_are_stored_over_dp_shard_and_cp(kind: str, d: int, c: int) -> None:
    """d·c ranks of data parallelism, those of one sequence among them, exchange what d·c of it alone do."""
    both, alone = step(kind, dp_shard=d, cp=c), step("none", dp_shard=d * c)
    for what in ("params", "grads"):
        of_both, of_one = rows(both, "cp", what), rows(alone, "dp_shard", what)
        assert {k.axes for k in of_both} == {("dp_shard", "cp")}
        assert [vars(t) for t in of_both.values()] == [vars(t) for t in of_one.values()]
    assert held_after(both.program)["params"] == held_after(alone.program)["params"]


@pytest.mark.parametrize("kind", KINDS)
def test_pipeline_sends_a_ranks_rows(kind: str) -> None:
    """2m·X/c of an interior rank."""
    found = rows(step(kind, layers=6, stage=1, cp=4, pp=3), "pp").values()
    assert sum(int(t.wire_bytes) for t in found) == 2 * M * X / 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("c", [2, 4])
def test_ranks_compute_what_one_alone_computes(kind: str, c: int) -> None:
    assert c * flops(step(kind, cp=c).program) == flops(step("none").program)


@pytest.mark.parametrize("kind", ["allgather", "ulysses"])
def test_eager_scores_of_a_ranks_rows_or_heads(kind: str) -> None:
    """A c-th of the s·s scores of every head, and a c-th of their FLOPs."""
    found = {}
    for name, c in (("none", 1), (kind, 4)):
        at = layout(name, sizes={"cp": c}, attention="eager")
        parts = emit_parts(llama(), Job(S, B), at, TORCHTITAN)
        scores = [
            node for node in parts.bodies.layers[0].forward if isinstance(node, Held) and node.name == "core_scores"
        ]
        found[c] = float(flops(parts.bodies.layers[0].forward)), max(int(node.bytes) for node in scores)
    assert found[1] == (4 * found[4][0], 4 * found[4][1])
    assert found[1][1] == 2 * B * A * S * S


# --- activations ------------------------------------------------------------------------------------------------------
def saved(kind: str, c: int) -> int:
    parts = emit_parts(llama(), Job(S, B), layout(kind, sizes={"cp": c}), TORCHTITAN)
    return int(peak(parts.bodies.layers[0].forward).net)


@pytest.mark.parametrize("c", [2, 4])
def test_what_a_layer_saves(c: int) -> None:
    """A c-th of everything under a ring. Gathered keys and values are whole; Ulysses saves the core's output twice: of
    its heads for the core, of its rows for the product that follows."""
    whole, rows_of_a_rank = saved("none", 1), B * S // c
    assert saved("ring", c) == Fraction(whole, c)
    assert saved("allgather", c) == Fraction(whole, c) + 2 * KAPPA * (B * S - rows_of_a_rank)
    assert saved("ulysses", c) == Fraction(whole, c) + 2 * Q * rows_of_a_rank


# --- layouts ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_many_layouts_at_once_are_as_each_alone(kind: str) -> None:
    sizes = {"dp_shard": [1, 2, 4, 1], "cp": [2, 2, 4, 4], "tp": [1, 1, 1, 1], "pp": [1, 1, 1, 1]}
    together = layout(kind, sizes={axis: np.array(each) for axis, each in sizes.items()})
    found = traffic(
        build(llama(), Job(S, 48), replace(together, dp_replicate=np.ones(4, np.int64)), TORCHTITAN, 0).program
    )
    for i in range(4):
        alone = layout(kind, sizes={axis: each[i] for axis, each in sizes.items()})
        for key, total in traffic(build(llama(), Job(S, 48), alone, TORCHTITAN, 0).program).items():
            for field, value in vars(total).items():
                assert np.broadcast_to(getattr(found[key], field), 4)[i] == value, (key, field)


def test_the_structure_follows_the_sizes() -> None:
    assert consistent(Layout(cp=2)).structure.cp_kind == "ring"
    assert consistent(Layout(cp=2, structure=Structure(cp_kind="ulysses"))).structure.cp_kind == "ulysses"
    assert consistent(Layout(structure=Structure(cp_kind="ulysses"))).structure.cp_kind == "none"
    for wrong in (Layout(cp=2), Layout(structure=Structure(cp_kind="ring"))):
        with pytest.raises(ValueError, match="cp_kind"):
            build(llama(), Job(S, B), wrong, TORCHTITAN, 0)


@pytest.mark.parametrize(
    ("engine", "given", "said"),
    [
        ("torchtitan", {"cp": 3}, "cp=3 does not divide seq_len=8192"),
        ("torchtitan", {"cp": 8192}, "2·cp=16384 does not divide seq_len=8192"),
        ("torch", {"cp": 4096, "tp": 4}, "cp·tp=4096·4=16384 does not divide seq_len=8192, under sequence parallel"),
        (
            "torch",
            {"cp": 16, "cp_kind": "ulysses"},
            "cp=16 does not divide num_key_value_heads=8, under --cp-kind ulysses",
        ),
        (
            "torch",
            {"cp": 16, "tp": 4, "cp_kind": "ulysses"},
            "cp·tp=16·4=64 does not divide num_attention_heads=32, under --cp-kind ulysses",
        ),
        ("torch", {"cp": 2, "attention": "eager"}, "cp=2 by a ring puts a flash kernel's results together"),
        (
            "megatron",
            {"cp": 2, "cp_kind": "allgather", "attention": "eager", "zero": 1},
            "--attention eager is megatron's",
        ),
        ("torch", {"cp": 2, "zero": 0}, "cp=2 leaves gradients that are sums over its ranks"),
        ("torchtitan", {"cp": 2, "zero": 0}, "FSDP2 is what reduces over cp=2"),
    ],
)
def test_an_impossible_layout_is_refused_in_the_users_words(engine: str, given: dict[str, Any], said: str) -> None:
    sizes = {axis: given[axis] for axis in ("cp", "tp") if axis in given}
    structure = Structure(
        zero=given.get("zero", 3),
        tensor="sequence" if "tp" in given else "none",
        cp_kind=given.get("cp_kind", "ring"),
        attention=given.get("attention", "flash"),
    )
    at = Layout(**sizes, structure=structure)
    gpus = replace(cluster.load("1x8xh100-sxm"), nodes=1, gpus_per_node=at.world)
    found = reasons(models.load("llama-3.1-8b"), Job(8192, 8), gpus, at, engines.load(engine))
    assert [reason for reason in found if said in reason], found
    assert len(found) <= 2


@pytest.mark.parametrize("engine", ["torch", "torchtitan"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prediction(engine: str, kind: str) -> None:
    """Longer exchanges make longer steps, and what is not modelled is said."""
    at = Layout(dp_shard=2, cp=4, structure=Structure(zero=3, cp_kind=kind))  # type: ignore[arg-type]
    ours = cluster.load("1x8xh100-sxm")
    fast = predict(LLAMA, JOB, ours, at, engine)
    link = ours.intra_node
    slower = replace(ours, intra_node=replace(link, bytes_per_second=replace(link.bytes_per_second, value=1e9)))
    assert (
        predict(models.load("llama-3.2-1b"), Job(8192, 8), slower, at, engine).time.step_seconds
        > fast.time.step_seconds
    )
    document = fast.to_dict()
    assert document["layout"]["cp_kind"] == kind
    undivided = predict(LLAMA, JOB, ours, Layout(dp_shard=8), engine).to_dict()
    left_out = [each for each in document["unmodelled"] if each not in undivided["unmodelled"]]
    assert [each.split()[0] for each in left_out] == ["uneven", "a"][: 1 + (kind == "ring")]


@pytest.mark.parametrize(
    ("engine", "kind"), [("torchtitan", "allgather"), ("megatron", "ring"), ("deepspeed", "ulysses")]
)
def test_a_plan_divides_sequences_into_parts_that_are_long_enough(engine: str, kind: str) -> None:
    ours, its = cluster.load("1x8xh100-sxm"), engines.load(engine)
    found: dict[int, set[tuple[int, str]]] = {}
    for tokens in (4096, 16384):
        groups = candidates(LLAMA, replace(JOB, seq_len=tokens), ours, its).groups
        pairs = {(int(cp), g.layout.structure.cp_kind) for g in groups for cp in np.unique(g.layout.cp)}
        found[tokens] = pairs
    assert found == {4096: {(1, "none")}, 16384: {(1, "none"), (2, kind), (4, kind)}}


@pytest.mark.parametrize("engine", ["torchtitan", "megatron"])
def test_what_a_plan_says_of_divided_sequences_is_predicted(engine: str) -> None:
    """Read as arrays, each by its own sizes: bytes and seconds are those of the layout alone."""
    its, ours = engines.load(engine), cluster.load("2x8xh100-sxm")
    model, job = models.load("llama-3.1-8b"), Job(32768, 32)
    found = plan(model, job, ours, engine, top=8, fold=False)
    contexts = [c for _, c in found.candidates if c.layout.cp > 1]
    assert contexts
    for c in contexts:
        p = Prediction(model, job, ours, consistent(c.layout), its)
        assert (c.device_bytes, c.step_seconds) == (p.worst.device_bytes, pytest.approx(p.time.step_seconds, rel=1e-9))
