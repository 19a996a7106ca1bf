"""A real run beside what was expected of it: rows and bytes, equal or not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanum.verify.expected import Counted, Expected, Ledger, RowKey
from nanum.verify.gloo import ALGORITHM, HEADER_BYTES, messages, received_bytes

TOLERANCE = {"fp32": 1e-4, "bf16": 0.06}
"""Of a gradient's difference over its own length, and of the first loss: what sums taken in another order differ by."""
LATER_TOLERANCE = {"fp32": 1e-3, "bf16": 0.02}
"""Of a later loss: AdamW divides small gradients by themselves, and so their differences too."""
CHANGE_TOLERANCE = 0.1
"""Of how far the loss has come since the first step, which training without an optimizer would not."""
PEAK_TOLERANCE = 0.005
WIRE_TOLERANCE = 0.01
EXACT = ("params", "grads", "optimizer_states", "saved")


@dataclass(frozen=True)
class Check:
    """`ok` is None where it could not be checked."""

    name: str
    ok: bool | None
    detail: str

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "ok": self.ok, "detail": self.detail}


@dataclass(frozen=True)
class Row:
    """One line of a rank's ledger, predicted beside counted; 0 where one side has no such row."""

    rank: int
    key: RowKey
    predicted: Counted
    counted: Counted

    @property
    def ok(self) -> bool:
        return self.predicted == self.counted

    def to_dict(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            **self.key._asdict(),
            "ok": self.ok,
            "predicted_calls": self.predicted.calls,
            "counted_calls": self.counted.calls,
            "predicted_payload_bytes": self.predicted.payload_bytes,
            "counted_payload_bytes": self.counted.payload_bytes,
        }


@dataclass(frozen=True)
class Held:
    """Bytes of a category on a rank, predicted beside counted."""

    rank: int
    category: str
    predicted: int
    counted: int

    @property
    def ok(self) -> bool:
        if self.category in EXACT:
            return self.predicted == self.counted
        return abs(self.predicted - self.counted) <= PEAK_TOLERANCE * self.counted

    def to_dict(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "category": self.category,
            "ok": self.ok,
            "predicted_bytes": self.predicted,
            "counted_bytes": self.counted,
        }


Answer = Mapping[str, Any]
"""What a rank said of its run: `live.worker`."""


def rows(answer: Answer, predicted: Ledger) -> list[Row]:
    counted = {RowKey(*line[:5]): Counted(*line[5:]) for line in answer["exchanges"]}
    none = Counted(0, 0)
    keys = sorted({*predicted, *counted})
    return [Row(answer["rank"], key, predicted.get(key, none), counted.get(key, none)) for key in keys]


def held(answer: Answer, predicted: Mapping[str, int]) -> list[Held]:
    found = answer["memory"]
    counted = {name: found[name] for name in ("params", "grads", "optimizer_states")}
    if "saved" in predicted:
        counted["saved"] = found["after_forward"] - found["before"]
    counted["allocated_peak"] = found["peak"]
    return [Held(answer["rank"], name, predicted[name], size) for name, size in counted.items()]


def loss(answers: Sequence[Answer], precision: str) -> Check:
    """Of every step, over all micro-batches and ranks that have one, beside the single process's."""
    alone = answers[0]["reference_losses"]
    mine = [[value for answer in answers for value in answer["losses"][step]] for step in range(len(alone))]
    found = [sum(values) / len(values) for values in mine]
    apart = [abs(value - expected) / abs(expected) for value, expected in zip(found, alone, strict=True)]
    within = [error <= (LATER_TOLERANCE if step else TOLERANCE)[precision] for step, error in enumerate(apart)]
    came, expected_to = found[-1] - found[0], alone[-1] - alone[0]
    within.append(abs(came - expected_to) <= CHANGE_TOLERANCE * abs(expected_to))
    ends = (0, len(alone) - 1)
    said = (f"step {i} {found[i]:.6f} ({alone[i]:.6f} in one process, {apart[i]:.0e} apart)" for i in ends)
    return Check("loss", all(within), ", ".join(said))


