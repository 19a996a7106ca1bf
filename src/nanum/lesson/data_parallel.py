"""Part D: data parallelism on 1, 2 … processes. What the formula says, what the run says, what lowers the serial part.

The measurement is `nanum.live.rounds`, run as a process; the bytes are read off the Program, as `nanum verify` does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from nanum import processes
from nanum.collectives import wire_bytes
from nanum.dtypes import ITEMSIZE
from nanum.engines.torch import on_gloo
from nanum.job import Job, Precision
from nanum.layout import Layout, Structure
from nanum.lesson.measured import device_name
from nanum.lesson.samples import compare, likely, middle, rounds_to_agree
from nanum.model import Attention, Mlp, Model
from nanum.prediction import karp_flatt
from nanum.processes import Progress
from nanum.scaling.laws import amdahl_limit, amdahl_speedup, gpus_at_half_efficiency
from nanum.verify.case import Case
from nanum.verify.expected import expected

MOST_RANKS = 8
PARTS = ("forward_seconds", "backward_seconds", "optimizer_seconds")
"""What a step is made of."""
CROWDED = 0.85
"""Where processes have a core for less than this part of a forward pass, other programs have it."""
WIDE = 0.5
"""Where the rounds leave a serial fraction within more than this part of it, a curve drawn with it is one of many."""
CONTINUED = tuple(2**power for power in range(1, 11))
PRECISION: Precision = "fp32"


@dataclass(frozen=True)
class Exchange:
    """How the gradients are exchanged. `bucket_cap_mb` is DDP's, in MiB (None: PyTorch's own)."""

    bucket_cap_mb: float | None = None
    dtype: str = PRECISION


EXCHANGES = {
    "each_tensor": Exchange(bucket_cap_mb=1e-4),  # less than the smallest gradient: each closes its bucket
    "at_once": Exchange(bucket_cap_mb=1e5),  # more than any model here: all are in one bucket, full when the last is
    "buckets": Exchange(),
    "bf16": Exchange(dtype="bf16"),
}
EFFECTS = {
    "bucketing": ("each_tensor", "buckets"),
    "overlap": ("at_once", "buckets"),
    "bf16": ("buckets", "bf16"),
}
"""What differs between two exchanges."""


@dataclass(frozen=True)
class Divided:
    """The job that is divided, and how long it is sampled.

    The whole takes some 0.3 s of one core. 256 tokens are few for its parameters, so that the exchange of gradients
    weighs as much beside the arithmetic as it would with far more tokens on a GPU.
    """

    hidden_size: int = 512
    intermediate_size: int = 1408
    layers: int = 2
    vocab_size: int = 2000
    seq_len: int = 32
    sequences: int = 8
    least_rounds: int = 3
    most_rounds: int = 15
    seconds: float = 36.0

    @property
    def model(self) -> Model:
        heads = 8
        return Model(
            name="divided",
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            num_hidden_layers=self.layers,
            max_position_embeddings=self.seq_len,
            attention=Attention(heads, heads, self.hidden_size // heads),
            mlp=Mlp(self.intermediate_size, gated=True, activation="silu"),
            norm="rms_norm",
            position="rotary",
            tie_word_embeddings=False,
        )

    def case(self, ranks: int, exchange: Exchange, *, sequences: int | None = None) -> Case:
        """`sequences` of the job, or all, on so many ranks; one micro-batch each."""
        batch = self.sequences if sequences is None else sequences
        layout = Layout(dp_replicate=ranks, micro_batch_size=batch // ranks, structure=Structure(zero=0))
        job = Job(self.seq_len, batch, PRECISION)
        return Case("divided", self.model, job, layout, bucket_cap_mb=exchange.bucket_cap_mb)


QUICK = Divided(64, 96, layers=1, vocab_size=100, seq_len=8, seconds=0.0)


def part_d(progress: Progress, *, divided: Divided | None = None) -> dict[str, Any]:
    """The document of part D. Raises as `processes.run` does."""
    divided, cores = divided or Divided(), usable_cores()
    ranks = ranks_measured(cores)
    measured = processes.run("nanum.live.rounds", [], progress, question=questions(divided, ranks))
    return from_rounds(divided, cores, ranks, measured)


def usable_cores() -> int:
    """Those that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def ranks_measured(cores: int) -> tuple[int, ...]:
    """1, 2, 4 … to the cores and at most 8; two even of one core, since without a second nothing is exchanged."""
    return tuple(n for n in (1, 2, 4, 8) if n <= max(2, min(cores, MOST_RANKS)))


