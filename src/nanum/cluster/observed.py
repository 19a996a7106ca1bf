"""The [in_a_step] table of a cluster file: what steps that were observed on the machine say of its coefficients.

    [in_a_step]                      # what a matmul, … does in a step over what it does alone, and a launch's seconds;
                                     # what is left out is as shipped (`data/measured/fitted.toml`)
    matmul = { value = 0.85, tag = "derived", source = "observed: …" }
    host_seconds = { value = 2.9e-05, unit = "s", tag = "derived", source = "…" }

    [in_a_step.covariance]           # of their natural logarithms, for further observations to go on from; columns are
    matmul = [0.0031, 0.0]           # in the order of the rows; what has no row is as unsure as any machine's
    host_seconds = [0.0, 0.0019]

    [[in_a_step.observation]]        # a step that was observed; what the range of predictions rests on
    model = "llama-3.1-70b"
    engine = "megatron"
    precision = "bf16"
    layout = "dp_shard 8 · tp 8"     # in words, for people
    seconds = 3.2
    predicted_seconds = 3.6          # as it was before
    doubts = []                      # why it may not be such a step: said again wherever the file is used

`nanum predict … --observed 3.2s -o FILE.toml` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanum.cluster.in_a_step import LIMITS, NAMES, PHYSICAL, InAStep, Observation
from nanum.cluster.quantity import Quantity
from nanum.cluster.tables import quantity, said
from nanum.units import Dimension

Table = Mapping[str, Any]

MOST_VARIANCE = 25.0
"""Of a logarithm: beyond e to the fifth, either way, nothing is known."""


def coefficient(name: str, raw: Any, where: str) -> Quantity:
    """A coefficient's number. Raises ValueError saying what is wrong with it."""
    least, most = LIMITS[name]

    def in_range(value: float, dimension: Dimension, said: str) -> float:
        if not least <= value <= most:
            why = ": nothing is faster in a step than alone" if most == PHYSICAL and value > most else ""
            raise ValueError(f"{value:g} is not from {least:g} to {most:g}{why}")
        return value

    return quantity(raw, "seconds" if name.endswith("_seconds") else "ratio", where, in_range)


def in_a_step(table: Table | None, where: str) -> InAStep | None:
    """What a file's [in_a_step] table says, known to be good."""
    if table is None:
        return None
    rows = table.get("covariance", {})
    return InAStep(
        tuple((name, coefficient(name, table[name], where)) for name in NAMES if name in table),
        tuple(rows),
        tuple(tuple(map(float, row)) for row in rows.values()),
        tuple(
            Observation(
                **{key: each[key] for key in ("model", "engine", "precision", "layout")},
                seconds=float(each["seconds"]),
                predicted_seconds=float(each["predicted_seconds"]),
                doubts=tuple(each.get("doubts", ())),
            )
            for each in table.get("observation", ())
        ),
    )


def wrong_with_covariance(rows: Any) -> str | None:
    """What keeps named rows of numbers from being a covariance; None where nothing does."""
    if not isinstance(rows, dict):
        return f"covariance = {said(rows)} is not a table of rows, one for each coefficient (matmul = [0.003])"
    if unknown := [name for name in rows if name not in LIMITS]:
        return f"covariance: no coefficient {said(unknown[0])} (there are {', '.join(NAMES)})"
    for name, row in rows.items():
        if not isinstance(row, list) or len(row) != len(rows) or not all(map(_is_number, row)):
            as_many = "a list of one number" if len(rows) == 1 else f"a list of {len(rows)} numbers"
            return f"covariance.{name} = {said(row)} is not {as_many}, one for each row of the table"
    from numpy import array, linalg

    found = array([*rows.values()], dtype=float)
    if not rows:
        return None
    if abs(found - found.T).max() > 1e-9 * abs(found).max():
        return "covariance is not symmetric"
    if not (found.diagonal().min() > 0 and found.diagonal().max() <= MOST_VARIANCE):
        return f"covariance: a variance is not above 0 and at most {MOST_VARIANCE:g}"
    if linalg.eigvalsh(found).min() < -1e-9 * found.diagonal().max():
        return "covariance is none: some mixture of the coefficients has a variance below 0"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
