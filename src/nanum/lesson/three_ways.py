"""Part E: data parallel, tensor parallel and a pipeline run for real, as `nanum verify` does: formula, run, difference.

Formulas are the textbook's, written out here as a reader would; what is predicted is read off the Program, and counted
is what PyTorch did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanum.collectives import wire_bytes
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.lesson.arithmetic import FP32_BYTES
from nanum.model import Attention, Mlp, Model
from nanum.processes import Progress
from nanum.verify import Case, Verification, verify
from nanum.verify.checks import EXACT
from nanum.verify.gloo import received_bytes

RANKS = 2
MICRO_BATCHES = 4
ALONE = "alone"


@dataclass(frozen=True)
class Tiny:
    """The step that all three ways do: of one job, in fp32."""

    hidden_size: int = 128
    layers: int = 4
    vocab_size: int = 1000
    seq_len: int = 64
    sequences: int = 8
    steps: int = 4

    @property
    def model(self) -> Model:
        heads = 4
        return Model(
            name="tiny",
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            num_hidden_layers=self.layers,
            max_position_embeddings=self.seq_len,
            attention=Attention(heads, heads, self.hidden_size // heads),
            mlp=Mlp(11 * self.hidden_size // 4, gated=True, activation="silu"),
            norm="rms_norm",
            position="rotary",
            tie_word_embeddings=False,
        )

    def cases(self) -> dict[str, Case]:
        """One process, and each way on two."""
        whole, half, quarter = self.sequences, self.sequences // RANKS, self.sequences // MICRO_BATCHES
        plain = Structure(zero=0)
        layouts = {
            ALONE: Layout(micro_batch_size=whole, structure=plain),
            "data_parallel": Layout(dp_replicate=RANKS, micro_batch_size=half, structure=plain),
            "tensor_parallel": Layout(tp=RANKS, micro_batch_size=whole, structure=Structure(zero=0, tensor="tensor")),
            "pipeline": Layout(pp=RANKS, micro_batch_size=quarter, structure=Structure(zero=0, pipelined=True)),
        }
        job = Job(self.seq_len, self.sequences, "fp32")
        return {name: Case(name, self.model, job, layout, self.steps) for name, layout in layouts.items()}

    def activation_bytes(self, sequences: int) -> int:
        """A layer's output, b · s · h elements of fp32."""
        return sequences * self.seq_len * self.hidden_size * FP32_BYTES


def part_e(progress: Progress, *, tiny: Tiny | None = None) -> dict[str, Any]:
    """The document of part E. Raises as `nanum.verify.verify` does."""
    tiny = tiny or Tiny()
    cases = tiny.cases()
    return from_runs(tiny, dict(zip(cases, verify(list(cases.values()), progress), strict=True)))


def from_runs(tiny: Tiny, runs: dict[str, Verification]) -> dict[str, Any]:
    """The document of part E from the runs by name."""
    alone, ways = runs[ALONE], {name: run for name, run in runs.items() if name != ALONE}
    parameters = sum(each.counted for each in alone.held if each.category == "params") // FP32_BYTES
    formulas = formula(tiny, parameters)
    return {
        "ok": all(run.ok for run in runs.values()),
        "torch": alone.answer["torch"],
        "backend": alone.answer["backend"],
        "ranks": RANKS,
        "model": {
            "layers": tiny.layers,
            "hidden": tiny.hidden_size,
            "vocab": tiny.vocab_size,
            "parameters": parameters,
        },
        "job": {
            "sequences": tiny.sequences,
            "seq_len": tiny.seq_len,
            "num_microbatches": MICRO_BATCHES,
            "precision": "fp32",
            "steps": tiny.steps,
        },
        "alone": {"held": _held(alone)},
        "ways": {name: _way(run, formulas[name]) for name, run in ways.items()},
    }


