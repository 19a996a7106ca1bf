"""Every allocation of a rank's tensors, as PyTorch's own profiler sees it: what is held when, and the most of it.

On a CPU the allocator reports each block that it hands out and takes back while a profiler runs, resized storages and
kernels' workspaces among them; so it must run from before the model is made. Those of oneDNN's products depend on the
CPU (with AMX, packed copies of operands), and no engine has them on a GPU: products are PyTorch's own here. On CUDA the
allocator counts by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

MARK = "nanum: "


@dataclass
class Allocations:
    """Bytes held at each mark, and the most that was held since the mark before it."""

    at: dict[str, int] = field(default_factory=dict)
    peak_before: dict[str, int] = field(default_factory=dict)
    peak_during: dict[str, str] = field(default_factory=dict)  # the operation that allocated the most's last block

    def mark(self, name: str) -> None:
        with record_function(MARK + name):
            pass


@contextmanager
def own_products() -> Iterator[None]:
    """Until the end of the block, no product is oneDNN's."""
    before, *_ = torch.backends.mkldnn.set_flags(_enabled=False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=before)


@contextmanager
def allocations() -> Iterator[Allocations]:
    """Record until the end of the block; the answer is filled in then."""
    found = Allocations()
    with own_products(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        yield found
    held = peak = 0
    operation = ""
    for event, inside in _in_order(profiled.profiler.kineto_results.experimental_event_tree()):
        if event.name == "[memory]":
            held = event.extra_fields.total_allocated  # blocks that other threads took or gave back among them
            if held > peak:
                peak, operation = held, inside
        elif event.name.startswith(MARK):
            name = event.name.removeprefix(MARK)
            found.at[name], found.peak_before[name], found.peak_during[name] = held, peak, operation
            peak, operation = held, ""


def _in_order(events: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    """Every event by its beginning, with the outermost operation that it happened in."""
    flat: list[tuple[int, int, Any, str]] = []
    waiting = [(event, "") for event in events]
    while waiting:
        event, inside = waiting.pop()
        flat.append((event.start_time_ns, len(flat), event, inside))
        # Named by the outermost operation: of autograd's nodes, by the node.
        name = inside or event.name.removeprefix("autograd::engine::evaluate_function: ")
        waiting += [(child, name) for child in event.children]
    for _, _, event, inside in sorted(flat, key=lambda entry: entry[:2]):
        yield event, inside


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages under these tensors, of this rank: a view or a tied weight is counted once."""
    storages = (local(tensor).untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a distributed tensor, as it is held."""
    held = getattr(tensor, "_local_tensor", tensor)
    return held if isinstance(held, torch.Tensor) else tensor
