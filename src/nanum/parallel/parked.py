"""What layers save for their backward, kept in the host's memory meanwhile.

Of a stage that has all layers the last two keep theirs on the device: backward begins with them. Two ways:
- `layer ahead`: Transformer Engine's (cpu_offload.py at d0067d0: `DefaultOffloadSynchronizer`, of all layers but two).
  While a layer is at work forward, what the one before saved goes to the host, and is waited for and let go at its end;
  in backward what the one before needs comes up beside it.
- `as needed`: DeepSpeed's cpu_checkpointing (offload_activations.py, checkpointing.py), of the inputs that recompute
  keeps. They go down beside the layers that follow, that of the last but one too, though it stays as well; in backward
  a layer waits for its own to come up.
All that a layer saves goes, also what is too small for Transformer Engine (256 Ki elements).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from nanum.account.memory import peak
from nanum.blocks.body import Body
from nanum.parallel.places import Direction, Part, Place
from nanum.program import FROM_HOST, HOST_STREAM, TO_HOST, Held, Node, OnHost, Wait, host_copy

Parks = Literal["none", "layer ahead", "as needed"]
Follows = Callable[[Place, Direction], list[tuple[Part, Any]]]
TENSORS = {"layer ahead": 12, "as needed": 1}
"""Copies for each layer: the tensors that a dense layer saves, about, or its input."""


def saved_bytes(body: Body) -> Any:
    """Of what a body's forward pass leaves for its backward."""
    return peak(body.forward).net


def parked(
    parks: Parks, place: Place, direction: Direction, follows: Follows, saved: Callable[[int], Any], dtype: str
) -> tuple[list[Node], list[Node]]:
    """What happens at the beginning and at the end of a place's pass. `saved(kind)` are the bytes of a layer."""
    if parks == "none" or not isinstance(place.part, int):
        return [], []
    before = [(saved(part), presence) for part, presence in follows(place, "backward") if isinstance(part, int)]
    prior: Any = sum(size * presence for size, presence in before)
    after: Any = sum(presence for part, presence in follows(place, "forward") if isinstance(part, int))
    moved = prior * after  # none where this layer is the first, or the last
    copies = TENSORS[parks]

    def copied(kind: str, phase: Direction, size: Any, ticket: str) -> Node:
        return host_copy(kind, phase, "activations", dtype, copies * (size > 0), size, HOST_STREAM, ticket)

    gone, back = Held("activations", -moved), Held("activations", moved, "saved for backward")
    if parks == "layer ahead":
        if direction == "forward":
            down = copied(TO_HOST, "forward", moved, "saved")
            return [down, OnHost(moved, "saved activations")], [Wait(HOST_STREAM, "saved"), gone]
        up = copied(FROM_HOST, "backward", moved, "needed")
        return [Wait(HOST_STREAM, "needed"), back, up], [OnHost(-moved)]
    if direction == "forward":
        return [], [copied(TO_HOST, "forward", prior, "saved"), OnHost(prior, "saved activations"), gone]
    up = copied(FROM_HOST, "backward", moved, "needed")
    return [], [back, up, Wait(HOST_STREAM, "needed"), OnHost(-prior)]
