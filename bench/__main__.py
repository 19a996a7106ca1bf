"""`python -m bench [NAME …]`: run the benchmarks, or those named, and print their medians."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from bench.readers import readers
from bench.startup import commands
from bench.timing import Result

BENCHMARKS: dict[str, Callable[[], Iterable[Result]]] = {"startup": commands, "readers": readers}


def main(names: list[str]) -> None:
    if unknown := [name for name in names if name not in BENCHMARKS]:
        sys.exit(f"no benchmark {', '.join(unknown)}: there are {', '.join(BENCHMARKS)}")
    for name in names or BENCHMARKS:
        for result in BENCHMARKS[name]():
            print(result)


main(sys.argv[1:])
