"""What each rank does right now, in memory that ranks share with the process that watches them; and whom they wait for.

A rank cannot say why it hangs, nor what it did when it was killed: what it wrote before is read from outside.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SLOT_BYTES = 16384  # of one rank: its last beat's number, and two places, so that one is whole while one is written
NUMBER = struct.Struct("<Q")
HEADER = struct.Struct("<dI")  # seconds of the monotonic clock, and bytes to read
PLACE_BYTES = (SLOT_BYTES - NUMBER.size) // 2
LONGEST_TEXT = 400  # characters


@dataclass(frozen=True, slots=True)
class Beat:
    """A rank's last sign of life.

    `group` are the ranks that its operation is done with, in the order that names it, and `done_with` counts the beats
    by group.
    """

    number: int
    monotonic_seconds: float
    text: str = ""
    group: tuple[int, ...] = ()
    done_with: Mapping[str, int] = field(default_factory=dict)


class Board:
    """A slot for each of `ranks`. Made before they fork; the memory goes with the last of them."""

    def __init__(self, ranks: int) -> None:
        self._memory = mmap.mmap(-1, ranks * SLOT_BYTES)
        for rank in range(ranks):
            Pulse(self._memory, rank).beat("")

    def pulse(self, rank: int) -> Pulse:
        return Pulse(self._memory, rank)

    def read(self, rank: int) -> Beat:
        slot = rank * SLOT_BYTES
        while True:
            (number,) = NUMBER.unpack_from(self._memory, slot)
            place = _place(slot, number)
            when, length = HEADER.unpack_from(self._memory, place)
            raw = self._memory[place + HEADER.size : place + HEADER.size + length]
            if NUMBER.unpack_from(self._memory, slot) == (number,):  # else it may have been written meanwhile
                said = json.loads(raw)
                return Beat(number, when, said["text"], tuple(said["group"]), said["done_with"])


class Pulse:
    """One rank's slot, for that rank to write. `relay` is a file descriptor that progress is written to, if any."""

    def __init__(self, memory: mmap.mmap, rank: int) -> None:
        self.relay: int | None = None
        self._memory, self._slot = memory, rank * SLOT_BYTES
        (self._number,) = NUMBER.unpack_from(memory, self._slot)
        self._done_with: dict[str, int] = {}

    def beat(self, text: str, group: Sequence[int] = ()) -> None:
        """Say what the rank is about to do: `all_reduce over dp_shard, 41,088 bytes, step 2, backward`.

        Beat before each exchange and at each phase between; it costs some 10 microseconds. Ranks that never beat are
        taken to hang.

        Where the operation is an exchange, `group` are the ranks that take part, by their numbers in the world and in
        one order for all of them: `(source, destination)` for a send and for its receive, a group's own order for a
        collective. Who is behind whom is then known, whatever each rank does besides (a pipeline's stages differ);
        without it, the rank with the fewest beats is taken to be behind.
        """
        if group:
            key = _key(group)
            self._done_with[key] = self._done_with.get(key, 0) + 1
        said = {"text": text[:LONGEST_TEXT], "group": list(group), "done_with": self._done_with}
        raw = json.dumps(said).encode()
        if HEADER.size + len(raw) > PLACE_BYTES:  # hundreds of groups: only the text is kept
            raw = json.dumps(said | {"group": [], "done_with": {}}).encode()
        self._number += 1
        place = _place(self._slot, self._number)
        HEADER.pack_into(self._memory, place, time.monotonic(), len(raw))
        self._memory[place + HEADER.size : place + HEADER.size + len(raw)] = raw
        NUMBER.pack_into(self._memory, self._slot, self._number)

    def progress(self, done: int, total: int, what: str = "") -> None:
        """Say how far the run is, to whoever asked for it (`nanum.processes`). For one rank to do; no sign of life."""
        if self.relay is not None:
            os.write(self.relay, f"progress {done} {total} {what}".rstrip().encode() + b"\n")


def _place(slot: int, number: int) -> int:
    return slot + NUMBER.size + number % 2 * PLACE_BYTES


def _key(group: Sequence[int]) -> str:
    return ",".join(map(str, group))


def behind(rank: int, beats: Mapping[int, Beat]) -> list[int]:
    """The ranks that `rank` waits for, the furthest behind first: they came to its last exchange less often than it."""
    last = beats[rank]
    key = _key(last.group)
    there = [other for other in last.group if other in beats]
    others = [other for other in there if beats[other].done_with.get(key, 0) < last.done_with.get(key, 0)]
    return sorted(others, key=lambda other: (beats[other].done_with.get(key, 0), beats[other].number))


def laggard(beats: Mapping[int, Beat]) -> int:
    """The rank that the others wait for, of those that do not move.

    From each rank on to the one that it waits for, until one waits for nobody: where most of these walks end. Ranks
    that wait for each other in a circle, and those that tell no groups, are told apart by who has beaten least, then
    longest ago.
    """

    def least(ranks: Sequence[int]) -> int:
        return min(ranks, key=lambda rank: (beats[rank].number, beats[rank].monotonic_seconds))

    ends: Counter[int] = Counter()
    for rank in beats:
        walk = [rank]
        while (waits_for := behind(walk[-1], beats)) and waits_for[0] not in walk:
            walk.append(waits_for[0])
        ends[least(walk[walk.index(waits_for[0]) :]) if waits_for else walk[-1]] += 1
    most = max(ends.values())
    return least([rank for rank, count in ends.items() if count == most])
