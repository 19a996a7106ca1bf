"""What devices of one machine do together: exchanges by kind, size and group, and how much they slow each other.

Run by every rank of a process group. A payload is counted by the convention of nccl-tests: the whole buffer of a gather
or a scatter, one rank's buffer of everything else. Ranks that take no part in a group wait at a barrier.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nanum.live.bench import synchronize
from nanum.live.grids import Plan
from nanum.live.sampling import Turns, busy_seconds, quietest, summary, timed

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
LEAST_SAMPLE_SECONDS = 0.04  # in which the kernel's ticks of 10 ms tell whether others used the processors
MOST_CALLS = 200

Tick = Callable[[str], None]


def group_sizes(ranks: int) -> list[int]:
    """2, 4, … and all ranks."""
    sizes = [2**i for i in range(1, ranks.bit_length()) if 2**i < ranks]
    return [*sizes, ranks]


MIB = {
    ("cpu", True): (1 / 256, 1 / 8, 4, 30, 34),
    ("cpu", False): (1 / 1024, 1 / 128, 1 / 16, 1 / 2, 4, 16, 30, 34, 64),
    ("cuda", True): (1 / 256, 1 / 8, 4, 32, 256),
    ("cuda", False): (1 / 1024, 1 / 128, 1 / 16, 1 / 2, 4, 32, 256, 1024),
}
"""Payloads, by device and quick. On a CPU there is one on either side of 32 MiB, from which on a tensor gets fresh
pages each time (`measure_kernels.RESULT_MIB`).
"""


def payloads(plan: Plan, ranks: int) -> list[int]:
    """Bytes of a call; the largest leaves room for the buffers of all kinds."""
    sizes = [round(mib * 2**20) for mib in MIB[plan.device.type, plan.quick]]
    return [size for size in sizes if size * 4 <= plan.free_bytes / 2]


def exchanges(plan: Plan, rank: int, ranks: int, tick: Tick) -> list[dict[str, Any]]:
    """Grids of every kind in groups of the first 2, 4, … ranks. Every rank returns what rank 0 measured."""
    found = []
    for size in group_sizes(ranks):
        group = dist.new_group(list(range(size))) if size < ranks else None
        sizes = payloads(plan, size)
        for kind in KINDS:
            rows = []
            for payload in sizes:
                if rank < size:
                    rows.append(summary(_exchange_samples(kind, payload, size, rank, group, plan)))
                tick(f"{kind} of {size} ranks")
            dist.barrier()
            if rows:
                seconds, low, high = map(list, zip(*rows, strict=True))
                keys = {"subject": "exchange", "kind": kind, "ranks": size, "nodes": 1}
                grid = {"bytes": sizes, "seconds": seconds, "low_seconds": low}
                found.append({**keys, **grid, "high_seconds": high, "repeats": _repeats(plan)})
        if group is not None:
            dist.destroy_process_group(group)
    return found


def _repeats(plan: Plan) -> int:
    return 5 if plan.quick else 11


def _exchange_samples(kind: str, payload: int, size: int, rank: int, group: Any, plan: Plan) -> list[float]:
    """Seconds of one call, sample by sample: those during which the machine was quiet. On GPUs the calls queue behind
    each other, and it is the device that is awaited.
    """
    call = _call(kind, payload, size, rank, group, plan.device)

    def calls(count: int) -> None:
        for _ in range(count):
            call()

    calls(2)
    once, _ = _round(lambda: calls(2), group, plan.device)
    count = _told(max(1, min(MOST_CALLS, round(LEAST_SAMPLE_SECONDS / (once / 2)))), group, plan.device)
    rounds = [_round(lambda: calls(count), group, plan.device) for _ in range(_repeats(plan))]
    return [seconds / count for seconds in quietest(*zip(*rounds, strict=True))]


def _round(run: Callable[[], object], group: Any, device: torch.device) -> tuple[float, float]:
    """Seconds from a barrier until the last rank is done, as rank 0 sees them, and what others used meanwhile of the
    processors.
    """
    dist.barrier(group)
    synchronize(device)
    busy, own, start = busy_seconds(), time.process_time(), time.perf_counter()
    run()
    synchronize(device)
    used = torch.tensor([time.process_time() - own], dtype=torch.float64, device=device)
    dist.all_reduce(used, group=group)  # the last rank's is there when all are done
    seconds = time.perf_counter() - start
    return seconds, max(0.0, busy_seconds() - busy - float(used))


def _told(number: int, group: Any, device: torch.device) -> int:
    """What rank 0 says, on every rank."""
    told = torch.tensor([number], device=device)
    dist.broadcast(told, 0, group=group)
    return int(told)


def _call(kind: str, payload: int, size: int, rank: int, group: Any, device: torch.device) -> Callable[[], object]:
    """One exchange of `payload` bytes, with a new tensor for its result, as frameworks make one."""
    elements = max(size, payload // 4 // size * size)
    whole = torch.ones(elements, device=device)
    part = torch.ones(elements // size, device=device)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole.mul_(1.0 / size), group=group)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(torch.empty_like(whole), part, group=group)
    if kind == "reduce_scatter":
        mean = dist.ReduceOp.AVG  # as FSDP2 asks
        return lambda: dist.reduce_scatter_tensor(torch.empty_like(part), whole, op=mean, group=group)
    if kind == "all_to_all":
        return lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group)
    after, before = (rank + 1) % size, (rank - 1) % size

    def send() -> None:
        """As sendrecv_perf: everyone sends to the next rank and receives from the one before."""
        received = torch.empty_like(whole)
        pair = [dist.P2POp(dist.isend, whole, after, group), dist.P2POp(dist.irecv, received, before, group)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    return send


# --- how much devices slow each other

MATMUL_SIDE = {"cpu": 576, "cuda": 6144}
ROUNDS = 5
SEGMENT_SECONDS = 0.05  # about as long as a step computes between two exchanges


def together(plan: Plan, rank: int, tick: Tick) -> dict[str, float]:
    """By subject: seconds of the slowest rank with all at it at once, over those of rank 0 while the others wait. In
    turns, so that drift hits both alike; between barriers, as in a step, where the slowest is waited for.
    """
    ratios = {}
    empty = statistics.median(_round(lambda: None, None, plan.device)[0] for _ in range(20))
    for subject, run in _subjects(plan).items():
        run()
        inner = _told(max(1, round(SEGMENT_SECONDS / max(timed(run, plan.device), 1e-6))), None, plan.device)

        def segment(inner: int = inner, run: Callable[[], object] = run) -> None:
            for _ in range(inner):
                run()

        alone, all_at_once = [], []
        for _ in range(ROUNDS if plan.quick else 3 * ROUNDS):
            dist.barrier()
            if rank == 0:
                alone.append(timed(run, plan.device, inner))
            all_at_once.append(_round(segment, None, plan.device))
        seconds = statistics.fmean(quietest(*zip(*all_at_once, strict=True))) - empty
        ratio = seconds / inner / statistics.median(alone) if alone else 0.0
        told = torch.tensor([ratio], dtype=torch.float64, device=plan.device)
        dist.broadcast(told, 0)
        ratios[subject] = float(told)
        tick(f"{subject}, all at once")
    return ratios


def _subjects(plan: Plan) -> dict[str, Callable[[], object]]:
    """One kernel of each subject, of a middling size."""
    side, device = MATMUL_SIDE.get(plan.device.type, 512), plan.device
    params = [torch.nn.Parameter(torch.rand(1 << 19, device=device)) for _ in range(4)]
    for param in params:
        param.grad = torch.rand_like(param)
    optimizer = torch.optim.AdamW(params, lr=1e-4)
    q, k, v = (torch.rand(1, 512, 4, 64, device=device).transpose(1, 2).requires_grad_() for _ in range(3))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    dy = torch.ones_like(y)
    square = (torch.rand(side, side, device=device), torch.rand(side, side, device=device))
    many = (1024, 1024)
    return {
        "matmul": Turns(lambda: square, torch.mm, 0),
        "kernel": Turns(lambda: (torch.rand(many, device=device), torch.rand(many, device=device)), torch.mul, 64e6),
        "attention": lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True),
        "optimizer": optimizer.step,
    }


def beside(plan: Plan, rank: int, ranks: int, tick: Tick) -> dict[str, float]:
    """Compute alone, all-reduces alone, and both at once: by how much each is longer beside the other."""
    side = MATMUL_SIDE.get(plan.device.type, 512)
    a, b = (torch.rand(side, side, device=plan.device) for _ in range(2))
    buffers = [torch.ones(1 << 22, device=plan.device) for _ in range(4 if plan.quick else 12)]

    def compute() -> None:
        torch.mm(a, b)

    compute()
    rounds = []
    for _ in range(3 if plan.quick else ROUNDS):
        rounds.append(_beside_once(compute, buffers, plan))
        tick("compute and exchanges beside each other")
    ratios = torch.tensor([summary(values)[0] for values in zip(*rounds, strict=True)], dtype=torch.float64)
    ratios = ratios.to(plan.device)
    dist.all_reduce(ratios)
    slower_compute, slower_exchange = (float(r) / ranks for r in ratios)
    return {"compute": slower_compute, "exchange": slower_exchange}


def _beside_once(compute: Callable[[], None], buffers: list[torch.Tensor], plan: Plan) -> tuple[float, float]:
    device = plan.device
    dist.barrier()
    synchronize(device)
    start = time.perf_counter()
    for buffer in buffers:
        dist.all_reduce(buffer.mul_(0.5))
    synchronize(device)
    exchange_alone = time.perf_counter() - start
    dist.barrier()
    inner = 20
    start = time.perf_counter()
    for _ in range(inner):
        compute()
    synchronize(device)
    compute_alone = (time.perf_counter() - start) / inner
    dist.barrier()
    measure = _beside_on_gpu if device.type == "cuda" else _beside_on_cpu
    compute_beside, exchange_beside = measure(compute, buffers, compute_alone, exchange_alone)
    return compute_beside / compute_alone, exchange_beside / exchange_alone


def _beside_on_cpu(
    compute: Callable[[], None], buffers: list[torch.Tensor], compute_alone: float, exchange_alone: float
) -> tuple[float, float]:
    """Compute until the exchanges, which threads of gloo carry out, are done."""
    start = time.perf_counter()
    works = [dist.all_reduce(buffer, async_op=True) for buffer in buffers]
    done = 0
    while not all(work.is_completed() for work in works):
        compute()
        done += 1
    seconds = time.perf_counter() - start
    for work in works:
        work.wait()
    return seconds / max(done, 1), seconds


def _beside_on_gpu(
    compute: Callable[[], None], buffers: list[torch.Tensor], compute_alone: float, exchange_alone: float
) -> tuple[float, float]:
    """NCCL's stream beside the compute's: events say how many kernels were done when the exchanges were."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    works = [dist.all_reduce(buffer, async_op=True) for buffer in buffers]
    ends = []
    for _ in range(2 * round(exchange_alone / compute_alone) + 2):
        compute()
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for work in works:
            work.wait()
        end.record(side)
    torch.cuda.synchronize()
    exchange_beside = start.elapsed_time(end) / 1e3
    during = [start.elapsed_time(one) / 1e3 for one in ends]
    inside = [seconds for seconds in during if seconds <= exchange_beside] or during[:1]
    return inside[-1] / len(inside), exchange_beside
