"""Two measurements of the lesson, run as a process: `python -m nanum.live.bench amdahl | memory`.

One JSON document on stdout; `progress DONE TOTAL` lines on stderr. It imports torch, so nobody imports it.
Exit codes: 0 measured, 2 arguments that cannot be read, 3 no usable torch, 4 a device that is not there.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

try:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit(3)

from nanum.processes import NO_DEVICE

SHARES = (1, 2, 4, 8, 16, 32)
DIVIDED_LAYERS = 4
# (hidden, rows, dtype): the base job takes some 0.3 s of one core or some milliseconds of a data-centre GPU, its
# weights stay in a core's cache, and its 32nd part is still far longer than a kernel launch.
DIVIDED_JOB = {
    "cpu": (512, 4096, torch.float32),
    "mps": (1024, 16384, torch.float32),
    "cuda": (2048, 32768, torch.bfloat16),
}
QUICK_JOB = (128, 512, torch.float32)
MIN_SAMPLE_SECONDS = (
    0.02  # a timer's and a scheduler's jitter is small beside this; shorter shares are repeated within a sample
)
MIN_REPEATS, MAX_REPEATS, QUICK_REPEATS = 7, 30, 3

MEMORY_LAYERS, MEMORY_HIDDEN, MEMORY_ROWS = 12, 2048, 256  # 12 x (2048 x 2048 + 2048) = 50,356,224 parameters


def progress(done: int, total: int) -> None:
    print(f"progress {done} {total}", file=sys.stderr, flush=True)


def choose_device(wanted: str) -> torch.device:
    """CUDA where there is one, then MPS, then the CPU; or the one asked for. Exits with 4 if that one is not there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    kind = next(kind for kind, here in there.items() if here) if wanted == "auto" else wanted
    if not there[kind]:
        print(f"device={kind} is not available to torch {torch.__version__} on this machine", file=sys.stderr)
        sys.exit(NO_DEVICE)
    return torch.device(kind)


def processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    threads = torch.get_num_threads() if device.type == "cpu" else None
    return {"kind": device.type, "name": name, "threads": threads, "torch": torch.__version__}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


# --- amdahl: one job, really cut to its 1/N share


