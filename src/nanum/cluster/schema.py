"""The door for a user's cluster file: which keys its tables have, and what each may be."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from nanum.cluster.tables import LINK_KEYS, chip_names, link_tables, quantity, said, unknown_chip
from nanum.errors import cut_short
from nanum.units import LARGEST, Dimension


def _of(dimension: Dimension) -> AfterValidator:
    def check(raw: Any) -> Any:
        quantity(raw, dimension, "")
        return raw

    return AfterValidator(check)


def _printable(name: str) -> str:
    if not name.isprintable():  # it would move a terminal's cursor
        raise ValueError(f"{name!r} has characters that cannot be printed")
    return name


Whole = Annotated[int, Field(ge=1, le=LARGEST, strict=True)]
Name = Annotated[str, Field(strict=True, min_length=1, max_length=200), AfterValidator(_printable)]
Flops = Annotated[Any, _of("flops_per_second")]
Dtype = Literal["fp32", "bf16", "fp16", "fp8"]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid")


class LinkTable(_Table):
    name: Name | None = None
    bandwidth: Annotated[Any, _of("bytes_per_second")] = "1 B/s"
    efficiency: Annotated[Any, _of("ratio")] = 1
    latency: Annotated[Any, _of("seconds")] = "0 s"
    group_size: Whole | None = None


class ChipTable(_Table):
    name: Name
    memory: Annotated[Any, _of("bytes")]
    memory_bandwidth: Annotated[Any, _of("bytes_per_second")]
    multiprocessors: Annotated[Any, _of("count")]
    peak: Annotated[dict[Dtype, Flops], Field(min_length=1)]
    best: dict[Dtype, Flops] = Field(default_factory=dict)


class ClusterTable(_Table):
    name: Name | None = None
    nodes: Whole
    gpus_per_node: Whole
    chip: Any
    intra_node: LinkTable | None = None
    inter_node: LinkTable | None = None


def reasons(table: Mapping[str, Any]) -> list[str]:
    """Every reason why `table` is not a cluster; empty when it is one."""
    found = list(_invalid(ClusterTable, table))
    chip = table.get("chip")
    if isinstance(chip, str):
        if chip.lower() not in chip_names():
            found.append(unknown_chip(chip))
    elif isinstance(chip, dict):
        found += list(_invalid(ChipTable, chip, "chip.")) or _too_good(chip)
    elif chip is not None:
        found.append(f"chip = {said(chip)} is neither a chip's name nor a [chip] table")
    if found:
        return found
    if table["nodes"] * table["gpus_per_node"] > LARGEST:
        return [f"nodes * gpus_per_node = {table['nodes'] * table['gpus_per_node']:,}, but at most {LARGEST:,} GPUs"]
    return [
        f"{tier}.{key} is missing, and a chip of one's own brings no link"
        for tier, link in zip(("intra_node", "inter_node"), link_tables(table), strict=True)
        for key in LINK_KEYS
        if link.get(key) is None
    ]


def _too_good(chip: Mapping[str, Any]) -> list[str]:
    """Of a good chip table: no matmul is faster than its peak."""
    peaks = {dtype: quantity(raw, "flops_per_second", "").value for dtype, raw in chip["peak"].items()}
    best = {dtype: quantity(raw, "flops_per_second", "").value for dtype, raw in chip.get("best", {}).items()}
    return [
        f"chip.best.{dtype} is more than chip.peak.{dtype}: {value:g} of {peaks[dtype]:g} FLOPS"
        for dtype, value in best.items()
        if value > peaks.get(dtype, value)
    ]


def _invalid(schema: type[_Table], table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    try:
        schema.model_validate(dict(table))
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            yield _reason(schema, detail, prefix)


def _reason(schema: type[_Table], detail: Any, prefix: str) -> str:
    steps = [str(step) for step in detail["loc"] if step != "[key]"]
    key = prefix + ".".join(steps)
    kind, given = detail["type"], detail["input"]
    if kind == "missing":
        return f"{key} is missing"
    if kind == "extra_forbidden":
        owner = LinkTable if steps[0] in ("intra_node", "inter_node") and len(steps) > 1 else schema
        close = difflib.get_close_matches(steps[-1], owner.model_fields, n=1)
        return f"unknown key '{cut_short(key)}'" + (f" (did you mean {close[0]}?)" if close else "")
    if kind == "value_error":
        return f"{key}: {detail['ctx']['error']}"
    if kind == "literal_error":
        return f"{key} is none of {detail['ctx']['expected']}"
    if kind.startswith(("int", "greater", "less")):
        return f"{key} = {said(given)} is not a whole number from 1 to {LARGEST:,}"
    if kind in ("model_type", "dict_type"):
        return f"{key} = {said(given)} is not a table"
    if kind == "string_type":
        return f"{key} = {said(given)} is not text"
    return f"{key} = {said(given)}: {detail['msg'][0].lower()}{detail['msg'][1:]}"