def gradients(answers: Sequence[Answer], precision: str) -> Check:
    """|g - g0| / |g0| of every parameter, where a stage's first rank compares them; the others have the same, by their
    length and a weighted sum.
    """
    differs: dict[str, float] = {}
    for answer in answers:
        for name, error in answer["gradients"].items():
            differs[name] = max(error, differs.get(name, 0.0), key=_nan_is_worst)
    parameters, most = answers[0]["parameters"], TOLERANCE[precision]
    if not differs:
        return Check("gradients", False, f"none of {len(parameters)} parameters has one")
    missing = sorted(set(parameters) - set(differs))
    worst = max(differs, key=lambda name: _nan_is_worst(differs[name]))
    unlike = _unlike(answers, most)
    detail = f"{len(differs)} parameters, at most {differs[worst]:.1e} apart ({worst}; allowed {most:g})"
    if missing:
        detail = f"without a gradient: {', '.join(missing)}; {detail}"
    if unlike:
        detail = f"ranks of one stage differ: {', '.join(unlike[:4])}; {detail}"
    return Check("gradients", not missing and not unlike and differs[worst] <= most, detail)


def _nan_is_worst(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _unlike(answers: Sequence[Answer], most: float) -> list[str]:
    """Parameters whose gradient is not the same on every rank of a stage."""
    first: dict[str, Sequence[float]] = {}
    found = []
    for answer in answers:
        for name, trace in answer["traces"].items():
            expected = first.setdefault(name, trace)
            room = most * max(abs(expected[0]), 1e-6)
            if not all(abs(a - b) <= room for a, b in zip(trace, expected, strict=True)):
                found.append(f"{name} on rank {answer['rank']}")
    return found


def communication(found: Sequence[Row]) -> Check:
    wrong = [row for row in found if not row.ok]
    calls = sum(row.counted.calls for row in found)
    detail = f"{len(found)} rows, {calls:,} calls: " + (f"{len(wrong)} rows differ" if wrong else "equal in every byte")
    return Check("communication", not wrong, detail)


def memory(found: Sequence[Held]) -> Check:
    wrong = [each for each in found if not each.ok]
    exact = [each for each in found if each.category in EXACT]
    peaks = [each for each in found if each.category == "allocated_peak"]
    equal = sum(each.predicted == each.counted for each in exact)
    furthest = max((each.predicted / each.counted - 1 for each in peaks), key=abs)
    detail = (
        f"{equal} of {len(exact)} equal to the byte; peaks at most {furthest:+.2%} apart (allowed {PEAK_TOLERANCE:.1%})"
    )
    return Check("memory", not wrong, detail)


def wire(answers: Sequence[Answer], predicted: Sequence[Expected]) -> Check:
    """What the kernel says came in over all sockets of a rank; of all ranks together where they receive differently."""
    if any(answer["received_bytes"] is None for answer in answers):
        return Check("wire", None, "this system does not tell what came through a socket: not checked")
    pairs = []
    for answer, of in zip(answers, predicted, strict=True):
        parts = [(key.kind, row, key.group_size) for key, row in of.ledger.items()]
        least = sum(received_bytes(kind, row.payload_bytes, size) for kind, row, size in parts)
        room = sum(messages(kind, row.calls, size) for kind, row, size in parts) * HEADER_BYTES
        pairs.append((answer["received_bytes"], least, room))
    if any(key.kind in ("send", "broadcast") for of in predicted for key in of.ledger):
        pairs = [tuple(map(sum, zip(*pairs, strict=True)))]  # type: ignore[list-item]
    ok = all(abs(came - least) <= WIRE_TOLERANCE * least + room for came, least, room in pairs)
    came, least = (sum(pair[i] for pair in pairs) for i in (0, 1))
    detail = f"{came:,} bytes came in, {least:,.0f} predicted ({ALGORITHM})"
    return Check("wire", ok, detail)


def schedule(answers: Sequence[Answer], orders: Sequence[Sequence[str]]) -> Check:
    """What each pipeline rank did, in order, beside the order that memory and time are read from."""
    for answer, order in zip(answers, orders, strict=True):
        did = list(answer["did"])
        if did != list(order):
            i = next((i for i, (a, b) in enumerate(zip(did, order, strict=False)) if a != b), min(len(did), len(order)))
            here = f"{' '.join(did[i : i + 4])}, predicted {' '.join(order[i : i + 4])}"
            return Check("schedule", False, f"rank {answer['rank']} differs from action {i} on: did {here}")
    return Check("schedule", True, f"{sum(map(len, orders)):,} actions in the predicted order")
