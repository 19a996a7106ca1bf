"""`python -m bench [NAME …]`: run the benchmarks, or those named, and print their medians."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from bench.calibrate import calibrate
from bench.closed_loop import closed_loop
from bench.observed import observed
from bench.readers import readers
from bench.spread import spread
from bench.startup import commands

BENCHMARKS: dict[str, Callable[[], Iterable[object]]] = {
    "startup": commands,
    "readers": readers,
    "closed_loop": closed_loop,
    "observed": observed,
}


def main(names: list[str]) -> None:
    if names == ["calibrate"]:  # which writes a file of the package, and is no benchmark
        for part in (calibrate, spread):
            for line in part():
                print(line, flush=True)
        return
    if unknown := [name for name in names if name not in BENCHMARKS]:
        sys.exit(f"no benchmark {', '.join(unknown)}: there are {', '.join(BENCHMARKS)}")
    for name in names or BENCHMARKS:
        for result in BENCHMARKS[name]():
            print(result, flush=True)


main(sys.argv[1:])
