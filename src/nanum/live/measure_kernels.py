"""What one device does alone: matmuls, memory-bound kernels, attention, the optimizer, and its shortest operation.

Each kernel is the one that eager PyTorch runs in a step, called as autograd calls it, with a new tensor for its result.
Bytes are counted as a Program counts them: what is read and written, or held beside it until it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

from nanum.live.grids import Job, Plan, later
from nanum.live.sampling import Turns, samples, timed

aten = torch.ops.aten
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def jobs(plan: Plan) -> list[Job]:
    """All grids of one device. Small matmuls are timed to choose the sizes of the large ones."""
    dtypes = [name for name, dtype in DTYPES.items() if _runs(dtype, plan) and not (plan.quick and name == "fp16")]
    found = [job for name in dtypes for job in matmuls(name, plan)]
    for name in dtypes:
        found += [*kernels(name, plan), *attentions(name, plan)]
    return [*found, *optimizers(plan)]


def _runs(dtype: torch.dtype, plan: Plan) -> bool:
    """Does a training step of this dtype run on the device?"""
    try:
        a = torch.ones(8, 8, dtype=dtype, device=plan.device)
        F.silu(torch.mm(a, a)).log_softmax(-1)
    except RuntimeError:
        return False
    return True


# --- matmuls

ORDERS: dict[str, tuple[Callable[[int, int, int], tuple[tuple[int, int], ...]], Callable[..., torch.Tensor]]] = {
    "nt": (lambda m, n, k: ((m, k), (n, k)), lambda a, b: torch.mm(a, b.t())),
    "nn": (lambda m, n, k: ((m, k), (k, n)), torch.mm),
    "tn": (lambda m, n, k: ((k, m), (k, n)), lambda a, b: torch.mm(b.t(), a)),  # dW: PyTorch makes it as [out, in]
}


def matmuls(name: str, plan: Plan) -> Iterator[Job]:
    dtype = DTYPES[name]
    for order, (shapes, multiply) in ORDERS.items():
        sides = _sides(order, dtype, plan)

        def make(m: int, n: int, k: int, shapes: Any = shapes, multiply: Any = multiply) -> Turns:
            def operands() -> tuple[torch.Tensor, ...]:
                return tuple(_filled(shape, dtype, plan) for shape in shapes(m, n, k))

            return Turns(operands, multiply, 0)  # in or out of the caches makes no difference to a product

        points = [later(make, *point) for point in product(sides, repeat=3)]
        yield Job("matmul", {"dtype": name, "operands": order}, dict.fromkeys("mnk", sides), points)


def _sides(order: str, dtype: torch.dtype, plan: Plan) -> list[int]:
    """The sizes of each side: a factor of four apart, up to the largest whose cube is not too slow nor too large. Rates
    hardly grow beyond a side of some hundreds on a core, and of some thousands on a GPU. Powers of two, as sizes of
    models often are: on a core, rows a little shorter or longer may be a tenth faster.
    """
    shapes, multiply = ORDERS[order]
    probe = [_filled(shape, dtype, plan) for shape in shapes(256, 256, 256)]
    multiply(*probe)
    a_flop = min(timed(lambda: multiply(*probe), plan.device, 3) for _ in range(3)) / (2 * 256**3)
    top = 8192 if plan.device.type == "cuda" else 512 if plan.quick else 2048
    while top > 256 and (2 * top**3 * a_flop > plan.longest or 3 * top**2 * dtype.itemsize > plan.free_bytes / 8):
        top //= 2
    return [top // scale for scale in ((16, 4, 1) if plan.quick else (64, 16, 4, 1)) if top // scale >= 8]


# --- kernels that memory bounds


RESULT_MIB = {True: (1 / 32, 2, 30, 34), False: (1 / 32, 1 / 4, 2, 16, 30, 34, 64)}
"""Of a kernel's result, by quick. From 32 MiB on, glibc gives a tensor fresh pages each time (M_MMAP_THRESHOLD): a few
times slower than memory that is used again, so there is a point close to it on either side.
"""
WIDTH, VOCABULARY = 1024, 4096  # of a row: hidden sizes, and logits
PIECE = 1 << 20  # elements of a parameter, that FSDP copies out of its flat buffer and into it


def kernels(name: str, plan: Plan) -> Iterator[Job]:
    dtype = DTYPES[name]
    for kernel, make in _kernels(dtype, plan).items():
        of_loss = "softmax" in kernel or "nll" in kernel
        width, item = (VOCABULARY, 4) if of_loss else (WIDTH, dtype.itemsize)
        turns, sizes = [], []
        for mib in RESULT_MIB[plan.quick]:
            rows = round(mib * 2**20 / (width * item))
            if rows * width * item * 6 > plan.free_bytes / 2:
                break
            inputs, run, counted = make(rows, width)
            turns.append(later(_passed_on, inputs, run, plan.turns_bytes))
            sizes.append(counted)
        yield Job("kernel", {"dtype": name, "name": kernel}, {"bytes": sizes}, turns)


def _passed_on(inputs: Callable[[], tuple[Any, ...]], run: Callable[..., Any], most_bytes: float) -> Turns:
    return Turns(inputs, run, most_bytes, passed_on=True)


Made = tuple[Callable[[], tuple[Any, ...]], Callable[..., Any], int]


def _kernels(dtype: torch.dtype, plan: Plan) -> dict[str, Callable[[int, int], Made]]:
    """By name: for [rows, width], how inputs are made, what is run, and the bytes that a Program counts for it."""
    item, device = dtype.itemsize, plan.device

    def new(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.full(shape, 0.5, dtype=of, device=device)

    def of(reads: float, writes: float, run: Callable[..., Any], *more: Callable[[int, int], torch.Tensor]) -> Any:
        """A kernel on tensors [rows, width]: as many as `more` says, or one. `reads` and `writes` in such tensors."""
        inputs = more or (new,)
        return lambda r, w: (
            lambda: tuple(make(r, w) for make in inputs),
            run,
            int((reads + writes) * r * w * item),
        )

    def wide(r: int, w: int) -> torch.Tensor:
        return new(r, w, of=torch.float32)

    def row(r: int, w: int) -> torch.Tensor:
        return new(r, 1)

    def norm(r: int, w: int) -> Made:
        weight, bias = new(w), new(w)
        return (
            lambda: (new(r, w),),
            lambda x: aten.native_layer_norm(x, [w], weight, bias, 1e-5),
            2 * r * w * item + 8 * r,
        )

    def d_norm(r: int, w: int) -> Made:
        weight, bias = new(w), new(w)

        def inputs() -> tuple[torch.Tensor, ...]:
            x = new(r, w)
            return (new(r, w), x, *aten.native_layer_norm(x, [w], weight, bias, 1e-5)[1:])

        def run(dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> Any:
            return aten.native_layer_norm_backward(dy, x, [w], mean, rstd, weight, bias, [True, True, True])

        return inputs, run, 3 * r * w * item + 8 * r

    def ids(r: int) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, (r,), device=device)

    def embedding(r: int, w: int) -> Made:
        table = new(VOCABULARY, w)
        return lambda: (ids(r), table), F.embedding, 2 * r * w * item

    def embedding_backward(r: int, w: int) -> Made:
        vocabulary = max(8, 2 * r)
        return (
            lambda: (new(r, w), ids(r) % vocabulary),
            lambda dy, i: aten.embedding_dense_backward(dy, i, vocabulary, -1, False),
            (r + vocabulary) * w * item,
        )

    def nll(r: int, w: int) -> Made:
        return lambda: (wide(r, w), ids(r) % w), F.nll_loss, 4 * r * w

    def nll_backward(r: int, w: int) -> Made:
        one = torch.ones((), device=device)

        def run(logp: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            whole: torch.Tensor = aten.nll_loss_backward(one, logp, target, None, 1, -100, one * r)
            return whole

        return lambda: (wide(r, w), ids(r) % w), run, 8 * r * w

    found: dict[str, Callable[[int, int], Made]] = {
        "add": of(2, 1, torch.add, new, new),
        "mul": of(2, 1, torch.mul, new, new),
        "accumulate": of(1, 1, lambda a, b: a.add_(b), new, new),  # in place; a Program counts one of the two reads
        "copy": of(1, 1, torch.clone),
        "copy_out": of(1, 1, lambda flat: [piece.clone() for piece in flat.view(-1).split(PIECE)]),
        "copy_in": lambda r, w: (lambda: new(r, w).view(-1).split(PIECE), lambda *p: torch.cat(p), 2 * r * w * item),
        "other": of(1, 1, torch.clone),
        "pow": of(1, 1, lambda x: x.pow(2)),
        "mean": of(1, 0, lambda x: x.mean(-1, keepdim=True)),
        "sum": of(1, 0, lambda x: x.sum(0)),
        "bias_grad": of(1, 0, lambda x: x.sum(0)),
        "div": of(0, 1, lambda x: x.expand(-1, WIDTH) / WIDTH, row),
        "neg": of(1, 0.5, lambda x: -x[:, : x.shape[1] // 2]),
        "cat": of(1.5, 1, lambda h, x: torch.cat((h[:, : h.shape[1] // 2], x[:, : x.shape[1] // 2]), -1), new, new),
        "silu": of(1, 1, F.silu),
        "d_silu": of(2, 1, aten.silu_backward, new, new),
        "gelu": of(1, 1, F.gelu),
        "d_gelu": of(2, 1, aten.gelu_backward, new, new),
        "norm": norm,
        "d_norm": d_norm,
        "embedding": embedding,
        "embedding_backward": embedding_backward,
        "log_softmax": lambda r, w: (lambda: (wide(r, w),), lambda x: x.log_softmax(-1), 8 * r * w),
        "log_softmax_backward": lambda r, w: (
            lambda: (wide(r, w), wide(r, w)),
            lambda d, y: aten._log_softmax_backward_data(d, y, -1, torch.float32),
            12 * r * w,
        ),
        "nll": nll,
        "nll_backward": nll_backward,
    }
    if item < 4:
        found["to_float"] = of(1, 4 / item, lambda x: x.float())
        found["to_half"] = of(4 / item, 1, lambda x: x.to(dtype), wide)
    return found


# --- attention and the optimizer


def attentions(name: str, plan: Plan) -> Iterator[Job]:
    """Causal flash attention on heads as a step has them: [batch, sequence, head, size], seen as [batch, head, …]."""
    dtype = DTYPES[name]
    rows_of, heads = ([4], [64]) if plan.quick else ([2, 16], [32, 64, 128])
    shortest = 512 if plan.device.type == "cuda" else 128

    def heads_of(rows: int, s: int, d: int) -> torch.Tensor:
        return _filled((1, s, rows, d), dtype, plan).transpose(1, 2).requires_grad_()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(rows: int, s: int, d: int) -> Turns:
        return Turns(lambda: tuple(heads_of(rows, s, d).detach() for _ in range(3)), attend, plan.turns_bytes)

    def backward(rows: int, s: int, d: int) -> Turns:
        def inputs() -> tuple[Any, ...]:
            qkv = tuple(heads_of(rows, s, d) for _ in range(3))
            y = attend(*qkv)
            return y, qkv, torch.ones_like(y)

        return Turns(inputs, lambda y, qkv, dy: torch.autograd.grad(y, qkv, dy, retain_graph=True), plan.turns_bytes)

    probe = backward(rows_of[-1], shortest, heads[-1])
    probe()
    once = timed(probe, plan.device)  # four times as long for twice the sequence
    sequences = [s for s in (shortest, 4 * shortest, 16 * shortest) if once * (s / shortest) ** 2 < 3 * plan.longest]
    sizes = {"rows": rows_of, "seq_len": sequences or [shortest], "head_dim": heads}
    for direction, make in (("forward", forward), ("backward", backward)):
        points = [later(make, *point) for point in product(*sizes.values())]
        yield Job("attention", {"dtype": name, "direction": direction}, sizes, points)


OPTIMIZER_TENSOR = 1 << 19  # elements of each parameter


def optimizers(plan: Plan) -> Iterator[Job]:
    """AdamW, as PyTorch does it by default on the device, over parameters, gradients and two states of one dtype: 7
    numbers for each are moved.
    """
    powers = (14, 19, 22) if plan.quick else (12, 16, 19, 22, 24)
    counts = [1 << power for power in powers if (1 << power) * 4 * 6 < plan.free_bytes / 2]

    def make(n: int) -> Turns:
        sizes = [min(OPTIMIZER_TENSOR, n)] * max(1, n // OPTIMIZER_TENSOR)
        params = [torch.nn.Parameter(_filled((size,), torch.float32, plan)) for size in sizes]
        for param in params:
            param.grad = _filled(tuple(param.shape), torch.float32, plan)
        optimizer = torch.optim.AdamW(params, lr=1e-4)
        return Turns(lambda: (), optimizer.step, 0)

    points = [later(make, n) for n in counts]
    yield Job("optimizer", {"dtype": "fp32"}, {"bytes": [7 * 4 * n for n in counts]}, points)


# --- the shortest operation

CHAIN = 200


def operation_seconds(plan: Plan) -> list[float]:
    """Of one operation that has hardly any work.

    On a CPU, operations of a chain, forward and backward: the Python call, the dispatcher, autograd's node. On a GPU,
    where the host runs ahead of these, the kernel alone: kernels queued behind a long one, between two events.
    """
    if plan.device.type == "cuda":
        return [_queued_kernel_seconds(plan.device) for _ in range(2 * plan.repeats)]
    weight = torch.ones(8, device=plan.device, requires_grad=True)

    def chain() -> None:
        x = weight
        for _ in range(CHAIN):
            x = x * weight
        x.sum().backward()

    operations = CHAIN * (1 + 3)  # a product, its two gradients, and their sum with what has arrived
    return [seconds / operations for seconds in samples(chain, plan.device, 2 * plan.repeats)]


def _queued_kernel_seconds(device: torch.device) -> float:
    x = torch.ones(8, device=device)
    x.mul_(1.0)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(50_000_000)  # cycles: some 30 ms, in which the host queues the rest
    start.record()
    for _ in range(CHAIN):
        x.mul_(1.0)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / CHAIN


def _filled(shape: tuple[int, ...], dtype: torch.dtype, plan: Plan) -> torch.Tensor:
    """Numbers of size about one: a GPU's clock depends on what it multiplies."""
    return torch.rand(shape, device=plan.device).add_(-0.5).to(dtype)
