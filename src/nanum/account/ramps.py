"""How messages fill a link inside a node: an all-reduce over its latency and bandwidth alone, by size and by ranks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nanum.cluster import Ramp
from nanum.cluster.measured import Sweep
from nanum.collectives import ring_steps, wire_bytes
from nanum.program import Quantity

Curve = tuple[np.ndarray, np.ndarray]
"""Natural logarithms of a call's bytes, ascending, and of a ratio of seconds at each."""


def excess(ramp: Ramp) -> Mapping[int, Curve]:
    """By ranks, seconds over those of a ring whose latency and bandwidth are what the ramp's smallest and largest
    message show. Between the sizes of a finer sweep that one holds, beyond them this one.
    """
    hop, each_byte = _alpha_beta(ramp)
    whole = _over(ramp, hop, each_byte)
    curves = {ramp.ranks: whole}
    for finer in ramp.finer:
        fine = _over(finer, hop, each_byte)
        below, above = whole[0] < fine[0][0], whole[0] > fine[0][-1]
        curves[finer.ranks] = _joined(whole, below, fine, above)
    return dict(sorted(curves.items()))


def _joined(whole: Curve, below: np.ndarray, fine: Curve, above: np.ndarray) -> Curve:
    sizes, ratios = (np.concatenate([w[below], f, w[above]]) for w, f in zip(whole, fine, strict=True))
    return sizes, ratios


def at(curves: Mapping[int, Curve], bytes_of_call: Quantity, size: Quantity) -> Quantity:
    """The ratio of a call in a group of `size` ranks: its logarithm is linear in those of bytes and of ranks, and as at
    the nearest edge beyond them.
    """
    bytes_of_call = np.log(np.maximum(bytes_of_call, 1))
    logs = {ranks: np.interp(bytes_of_call, *curve) for ranks, curve in curves.items()}
    smallest, *others = logs
    total, below = logs[smallest], smallest
    for ranks in others:
        share = np.clip(np.log(np.maximum(size, 1) / below) / np.log(ranks / below), 0.0, 1.0)
        total = total + share * (logs[ranks] - logs[below])
        below = ranks
    return np.exp(total)


def _alpha_beta(sweep: Sweep) -> tuple[float, float]:
    """Seconds of a hop and of a byte on the wire."""
    smallest, largest = sweep.payload_bytes[0], sweep.payload_bytes[-1]
    each_byte = sweep.seconds[-1] / float(wire_bytes("all_reduce", largest, sweep.ranks))
    latency = sweep.seconds[0] - each_byte * float(wire_bytes("all_reduce", smallest, sweep.ranks))
    return latency / ring_steps("all_reduce", sweep.ranks), each_byte


def _over(sweep: Sweep, hop: float, each_byte: float) -> Curve:
    sizes = np.array(sweep.payload_bytes)
    ring = ring_steps("all_reduce", sweep.ranks) * hop + each_byte * wire_bytes("all_reduce", sizes, sweep.ranks)
    return np.log(sizes), np.log(np.array(sweep.seconds) / ring)