def divided_job(hidden: int, rows: int, dtype: torch.dtype, device: torch.device) -> Callable[[int], None]:
    """Forward and backward pass of a ReLU MLP on the first `n` of `rows`, into buffers made beforehand.

    Written out, without autograd, so that what is timed is arithmetic and not the memory allocator.
    """

    def new(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    generator = torch.Generator().manual_seed(35)
    weights = [
        (torch.randn(hidden, hidden, generator=generator) / hidden**0.5).to(device, dtype)
        for _ in range(DIVIDED_LAYERS)
    ]
    weight_grads = [new(hidden, hidden) for _ in weights]
    first = torch.randn(rows, hidden, generator=generator).to(device, dtype)
    activations = [first, *(new(rows, hidden) for _ in weights)]
    grads = new(rows, hidden), new(rows, hidden)

    def step(n: int) -> None:
        held = [activation[:n] for activation in activations]
        grad, spare = grads[0][:n], grads[1][:n]
        for layer, weight in enumerate(weights):
            torch.mm(held[layer], weight, out=held[layer + 1])
            held[layer + 1].relu_()
        grad.fill_(1.0 / n)
        for layer in reversed(range(DIVIDED_LAYERS)):
            torch.ops.aten.threshold_backward.grad_input(grad, held[layer + 1], 0, grad_input=grad)
            torch.mm(held[layer].T, grad, out=weight_grads[layer])
            if layer:  # nobody asks for the gradient of the data
                torch.mm(grad, weights[layer].T, out=spare)
                grad, spare = spare, grad

    return step


def amdahl(device: torch.device, budget_seconds: float, quick: bool) -> dict[str, Any]:
    """Seconds of the 1/N share for each N, sampled in rounds of every N, so that the clock's drift hits all alike."""
    hidden, rows, dtype = QUICK_JOB if quick else DIVIDED_JOB[device.type]
    with torch.no_grad():
        step = divided_job(hidden, rows, dtype, device)

        def sample(n: int, inner: int) -> float:
            synchronize(device)
            start = time.perf_counter()
            for _ in range(inner):
                step(rows // n)
            synchronize(device)
            return (time.perf_counter() - start) / inner

        inner = {}
        for n in SHARES:
            sample(n, 2)  # warm-up: kernels are chosen, workspaces and pages are taken
            inner[n] = 1 if quick else max(1, round(MIN_SAMPLE_SECONDS / sample(n, 1)))
        start = time.perf_counter()
        samples = {n: [sample(n, inner[n])] for n in SHARES}
        round_seconds = time.perf_counter() - start
        repeats = QUICK_REPEATS if quick else min(MAX_REPEATS, max(MIN_REPEATS, int(budget_seconds / round_seconds)))
        progress(1, repeats)
        for done in range(1, repeats):
            turn = done % len(SHARES)
            for n in SHARES[turn:] + SHARES[:turn]:
                samples[n].append(sample(n, inner[n]))
            progress(done + 1, repeats)
    return {
        "device": describe(device),
        "job": {
            "layers": DIVIDED_LAYERS,
            "hidden": hidden,
            "rows": rows,
            "dtype": str(dtype).removeprefix("torch."),
            "flops": 2
            * rows
            * hidden**2
            * (3 * DIVIDED_LAYERS - 1),  # forward, dW and dX of each layer, but for the first dX
        },
        "repeats": repeats,
        "shares": [{"n": n, "rows": rows // n, "steps_per_sample": inner[n], "seconds": samples[n]} for n in SHARES],
    }


# --- memory: what one training step keeps, storage by storage


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages under these tensors: a view or a tied weight is counted once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


class LiveStorages(TorchDispatchMode):
    """Bytes of storages alive, and their peak, while the mode is on; `resident` are those that were alive before."""

    def __init__(self, resident: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.live_bytes = self.peak_bytes = 0
        for tensor in resident:
            self.see(tensor)

    def see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = storage.nbytes()
            self.live_bytes += self.alive[key]
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(storage, self.forget, key)

    def forget(self, key: int) -> None:
        self.live_bytes -= self.alive.pop(key)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        return result


def memory(device: torch.device) -> dict[str, Any]:
    """One AdamW step of an fp32 MLP: parameters, gradients, optimizer state, activations; and inference beside it."""
    torch.manual_seed(35)
    stages = 5
    batch = torch.randn(MEMORY_ROWS, MEMORY_HIDDEN, device=device)
    allocated = [allocated_bytes(device)]
    blocks = [(torch.nn.Linear(MEMORY_HIDDEN, MEMORY_HIDDEN), torch.nn.GELU()) for _ in range(MEMORY_LAYERS)]
    model = torch.nn.Sequential(*(layer for block in blocks for layer in block)).to(device)
    params = list(model.parameters())
    allocated.append(allocated_bytes(device))
    progress(1, stages)

    with torch.no_grad(), LiveStorages(params) as inference:
        model(batch)
    progress(2, stages)

    saved: dict[int, int] = {}
    known = {tensor.untyped_storage()._cdata for tensor in [*params, batch]}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(batch).square().mean()
    loss.backward()
    del loss
    allocated.append(allocated_bytes(device))
    progress(3, stages)

    optimizer.step()
    allocated.append(allocated_bytes(device))
    progress(4, stages)
    grads = [param.grad for param in params if param.grad is not None]
    states = [(key, value) for state in optimizer.state.values() for key, value in state.items()]
    moments = [value for key, value in states if key != "step"]
    result = {
        "device": describe(device),
        "model": {
            "layers": MEMORY_LAYERS,
            "hidden": MEMORY_HIDDEN,
            "rows": MEMORY_ROWS,
            "parameters": sum(param.numel() for param in params),
        },
        "params_bytes": storage_bytes(params),
        "grads_bytes": storage_bytes(grads),
        "optimizer_states_bytes": storage_bytes(moments),
        "step_counters_bytes": storage_bytes(value for key, value in states if key == "step"),
        "activations_bytes": sum(saved.values()),
        "inference_peak_bytes": inference.peak_bytes,
        "allocator": allocator(device, allocated),
    }
    resident = [*params, *grads, *moments]
    del grads, moments, states
    with LiveStorages(resident) as training:  # a second step: the first made its optimizer state only at its end
        del resident
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        backward_peak_bytes = training.peak_bytes
        optimizer.step()
    progress(5, stages)
    moment = "optimizer" if training.peak_bytes > backward_peak_bytes else "backward"
    return {**result, "training_peak_bytes": training.peak_bytes, "training_peak_moment": moment}


def allocated_bytes(device: torch.device) -> int:
    synchronize(device)
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def allocator(device: torch.device, allocated: list[int]) -> dict[str, int] | None:
    """The CUDA allocator's view of the same step, in blocks of 512 bytes; None elsewhere.

    The first matmul takes a workspace (cuBLAS) that stays, and lands in the gradients' difference: giving it back tells
    it apart.
    """
    if device.type != "cuda":
        return None
    start, with_params, with_grads, with_states = allocated
    torch._C._cuda_clearCublasWorkspaces()
    return {
        "params_bytes": with_params - start,
        "grads_bytes": with_grads - with_params,
        "optimizer_states_bytes": with_states - with_grads,
        "total_bytes": with_states - start,
        "matmul_workspace_bytes": with_states - allocated_bytes(device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m nanum.live.bench", description="The lesson's two measurements, as JSON."
    )
    parser.add_argument("what", choices=("amdahl", "memory"))
    parser.add_argument("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto")
    parser.add_argument("--seconds", type=float, default=8.0, help="amdahl: about how long to sample")
    parser.add_argument("--quick", action="store_true", help="amdahl: a tiny job, a few samples")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # one core is one device here: more threads would divide the job a second time
    device = choose_device(asked.device)
    document = memory(device) if asked.what == "memory" else amdahl(device, asked.seconds, asked.quick)
    json.dump(document, sys.stdout)
    print()


if __name__ == "__main__":
    main()