def questions(divided: Divided, ranks: Sequence[int]) -> dict[str, Any]:
    """As `nanum.live.rounds` reads them. The last of `ranks` runs every exchange; and one rank a share of the job."""
    most = ranks[-1]
    asked = [_question(divided.case(1, EXCHANGES["buckets"]), "one")]
    asked.append(_question(divided.case(1, EXCHANGES["buckets"], sequences=divided.sequences // most), "share"))
    asked += [_question(divided.case(n, EXCHANGES["buckets"]), f"{n} ranks") for n in ranks[1:-1]]
    for name, exchange in EXCHANGES.items():
        bf16 = exchange.dtype == "bf16"
        asked.append(_question(divided.case(most, exchange), name) | {"bf16_exchange": bf16})
    return {
        "questions": asked,
        "least_rounds": divided.least_rounds,
        "most_rounds": divided.most_rounds,
        "seconds": divided.seconds,
        "all_reduce_bytes": exchanged(divided, most, EXCHANGES["at_once"])["payload_bytes"],
    }


def _question(case: Case, name: str) -> dict[str, Any]:
    return case.question(on_gloo(case.bucket_cap_mb)) | {"name": name}


def exchanged(divided: Divided, ranks: int, exchange: Exchange) -> dict[str, int]:
    """What a rank exchanges of gradients in a step, by the ledger; in bf16 the same messages in elements half as large.

    (A hook casts what it finds in a bucket: the buckets themselves are filled, and counted, in fp32.)
    """
    case = divided.case(ranks, exchange)
    ledger = expected(case.model, case.job, case.layout, on_gloo(case.bucket_cap_mb), case.layout.place(0)).ledger
    rows = [(key, row) for key, row in ledger.items() if key.kind == "all_reduce"]
    payload_bytes = sum(row.payload_bytes * ITEMSIZE[exchange.dtype] // ITEMSIZE[key.dtype] for key, row in rows)
    return {
        "calls": sum(row.calls for _, row in rows),
        "payload_bytes": payload_bytes,
        "wire_bytes": wire_bytes("all_reduce", payload_bytes, ranks),
    }


# --- from samples to a document


@dataclass(frozen=True)
class Apart:
    """What one round measured apart, of which the formula is made: seconds."""

    share: float
    backward: float
    all_reduce: float

    def step(self, bytes_ratio: float, *, hides: bool) -> float:
        """A step by the formula: what a rank computes, and what of the exchange the backward pass does not hide."""
        exchange = bytes_ratio * self.all_reduce
        return self.share + (max(0.0, exchange - self.backward) if hides else exchange)


def from_rounds(divided: Divided, cores: int, ranks: Sequence[int], measured: dict[str, Any]) -> dict[str, Any]:
    """The document of part D from what `nanum.live.rounds` measured."""
    most = ranks[-1]
    steps = {name: [_slowest(of_round) for of_round in rounds] for name, rounds in measured["steps"].items()}
    seconds = {name: [_total(step) for step in of] for name, of in steps.items()}
    reduce = [max(of_round) for of_round in measured["all_reduce_seconds"]]
    apart = Apart(median(seconds["share"]), _part(steps["share"], "backward_seconds"), median(reduce))
    by_round = [
        Apart(_total(share), share["backward_seconds"], each)
        for share, each in zip(steps["share"], reduce, strict=True)
    ]
    sent = {name: exchanged(divided, most, exchange) for name, exchange in EXCHANGES.items()}
    grads_bytes = sent["at_once"]["payload_bytes"]
    exchanges = {}
    for name, found in sent.items():
        low, high = (apart.step(found["payload_bytes"] / grads_bytes, hides=hides) for hides in (True, False))
        beside = _beside_formula([high if name == "at_once" else low, high], seconds[name])
        exchanges[name] = beside | _fraction(most, seconds[name], seconds["one"])
    names = {n: "one" if n == 1 else "buckets" if n == most else f"{n} ranks" for n in ranks}
    scaling = [
        _scaled(divided, n, seconds[name], seconds["one"]) | {"running": _running(steps[name])}
        for n, name in names.items()
    ]
    return {
        "device": device_name(measured["device"]),
        "processor": measured["device"],
        "torch": measured["device"]["torch"],
        "backend": measured["backend"],
        "cores": cores,
        "crowded": cores >= most and scaling[-1]["running"] < CROWDED,
        "rounds": measured["rounds"],
        "rounds_to_agree": rounds_to_agree(measured["rounds"]),
        "worst_spread": max(middle(each)["spread"] for each in seconds.values()),
        "job": {
            "layers": divided.layers,
            "hidden": divided.hidden_size,
            "parameters": grads_bytes // ITEMSIZE[PRECISION],
            "sequences": divided.sequences,
            "seq_len": divided.seq_len,
            "precision": PRECISION,
            "grads_bytes": grads_bytes,
        },
        "base_seconds": scaling[0]["median_seconds"],
        "apart": {
            "ranks": most,
            "share_seconds": apart.share,
            **{part: _part(steps["share"], part) for part in PARTS},
            "all_reduce_seconds": apart.all_reduce,
        },
        "scaling": scaling,
        "predicted": _predicted(exchanges["buckets"], by_round, seconds["buckets"], scaling[0]["median_seconds"], most),
        "parts": _parts(steps, seconds, most),
        "amdahl": _amdahl(scaling[-1]),
        "exchanges": [
            {
                "exchange": name,
                "bucket_cap_mb": EXCHANGES[name].bucket_cap_mb,
                "dtype": EXCHANGES[name].dtype,
                **sent[name],
                **found,
            }
            for name, found in exchanges.items()
        ],
        "effects": [
            {"effect": effect, "from": before, "to": after, **compare(seconds[before], seconds[after])}
            for effect, (before, after) in EFFECTS.items()
        ],
    }


def _amdahl(scaled: dict[str, Any]) -> dict[str, Any]:
    """The law continued with the serial fraction that was measured; nowhere, where that is not above 0."""
    fraction, (low, high) = scaled["serial_fraction"], scaled["serial_fraction_range"]
    return {
        "serial_fraction": fraction,
        "serial_fraction_range": [low, high],
        "noisy": high - low > WIDE * fraction,
        "limit": amdahl_limit(fraction),
        "gpus_at_half_efficiency": gpus_at_half_efficiency(fraction),
        "curve": [{"gpus": n, "speedup": amdahl_speedup(fraction, n)} for n in CONTINUED] if fraction > 0 else [],
    }


def _slowest(of_round: Sequence[dict[str, float]]) -> dict[str, float]:
    """The step of a round is that of the rank that took longest for it."""
    return max(of_round, key=_total)


def _total(step: dict[str, float]) -> float:
    return sum(step[part] for part in PARTS)


def _running(steps: Sequence[dict[str, float]]) -> float:
    """How much of its forward pass a rank had a core."""
    return min(1.0, median(step["forward_cpu_seconds"] / step["forward_seconds"] for step in steps))


def _part(steps: Sequence[dict[str, float]], part: str) -> float:
    return median(step[part] for step in steps)


def _scaled(divided: Divided, n: int, seconds: Sequence[float], one: Sequence[float]) -> dict[str, Any]:
    """N ranks beside one: speed-up and serial fraction of the medians, and where the rounds leave the latter."""
    found = {"ranks": n, "sequences_per_rank": divided.sequences // n, **middle(seconds)}
    speedup = median(one) / median(seconds)
    found |= {"speedup": speedup, "efficiency": speedup / n}
    return found | (_fraction(n, seconds, one) if n > 1 else {"serial_fraction": None, "serial_fraction_range": []})


def _fraction(n: int, seconds: Sequence[float], one: Sequence[float]) -> dict[str, Any]:
    found = karp_flatt(median(one) / median(seconds), n)
    by_round = [karp_flatt(whole / each, n) for whole, each in zip(one, seconds, strict=True)]
    return {"serial_fraction": found, "serial_fraction_range": likely(found, by_round)}


def _beside_formula(predicted_seconds: list[float], seconds: Sequence[float]) -> dict[str, Any]:
    """A step by the formula and as measured, and the difference: how far outside the formula's range it was measured,
    over the end that is nearer.
    """
    low, high = predicted_seconds
    found = middle(seconds)
    measured = found["median_seconds"]
    difference = max(measured / high - 1, 0.0) or min(measured / low - 1, 0.0)
    return {"predicted_seconds": predicted_seconds, **found, "difference": difference}


def _predicted(
    exchange: dict[str, Any], apart: Sequence[Apart], seconds: Sequence[float], one_seconds: float, n: int
) -> dict[str, Any]:
    """The formula's step of N ranks before they ran, as a serial fraction too; and what the run says of that range."""
    low, high = exchange["predicted_seconds"]
    difference = exchange["difference"]
    pairs = list(zip(apart, seconds, strict=True))
    above = sum(each.step(1.0, hides=False) < measured for each, measured in pairs)
    below = sum(each.step(1.0, hides=True) > measured for each, measured in pairs)
    if not difference:
        verdict, outside = "held", above + below
    elif difference > 0:
        verdict, outside = "slower", above
    else:
        verdict, outside = "faster", below
    if difference and outside < rounds_to_agree(len(seconds)):
        verdict = "noise"
    return {
        "seconds": [low, high],
        "serial_fraction": [karp_flatt(one_seconds / each, n) for each in (low, high)],
        "measured_seconds": exchange["median_seconds"],
        "difference": difference,
        "rounds_outside": outside,
        "verdict": verdict,
    }


def _parts(steps: dict[str, Any], seconds: dict[str, list[float]], n: int) -> dict[str, float]:
    """What the serial fraction is made of; the three add up to it.

    By Karp and Flatt s is t(N) - t(1)/N, over t(1) (1 - 1/N): the seconds of a step beyond an even share, and those are
    the optimizer's, which is not divided, what forward and backward of a share take beyond their Nth, and the rest.
    """
    optimizer = _part(steps["share"], "optimizer_seconds") - _part(steps["one"], "optimizer_seconds") / n
    share, one = median(seconds["share"]), median(seconds["one"])
    beyond = {
        "optimizer": optimizer,
        "small_pieces": share - one / n - optimizer,
        "exchange_and_contention": median(seconds["buckets"]) - share,
    }
    return {part: seconds_beyond / (one * (1 - 1 / n)) for part, seconds_beyond in beyond.items()}
