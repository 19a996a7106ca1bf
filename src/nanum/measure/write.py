"""A cluster as the text of a TOML file: what `nanum.cluster.parse` reads back as the same cluster."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from nanum.cluster import Chip, Cluster, Host, InAStep, Link, Measured, Quantity
from nanum.cluster.grids import AXES, KEYS, SECONDS
from nanum.cluster.measured import Grid
from nanum.cluster.parse import default_host
from nanum.cluster.presets import chips

COLUMNS = 118


def text(cluster: Cluster) -> str:
    """The whole file. What the cluster says of its shipped chip is left to the chip's own table."""
    shipped = {chip.name: chip for chip in chips()}
    named = shipped.get(cluster.chip.name) == cluster.chip
    lines = [
        f"name = {_string(cluster.name)}",
        f"nodes = {cluster.nodes}",
        f"gpus_per_node = {cluster.gpus_per_node}",
        *([f"chip = {_string(cluster.chip.name)}"] if named else []),
        *(["launch_blocking = true"] if cluster.launch_blocking else []),
        *_link("intra_node", cluster.intra_node),
        *_link("inter_node", cluster.inter_node),
        *_host(cluster.host, cluster.chip.name if named else None),
        *([] if named else _chip(cluster.chip)),
        *_in_a_step(cluster.in_a_step),
        *_measured(cluster.measured),
    ]
    return "\n".join(lines) + "\n"


STRINGS = re.compile(r'"""(?:\\.|[^\\])*?"""|' r"'''.*?'''|" r'"(?:\\.|[^"\\\n])*"|' r"'[^'\n]*'", re.DOTALL)
"""Of TOML: between three or one of either quote, where a backslash counts in double ones alone."""


def has_comments(toml: str) -> bool:
    """Does a TOML file have comments, which `text` knows nothing of? A # in a string is none."""
    return "#" in STRINGS.sub("", toml)


def _chip(chip: Chip) -> Iterator[str]:
    yield from ("", "[chip]", f"name = {_string(chip.name)}")
    yield f"memory = {_quantity(chip.memory_bytes, 'B')}"
    yield f"memory_bandwidth = {_quantity(chip.memory_bytes_per_second, 'B/s')}"
    yield f"multiprocessors = {_quantity(chip.multiprocessors, '')}"
    for table, rates in (("peak", chip.peak_flops_per_second), ("best", chip.best_flops_per_second)):
        if rates:
            yield from ("", f"[chip.{table}]")
            yield from (f"{dtype} = {_quantity(rate, 'FLOPS')}" for dtype, rate in rates.items())


def _link(tier: str, link: Link) -> Iterator[str]:
    yield from _speeds(tier, link)
    yield f"group_size = {link.group_size}"


def _speeds(table: str, link: Link) -> Iterator[str]:
    yield from ("", f"[{table}]", f"name = {_string(link.name)}")
    yield f"bandwidth = {_quantity(link.bytes_per_second, 'B/s')}"
    yield f"efficiency = {_quantity(link.efficiency, '')}"
    yield f"latency = {_quantity(link.latency_seconds, 's')}"


def _host(host: Host | None, chip: str | None) -> Iterator[str]:
    """Where it is not what the chip brings."""
    if host is not None and host != default_host(chip):
        yield from _speeds("host", host.link)
        yield f"memory_bandwidth = {_quantity(host.memory_bytes_per_second, 'B/s')}"


def _in_a_step(own: InAStep | None) -> Iterator[str]:
    if own is None:
        return
    yield from ("", "[in_a_step]")
    for name, value in own.values:
        yield f"{name} = {_quantity(value, 's' if name.endswith('_seconds') else '')}"
    if own.sure:
        yield from ("", "[in_a_step.covariance]")
        for name, row in zip(own.sure, own.covariance, strict=True):
            yield from _array(name, row)
    for each in own.observations:
        yield from ("", "[[in_a_step.observation]]")
        yield from (f"{key} = {_string(getattr(each, key))}" for key in ("model", "engine", "precision", "layout"))
        yield f"seconds = {_number(each.seconds)}"
        yield f"predicted_seconds = {_number(each.predicted_seconds)}"
        if each.doubts:
            yield from ("doubts = [", *(f"    {_string(doubt)}," for doubt in each.doubts), "]")


