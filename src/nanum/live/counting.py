"""Every exchange of a rank, counted where PyTorch hands it over: a process group around gloo's (or NCCL's) own.

DDP's C++ reducer, FSDP2, DTensor and pipelining all call it. A payload is counted by the convention of nccl-tests: the
whole buffer of a gather or a scatter, the input of everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from nanum.live.settling import settle

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "int64"}
BACKEND = "counted"


@dataclass
class Ledger:
    """Counts while `counting`. While `settling`, an exchange has ended, and the thread that did it has let go of its
    tensors, before the caller goes on: else that thread may be the last to hold them, and the profiler does not see
    what another thread frees. `phase` says what the rank is at; `directions` that of a tensor to send, by address.
    """

    mesh: Mapping[str, int]
    tell: Callable[[str, Sequence[int]], None] = lambda text, group: None
    counting: bool = False
    settling: bool = False
    phase: str = "setup"
    directions: dict[int, str] = field(default_factory=dict)
    rows: dict[tuple[str, str, str, str, int], list[int]] = field(default_factory=dict)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def add(
        self, ranks: Sequence[int], kind: str, tensors: Any, whole: Any = None, between: Sequence[int] | None = None
    ) -> None:
        """Tell that an exchange begins, and count it: `whole` is the buffer that its payload is, where not its input;
        `between` its source and destination, where it is not of the whole group.
        """
        tensors = _flat(tensors)
        payload = sum(t.numel() * t.element_size() for t in (_flat(whole) if whole is not None else tensors))
        axis = axis_of(ranks, self.mesh)
        phase = self.phase
        if kind == "send" and tensors:
            phase = self.directions.get(tensors[0].data_ptr(), phase)
        self.tell(
            f"{kind} over {axis or 'one rank'}, {payload:,} bytes, {phase}", ranks if between is None else between
        )
        if not self.counting or kind in ("recv", "barrier"):
            return
        dtype = NAMES.get(tensors[0].dtype, str(tensors[0].dtype).removeprefix("torch.")) if tensors else "none"
        row = self.rows.setdefault((axis, kind, phase, dtype, len(ranks)), [0, 0])
        row[0] += 1
        row[1] += payload


def axis_of(ranks: Sequence[int], mesh: Mapping[str, int]) -> str:
    """The mesh axes along which a group's ranks differ, outermost first."""
    places = list(product(*(range(size) for size in mesh.values())))
    differ = (len({places[rank][i] for rank in ranks}) > 1 for i in range(len(mesh)))
    return "+".join(axis for axis, does in zip(mesh, differ, strict=True) if does)


def _flat(tensors: Any) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [t for part in tensors for t in _flat(part)]


def counted_backend(ledger: Ledger, device: str) -> str:
    """Register the counting group for `device` ("cpu" over gloo, "cuda" over NCCL); its name is the backend to ask."""

    def create(options: Any, _: Any) -> Counted:
        return Counted(ledger, device, options)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=[device])
    return BACKEND


