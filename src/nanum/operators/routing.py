"""How many places a token's experts are at, where routers choose all experts alike."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from math import comb
from typing import Any

import numpy as np


def places_reached(experts: int, choices: int, groups: int, group_topk: int, places: Any) -> Any:
    """Expected number of `places` (equal runs of `experts`: ranks, or nodes; an int, or an array over layouts) that
    have one of a token's `choices`. These are drawn from `group_topk` of `groups` equal runs of experts, which are
    drawn first; all draws of either are as likely. One group is no limit.

    With one group it is N (1 - C(E - E/N, k) / C(E, k)) for N places (the hypergeometric chance of none, at each).
    """
    if isinstance(places, np.ndarray):
        found, at = np.unique(places, return_inverse=True)
        return np.array([_reached(experts, choices, groups, group_topk, int(n)) for n in found])[at]
    return _reached(experts, choices, groups, group_topk, int(places))


@lru_cache(maxsize=4096)
def _reached(experts: int, choices: int, groups: int, group_topk: int, places: int) -> float:
    """By linearity the sum of the chances of each place."""
    if experts % places or experts % groups or group_topk * (experts // groups) < choices:
        return float(places)  # refused elsewhere
    each, group = experts // places, experts // groups
    drawn = group_topk * group
    total = Fraction(0)
    for begin in range(0, experts, each):
        parts = [_overlap(begin, begin + each, i * group, (i + 1) * group) for i in range(groups)]
        touched = [part for part in parts if part]
        for chosen, inside, ways in _draws(touched, group_topk):
            of_others = comb(groups - len(touched), group_topk - chosen)
            chance = Fraction(ways * of_others, comb(groups, group_topk))
            total += chance * (1 - Fraction(comb(drawn - inside, choices), comb(drawn, choices)))
    return float(total)


def _overlap(begin: int, end: int, first: int, last: int) -> int:
    return max(0, min(end, last) - max(begin, first))


def _draws(touched: list[int], most: int) -> list[tuple[int, int, int]]:
    """Of the groups that a place has a part of: how many are drawn, the experts of the place in them, and the ways."""
    ways = {(0, 0): 1}
    for part in touched:
        for (chosen, inside), count in list(ways.items()):
            if chosen < most:
                key = chosen + 1, inside + part
                ways[key] = ways.get(key, 0) + count
    return [(chosen, inside, count) for (chosen, inside), count in ways.items()]