def _measured(measured: Measured) -> Iterator[str]:
    if not measured:
        return
    grids = list(_grids(measured))
    said = Counter(_said(measured, [grid for *_, grid in grids])).most_common(1)
    tag, source = said[0][0] if said else ("assumed", "nothing was measured")
    yield from ("", "[measured]", f"tag = {_string(tag)}", f"source = {_string(source)}")
    yield f"streams = {'true' if measured.streams else 'false'}"
    if measured.operation_seconds is not None:
        yield f"operation_seconds = {_number(measured.operation_seconds.value)}"
    if measured.beside is not None:
        yield from ("", "[measured.beside]", f"ranks = {measured.beside.ranks}")
        yield f"compute = {_number(measured.beside.compute.value)}"
        yield f"exchange = {_number(measured.beside.exchange.value)}"
    if measured.together is not None:
        yield from ("", "[measured.together]", f"ranks = {measured.together.ranks}")
        yield from (f"{subject} = {_number(ratio.value)}" for subject, ratio in measured.together.ratios.items())
    if overheads := {name: q for name, q in vars(measured.framework).items() if q is not None}:
        yield from ("", "[measured.framework]")
        yield from (f"{name} = {_number(seconds.value)}" for name, seconds in overheads.items())
    for subject, keys, grid in grids:
        yield from ("", f"[[measured.{subject}]]")
        yield from (f"{name} = {_plain(key)}" for name, key in zip(KEYS[subject], keys, strict=True))
        for axis, sizes in zip(AXES[subject], grid.sizes, strict=True):
            yield from _array(axis, sizes)
        for name in SECONDS:
            yield from _array(name, getattr(grid, name))
        yield f"repeats = {grid.repeats}"
        if (grid.tag, grid.source) != (tag, source):
            yield from (f"tag = {_string(grid.tag)}", f"source = {_string(grid.source)}")


def _grids(measured: Measured) -> Iterator[tuple[str, tuple[Any, ...], Grid]]:
    for subject in ("matmul", "kernel", "attention"):
        yield from ((subject, keys, grid) for keys, grid in getattr(measured, subject).items())
    yield from (("optimizer", (dtype,), grid) for dtype, grid in measured.optimizer.items())
    yield from (("exchange", (e.kind, e.ranks, e.nodes), e.grid) for e in measured.exchanges)


def _said(measured: Measured, grids: list[Grid]) -> Iterator[tuple[str, str]]:
    """How each number is known. Those that are not of a grid have no place of their own for it, and so decide."""
    bare: list[Quantity | None] = [measured.operation_seconds]
    if measured.beside is not None:
        bare += [measured.beside.compute, measured.beside.exchange]
    if measured.together is not None:
        bare += measured.together.ratios.values()
    bare += vars(measured.framework).values()
    known = [q for q in bare if q is not None]
    yield from ((q.tag, q.source) for q in known or grids)


def _quantity(quantity: Quantity, unit: str) -> str:
    unit = f"unit = {_string(unit)}, " if unit else ""
    value = repr(quantity.value)
    return f"{{ value = {value}, {unit}tag = {_string(quantity.tag)}, source = {_string(quantity.source)} }}"


def _array(name: str, values: Iterable[float]) -> list[str]:
    line = f"{name} = [{', '.join(map(_number, values))}]"
    return textwrap.wrap(line, COLUMNS, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _number(value: float) -> str:
    """As TOML writes it: whole where it is, and digits enough to be read back as the same."""
    return repr(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def _plain(value: str | int) -> str:
    return _string(value) if isinstance(value, str) else str(value)


def _string(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
