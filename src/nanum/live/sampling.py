"""How something is timed: repeated, on the clock that its device goes by, and summed up as a median and a spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from nanum.live.bench import synchronize

Run = Callable[[], Any]

LEAST_SECONDS = {"cpu": 5e-3, "cuda": 2e-3, "mps": 5e-3}
"""Of one sample: what is shorter is repeated within it, so that neither a clock's tick nor a timer's jitter counts."""
MOST_INNER = 10_000


def seconds_now(device: torch.device) -> float:
    """A clock that stands still while others have the processor: of this thread on a CPU, where it does the work itself
    (seconds of an idle machine, also on a busy one), and of the wall elsewhere, once the device is done.
    """
    if device.type == "cpu":
        return time.thread_time()
    synchronize(device)
    return time.perf_counter()


def timed(run: Run, device: torch.device, inner: int = 1) -> float:
    """Seconds of one of `inner` calls, one after the other."""
    start = seconds_now(device)
    for _ in range(inner):
        run()
    return (seconds_now(device) - start) / inner


class Sampled:
    """Something to be timed again and again."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self._run, self._device = run, device
        self.seconds: list[float] = []
        run()  # kernels are chosen, workspaces and pages are taken
        once = max(timed(run, device), 1e-9)
        self._inner = min(MOST_INNER, max(1, round(LEAST_SECONDS[device.type] / once)))

    def sample(self) -> None:
        self.seconds.append(timed(self._run, self._device, self._inner))


def samples(run: Run, device: torch.device, repeats: int) -> list[float]:
    """Seconds of one call, `repeats` times over, after calls that warm up."""
    one = Sampled(run, device)
    for _ in range(repeats):
        one.sample()
    return one.seconds


def summary(seconds: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the 10th and the 90th percentile."""
    middle = statistics.median(seconds)
    if len(seconds) < 2:
        return middle, middle, middle
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    return middle, min(tenths[0], middle), max(tenths[-1], middle)


class Turns:
    """Calls of `operator` on inputs in turn, each result kept until its turn comes again: as in a step, where a tensor
    has left the cache before it is read again. `most_bytes` bounds what is held; there is at least one turn. Where
    `passed_on`, the first input is the same each time: in a step, a kernel has just written it.
    """

    def __init__(
        self,
        make: Callable[[], tuple[Any, ...]],
        operator: Callable[..., Any],
        most_bytes: float,
        *,
        passed_on: bool = False,
    ) -> None:
        first = make()
        result = operator(*first)
        self.bytes = tensor_bytes(first) + tensor_bytes(result)
        turns = int(min(MOST_TURNS, max(1, most_bytes // max(self.bytes, 1))))
        self.held_bytes = turns * self.bytes
        self._operator, self._turn = operator, 0
        others = (make() for _ in range(turns - 1))
        self._inputs = [first, *((*first[:1], *made[1:]) if passed_on else made for made in others)]
        self._results: list[Any] = [None] * turns

    def __call__(self) -> None:
        self._turn = (self._turn + 1) % len(self._inputs)
        self._results[self._turn] = self._operator(*self._inputs[self._turn])


MOST_TURNS = 32


def tensor_bytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return int(tensors.numel() * tensors.element_size())
    if isinstance(tensors, list | tuple):
        return sum(map(tensor_bytes, tensors))
    return 0


def busy_seconds() -> float:
    """Seconds of all processors that any process has used since the machine started; 0 where nobody counts them."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()
    except OSError:
        return 0.0
    user, nice, system = map(int, fields[1:4])
    return (user + nice + system) / 100  # USER_HZ, which Linux fixes at 100


QUIET_SHARE = 0.1  # of one processor, that others may use during a sample


def quietest(seconds: Sequence[float], others: Sequence[float]) -> list[float]:
    """The samples during which others used little of the processors, or the quieter half where few were quiet."""
    quiet = [s for s, used in zip(seconds, others, strict=True) if used <= QUIET_SHARE * s]
    if len(quiet) * 2 >= len(seconds):
        return quiet
    by_noise = sorted(range(len(seconds)), key=lambda i: others[i] / seconds[i])
    return [seconds[i] for i in by_noise[: (len(seconds) + 1) // 2]]
