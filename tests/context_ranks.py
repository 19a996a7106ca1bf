"""Ranks that run attention over a split sequence, beside one process that has it whole: `context_ranks.py RANKS…`.

Prints, for each number of ranks and kind, the largest error on any rank of the output and of the gradients of q, k and
v; and of each rank the bytes that it saved for backward and what it exchanged: `[collective, dtype, calls, payload
bytes]` (of a gather or a scatter the whole buffer).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nanum.live.context import context_attention

BATCH, HEADS, KEY_VALUE_HEADS, ROWS, HEAD_DIM = 2, 8, 4, 64, 16
KINDS = ("ulysses", "allgather", "ring", "ring_alltoall")
NAMES = {"alltoall": "all_to_all", "all_to_all": "all_to_all", "allgather": "all_gather", "all_gather": "all_gather"}
NAMES |= {"reduce_scatter": "reduce_scatter"}


class Exchanged(TorchDispatchMode):
    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.rows = ranks, defaultdict(lambda: [0, 0])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1].strip("_")
        kind = next((kind for start, kind in NAMES.items() if name.startswith(start)), None)
        if func.namespace in ("c10d", "_c10d_functional") and kind:
            given = args[1] if func.namespace == "c10d" else args[0]  # in place: the output is named first
            payload = given.numel() * given.element_size() * (self.ranks if kind == "all_gather" else 1)
            row = self.rows[kind, str(given.dtype).removeprefix("torch.")]
            row[0], row[1] = row[0] + 1, row[1] + payload
        return out


def operands() -> list[torch.Tensor]:
    torch.manual_seed(0)
    heads = (HEADS, KEY_VALUE_HEADS, KEY_VALUE_HEADS)
    return [torch.randn(BATCH, n, ROWS, HEAD_DIM, requires_grad=True) for n in heads]


def alone() -> list[torch.Tensor]:
    q, k, v = operands()
    served = HEADS // KEY_VALUE_HEADS
    out = F.scaled_dot_product_attention(q, *(t.repeat_interleave(served, 1) for t in (k, v)), is_causal=True)
    (out * torch.arange(ROWS).view(-1, 1)).square().sum().sqrt().backward()
    return [out, q.grad, k.grad, v.grad]


def rank_main(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    whole = alone()
    mine = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    scale = (whole[0] * torch.arange(ROWS).view(-1, 1)).square().sum().sqrt().detach()
    answer: dict[str, Any] = {}
    for kind in KINDS:
        q, k, v = (t.detach()[:, :, mine].clone().requires_grad_() for t in operands())
        saved: dict[int, int] = {}

        def pack(t: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with Exchanged(ranks) as exchanged:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                out = context_attention(kind, dist.group.WORLD)(q, k, v)
            ((out * torch.arange(ROWS)[mine].view(-1, 1)).square().sum() / (2 * scale)).backward()
        errors = torch.tensor(
            [(x - y[:, :, mine]).abs().max().item() for x, y in zip((out, q.grad, k.grad, v.grad), whole, strict=True)]
        )
        dist.all_reduce(errors, dist.ReduceOp.MAX)
        rows = sorted([*key, *row] for key, row in exchanged.rows.items())
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, {"rows": rows, "saved_bytes": sum(saved.values())})
        answer[kind] = {"errors": errors.tolist(), "ranks": everyone}
    if rank == 0:
        Path(folder, "answer").write_text(json.dumps(answer), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    answers: dict[str, Any] = {}
    for ranks in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.start_processes(
                rank_main, (int(ranks), folder), nprocs=int(ranks), start_method="fork"
            )
            answers[ranks] = json.loads(Path(folder, "answer").read_text(encoding="utf-8"))
    print(json.dumps(answers))
