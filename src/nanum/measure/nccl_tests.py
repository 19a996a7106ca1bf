"""Logs of nccl-tests (https://github.com/NVIDIA/nccl-tests): what all_reduce_perf and its like print, as exchanges.

A log has one run or several, one after the other:

    # nThread 1 nGpus 1 minBytes 8 maxBytes 8589934592 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 …
    #  Rank  0 Group  0 Pid   6899 on node-a device  0 [0000:04:00] NVIDIA H100 80GB HBM3
    #                                                              out-of-place                       in-place
    #       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
    #        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
               8             2     float     sum      -1    135.8    0.00    0.00      0    123.5    0.00    0.00      0

Its size is the payload by our convention, which is theirs. Older ones call the last column `error`, and have neither
`Group` nor `root`. Which test it was, newer ones say (`# Collective test starting: all_reduce_perf`); elsewhere the
command, if it stands in the log, or the file's name tells.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nanum import files
from nanum.cluster.measured import Exchange, Grid
from nanum.cluster.tables import chip_names
from nanum.errors import Refused, cut_short, printable
from nanum.units import MIB

LARGEST_LOG_BYTES = 64 * MIB
LONGEST_NAMES = 400  # characters of the logs' names that a source repeats

KINDS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "sendrecv": "send",
    "broadcast": "broadcast",
}
"""By the name of a test, without its `_perf`."""

_TEST = re.compile(rf"\b({'|'.join(KINDS)})_perf")
_NAMED = re.compile("|".join(KINDS))
_TAGGED = re.compile(r"^\[\d+,\d+\]<std(?:out|err)>:\s?")  # mpirun --tag-output
_BEGINS = re.compile(r"^#\s*nThread\s+\d+.*?\biters:\s*\d+.*?\biters:\s*(\d+)")
_RANK = re.compile(
    r"^#\s+Rank\s+(\d+)(?:\s+Group\s+(\d+))?\s+Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+(?:\[.*?\]\s*)?(.*)$"
)
_ROUNDING = 0.02  # of a bandwidth, beside its two decimals


@dataclass
class Run:
    """One run: `ranks` by group, each with its host; `seconds` by payload, each as (out of place, in place)."""

    line: int
    repeats: int
    kind: str | None = None
    hosts: dict[int, dict[int, str]] = field(default_factory=dict)
    device: str = ""
    columns: list[str] = field(default_factory=list)
    seconds: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def ranks(self) -> int:
        return len(self.hosts.get(0, {}))

    @property
    def nodes(self) -> int:
        return len(set(self.hosts.get(0, {}).values()))


@dataclass(frozen=True)
class Logs:
    """What logs say together. `nodes` and `gpus_per_node` are of the largest run."""

    exchanges: tuple[Exchange, ...]
    nodes: int
    gpus_per_node: int
    device: str  # as the driver calls it


def read(paths: list[Path]) -> Logs:
    """Read logs. Raises `Refused` with every reason, by file and line."""
    reasons: list[str] = []
    runs: list[tuple[Path, Run]] = []
    for path in paths:
        try:
            text = files.read(path, "a log of nccl-tests", LARGEST_LOG_BYTES).decode("utf-8", errors="replace")
        except Refused as refused:
            reasons += refused.reasons
            continue
        found, wrong = parse(text, path.name)
        reasons += [f"{path}: {reason}" for reason in wrong]
        runs += [(path, run) for run in found]
    if reasons:
        raise Refused(reasons)
    whole = [run for _, run in runs]
    return Logs(
        exchanges=tuple(_exchanges(runs)),
        nodes=max(run.nodes for run in whole),
        gpus_per_node=max(-(-run.ranks // run.nodes) for run in whole),
        device=whole[0].device,
    )


def other_chips(device: str, chip: str) -> list[str]:
    """The shipped chips of the family (H100) that is in a device's name as the driver says it; none where it is this
    one's, or is not known.
    """
    families = {name: name.partition("-")[0] for name in chip_names()}
    words = re.findall(r"[a-z0-9]+", device.lower())
    if chip not in families or families[chip] in words:
        return []
    return [name for name, family in families.items() if family in words]


def parse(text: str, name: str) -> tuple[list[Run], list[str]]:
    """The runs in a log called `name`, and what is wrong with it, by line."""
    reader = _Reader(name)
    for number, line in enumerate(text.splitlines(), 1):
        reader.take(number, _TAGGED.sub("", line.rstrip()))
    return reader.done()


class _Reader:
    def __init__(self, name: str) -> None:
        self.runs: list[Run] = []
        self.wrong: list[str] = []
        self._named = _NAMED.search(name.lower().replace("-", "_").replace("all_to_all", "alltoall"))
        self._test: str | None = None

    def take(self, number: int, line: str) -> None:
        if test := _TEST.search(line):
            self._test = KINDS[test[1]]
        if begins := _BEGINS.match(line):
            self.runs.append(Run(number, int(begins[1])))
        elif not self.runs:
            return
        run = self.runs[-1]
        if run.kind is None:
            run.kind = self._test
        if rank := _RANK.match(line):
            self._rank(number, run, rank)
        elif line.startswith("#"):
            words = line[1:].split()
            if words[:2] == ["size", "count"]:
                run.columns = words
            elif words[:2] == ["(B)", "(elements)"] and "(us)" not in words:
                self.wrong.append(f"line {number}: times are not in microseconds: '{cut_short(line)}'")
        elif re.match(r"\s*\d+\s+\d+\s+[a-z]", line):
            self._row(number, run, line)

    def _rank(self, number: int, run: Run, rank: re.Match[str]) -> None:
        group = run.hosts.setdefault(int(rank[2] or 0), {})
        if int(rank[1]) in group:
            self.wrong.append(
                f"line {number}: rank {rank[1]} for the second time: each process measured itself alone "
                "(nccl-tests must be built with MPI=1 to run on several)"
            )
        group[int(rank[1])] = rank[3]
        run.device = run.device or printable(rank[4].strip())

    def _row(self, number: int, run: Run, line: str) -> None:
        values = line.split()
        if not run.columns:
            self.wrong.append(f"line {number}: a row before the line that names its columns (# size count type …)")
            return
        if len(values) != len(run.columns):
            self.wrong.append(
                f"line {number}: {len(values)} values for {len(run.columns)} columns: '{cut_short(line.strip())}'"
            )
            return
        size = int(values[0])
        for at in (i for i, column in enumerate(run.columns) if column == "time"):
            if values[at] == "N/A" or size == 0:
                continue
            if reason := _wrong_with(size, *values[at : at + 4], last=run.columns[at + 3 : at + 4]):
                self.wrong.append(f"line {number}: {reason}")
                continue
            run.seconds[size].append(float(values[at]) / 1e6)

    def done(self) -> tuple[list[Run], list[str]]:
        if not self.runs:
            return [], ["line 1: not a log of nccl-tests: no line begins with '# nThread'"]
        for run in self.runs:
            if run.kind is None and self._named:
                run.kind = KINDS[self._named[0]]
            self.wrong += [] if self.wrong else _wrong_with_run(run)
        return self.runs, self.wrong


def _wrong_with(size: int, time: str, algbw: str, busbw: str, wrong: str = "0", *, last: list[str]) -> str | None:
    try:
        microseconds, rate = float(time), float(algbw)
        float(busbw)
    except ValueError:
        return f"'{cut_short(f'{time} {algbw} {busbw}')}' is not a time and two bandwidths"
    if microseconds <= 0:
        return f"a time of {time} us"
    if last == ["#wrong"] and wrong not in ("0", "N/A"):
        return f"{wrong} results were wrong: such a run says nothing"
    if abs(size / microseconds / 1e3 - rate) > _ROUNDING * rate + 0.01:
        return f"{size:,} bytes in {time} us are not {algbw} GB/s"
    return None


def _wrong_with_run(run: Run) -> Iterator[str]:
    if not run.seconds:
        yield f"line {run.line}: a run without a row of times"
    elif not run.hosts:
        yield f"line {run.line}: a run without '#  Rank' lines: how many ranks there are is not said"
    elif run.ranks < 2:
        yield f"line {run.line}: a run of one rank, which exchanges nothing"
    elif run.kind is None:
        tests = ", ".join(f"{test}_perf" for test in KINDS)
        yield f"line {run.line}: which test it is, is not said: put its name into the file's ({tests})"


def _exchanges(runs: list[tuple[Path, Run]]) -> Iterator[Exchange]:
    """By kind, ranks and nodes. The median of all times of a size, between their extremes: out of place and in place,
    in one log or in several.
    """
    groups: dict[tuple[str, int, int], list[tuple[Path, Run]]] = defaultdict(list)
    for path, run in runs:
        assert run.kind is not None
        groups[run.kind, run.ranks, run.nodes].append((path, run))
    for (kind, ranks, nodes), of in sorted(groups.items()):
        seconds: dict[int, list[float]] = defaultdict(list)
        for _, run in of:
            for size, times in run.seconds.items():
                seconds[size] += times
        sizes = sorted(seconds)
        grid = Grid(
            axes=("bytes",),
            sizes=(tuple(map(float, sizes)),),
            seconds=tuple(_as_printed(statistics.median(seconds[size])) for size in sizes),
            low_seconds=tuple(_as_printed(min(seconds[size])) for size in sizes),
            high_seconds=tuple(_as_printed(max(seconds[size])) for size in sizes),
            repeats=sum(run.repeats for _, run in of),
            tag="measured",
            source=f"nccl-tests, {_names(of)}: {ranks} ranks on {nodes} node{'s' * (nodes > 1)}, {of[0][1].device}",
        )
        yield Exchange(kind, ranks, nodes, grid)


def _as_printed(seconds: float) -> float:
    """Without the binary dust of a division, which would put one time of a size beside another that is the same."""
    return round(seconds, 10)


def _names(of: list[tuple[Path, Run]]) -> str:
    return cut_short(", ".join(dict.fromkeys(printable(path.name) for path, _ in of)), LONGEST_NAMES)