class Counted(dist.ProcessGroup):
    """A group that hands everything on to a real one, and writes it down first."""

    def __init__(self, ledger: Ledger, device: str, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        self._rank, self._size, self._ledger = rank, size, ledger
        self._ranks = tuple(options.global_ranks_in_group or range(size))
        self._names = {"name": "", "desc": ""}
        inner = dist.ProcessGroup(options.store, rank, size)
        if device == "cuda":
            from torch.distributed import ProcessGroupNCCL

            self._backend = ProcessGroupNCCL(options.store, rank, size)
            kind = dist.ProcessGroup.BackendType.NCCL
        else:
            from torch.distributed import ProcessGroupGloo

            self._backend = ProcessGroupGloo(options.store, rank, size, options.timeout)
            kind = dist.ProcessGroup.BackendType.GLOO
        self._backend._set_sequence_number_for_group()
        self._device = torch.device(device)
        inner._register_backend(self._device, kind, self._backend)
        inner._set_default_backend(kind)
        inner._set_group_desc("counted")
        self._inner = inner

    # --- who it is --------------------------------------------------------------------------------------------------
    def getBackendName(self) -> str:
        return BACKEND

    def name(self) -> str:
        return BACKEND

    def rank(self) -> int:
        return int(self._rank)

    def size(self) -> int:
        return int(self._size)

    getRank, getSize = rank, size

    def setGroupName(self, name: str) -> None:
        self._names["name"] = name

    def getGroupName(self) -> str:
        return self._names["name"]

    def setGroupDesc(self, desc: str) -> None:
        self._names["desc"] = desc

    def getGroupDesc(self) -> str:
        return self._names["desc"]

    def _set_group_name(self, name: str) -> None:
        self._names["name"] = name
        self._inner._set_group_name(name + " inner")

    @property
    def group_name(self) -> str:
        return self._names["name"]

    def _set_group_desc(self, desc: str) -> None:
        self._names["desc"] = desc

    @property
    def group_desc(self) -> str:
        return self._names["desc"]

    def _get_backend(self, device: Any) -> Any:
        return self._backend

    @property
    def _device_types(self) -> list[Any]:
        return [self._device]

    def _get_backend_name(self) -> str:
        return BACKEND

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def _done(self, work: Any) -> Any:
        if self._ledger.settling and work is not None:
            work.wait()
            settle()
        return work

    # --- what it does -----------------------------------------------------------------------------------------------
    def _count(self, kind: str, tensors: Any, whole: Any = None, between: Sequence[int] | None = None) -> None:
        self._ledger.add(self._ranks, kind, tensors, whole, between)

    def allreduce(self, tensors: Any, *options: Any) -> Any:
        self._count("all_reduce", tensors)
        return self._done(self._inner.allreduce(tensors, *_given(options)))

    def allreduce_coalesced(self, tensors: Any, *options: Any) -> Any:
        self._count("all_reduce", tensors)
        return self._done(self._inner.allreduce_coalesced(tensors, *_given(options)))

    def broadcast(self, tensors: Any, *options: Any) -> Any:
        self._count("broadcast", tensors)
        return self._done(self._inner.broadcast(tensors, *_given(options)))

    def allgather(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        self._count("all_gather", inputs, outputs)
        return self._done(self._inner.allgather(outputs, inputs, *_given(options)))

    def all_gather_single(self, output: Any, input: Any, *options: Any) -> Any:
        self._count("all_gather", input, output)
        return self._done(self._inner.all_gather_single(output, input, *_given(options)))

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        self._count("all_gather", inputs, outputs)
        return self._done(self._inner.all_gather_single_coalesced(outputs, inputs, *_given(options)))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        self._count("reduce_scatter", inputs)
        return self._done(self._inner.reduce_scatter(outputs, inputs, *_given(options)))

    def reduce_scatter_single(self, output: Any, input: Any, *options: Any) -> Any:
        self._count("reduce_scatter", input)
        return self._done(self._inner.reduce_scatter_single(output, input, *_given(options)))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        self._count("reduce_scatter", inputs)
        return self._done(self._inner.reduce_scatter_single_coalesced(outputs, inputs, *_given(options)))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(self, output: Any, input: Any, out_sizes: Any, in_sizes: Any, *options: Any) -> Any:
        passed_on = len([size for size in in_sizes or () if size]) == 1  # all of it goes to one rank
        self._count("permute" if passed_on else "all_to_all", input)
        return self._done(self._inner.all_to_all_single(output, input, out_sizes, in_sizes, *_given(options)))

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        self._count("all_to_all", inputs)
        return self._done(self._inner.alltoall(outputs, inputs, *_given(options)))

    def reduce(self, tensors: Any, *options: Any) -> Any:
        self._count("reduce", tensors)
        return self._done(self._inner.reduce(tensors, *_given(options)))

    def gather(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        self._count("gather", inputs)
        return self._done(self._inner.gather(outputs, inputs, *_given(options)))

    def scatter(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        self._count("scatter", inputs)
        return self._done(self._inner.scatter(outputs, inputs, *_given(options)))

    def send(self, tensors: Any, to: int, tag: int) -> Any:
        self._count("send", tensors, None, (self._ranks[self._rank], self._ranks[to]))
        return self._inner.send(tensors, to, tag)

    def recv(self, tensors: Any, source: int, tag: int) -> Any:
        self._count("recv", tensors, None, (self._ranks[source], self._ranks[self._rank]))
        return self._inner.recv(tensors, source, tag)

    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        self._count("recv", tensors)
        return self._inner.recv_anysource(tensors, tag)

    def barrier(self, opts: Any = None) -> Any:
        self._count("barrier", ())
        return self._inner.barrier(*_given((opts,)))

    def monitored_barrier(self, *arguments: Any, **named: Any) -> Any:
        return self._inner.monitored_barrier(*arguments, **named)


def _given(options: tuple[Any, ...]) -> tuple[Any, ...]:
    """PyTorch passes None for options that were left out, and its own group takes none instead."""
    return tuple(option for option in options if option is not None)