def formula(tiny: Tiny, parameters: int) -> dict[str, dict[str, int]]:
    """What a rank sends in a step by each way's formula, and the terms of it.

    An all-reduce's ring has a rank pass on 2 (N - 1) / N of the payload. Data parallelism reduces 4 bytes for each
    parameter; tensor parallelism in each layer four outputs, of attention and feed-forward, forward and backward
    (Shoeybi et al. 2019); a rank at a pipeline's boundary sends each micro-batch's output, or the gradient of one.
    """
    grads, whole = parameters * FP32_BYTES, tiny.activation_bytes(tiny.sequences)
    part = tiny.activation_bytes(tiny.sequences // MICRO_BATCHES)
    exchanges = 4 * tiny.layers
    return {
        "data_parallel": {
            "exchanges": 1,
            "payload_bytes": grads,
            "bytes": wire_bytes("all_reduce", grads, RANKS),
        },
        "tensor_parallel": {
            "exchanges": exchanges,
            "payload_bytes": whole,
            "bytes": wire_bytes("all_reduce", exchanges * whole, RANKS),
        },
        "pipeline": {
            "exchanges": MICRO_BATCHES,
            "payload_bytes": part,
            "bytes": wire_bytes("send", MICRO_BATCHES * part, RANKS),
        },
    }


def _way(run: Verification, by_formula: dict[str, int]) -> dict[str, Any]:
    """One way beside its formula: bytes of the rank that is predicted to send the most."""
    document = run.to_dict()
    predicted, counted = (_sent(document["communication"], side) for side in ("predicted", "counted"))
    rank = max(predicted, key=lambda rank: (predicted[rank], -rank))
    beyond = predicted[rank] - by_formula["bytes"]
    answers = run.answer["ranks"]
    return {
        "ok": run.ok,
        "formula": by_formula,
        "rank": rank,
        "predicted_bytes": predicted[rank],
        "counted_bytes": counted.get(rank, 0),
        "difference_bytes": counted.get(rank, 0) - predicted[rank],
        "beyond_formula_bytes": beyond,
        "calls": sum(row["counted_calls"] for row in document["communication"]),
        "rows_that_differ": sum(not row.ok for row in run.rows),
        "sockets": _sockets(run),
        "held": _held(run),
        "loss_error": _loss_error(answers),
        "gradient_error": max((error for each in answers for error in each["gradients"].values()), default=None),
        "checks": document["checks"],
        "communication": document["communication"],
    }


def _sent(rows: Sequence[dict[str, Any]], side: str) -> dict[int, int]:
    """Bytes by rank that it sends by a ring, of what is `predicted` or `counted`."""
    sent: dict[int, int] = {}
    for row in rows:
        passed_on = int(wire_bytes(row["kind"], row[f"{side}_payload_bytes"], row["group_size"]))
        sent[row["rank"]] = sent.get(row["rank"], 0) + passed_on
    return sent


def _sockets(run: Verification) -> dict[str, Any]:
    """What came in over all ranks' sockets, by gloo's own algorithms and by the kernel (None: it tells nothing)."""
    came = [answer["received_bytes"] for answer in run.answer["ranks"]]
    expected = sum(
        received_bytes(key.kind, row.payload_bytes, key.group_size)
        for of in run.predicted
        for key, row in of.ledger.items()
    )
    check = next(check for check in run.checks if check.name == "wire")
    counted = None if any(each is None for each in came) else sum(came)
    return {"ok": check.ok, "predicted_bytes": round(expected), "counted_bytes": counted}


def _held(run: Verification) -> list[dict[str, Any]]:
    """By rank, bytes of each category as predicted and counted; `exact` are those that must agree to the byte."""
    ranks: dict[int, dict[str, Any]] = {}
    for each in run.held:
        exact = each.category in EXACT
        beside = {"predicted_bytes": each.predicted, "counted_bytes": each.counted, "exact": exact, "ok": each.ok}
        ranks.setdefault(each.rank, {"rank": each.rank, "bytes": {}})["bytes"][each.category] = beside
    return list(ranks.values())


def _loss_error(answers: Sequence[dict[str, Any]]) -> float:
    """How far a step's loss is from one process's at the most, as a ratio: the mean of what ranks see of it."""
    furthest = 0.0
    for step, alone in enumerate(answers[0]["reference_losses"]):
        seen = [loss for answer in answers for loss in answer["losses"][step]]
        furthest = max(furthest, abs(sum(seen) / len(seen) / alone - 1))
    return furthest
