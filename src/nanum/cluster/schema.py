"""The door for a user's cluster file: which keys its tables have, and what each may be."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from nanum.cluster.grids import AXES, SECONDS, repeated, wrong_with_grid
from nanum.cluster.observed import coefficient, wrong_with_covariance
from nanum.cluster.quantity import LONGEST_SOURCE, Tag
from nanum.cluster.tables import LINK_KEYS, chip_names, link_tables, quantity, said, unknown_chip
from nanum.errors import LONGEST_NAME, cut_short
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
Name = Annotated[str, Field(strict=True, min_length=1, max_length=LONGEST_NAME), AfterValidator(_printable)]
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


class HostTable(_Table):
    name: Name | None = None
    bandwidth: Annotated[Any, _of("bytes_per_second")] = "1 B/s"
    efficiency: Annotated[Any, _of("ratio")] = 1
    latency: Annotated[Any, _of("seconds")] = "0 s"
    memory_bandwidth: Annotated[Any, _of("bytes_per_second")] = "1 B/s"


class ChipTable(_Table):
    name: Name
    memory: Annotated[Any, _of("bytes")]
    memory_bandwidth: Annotated[Any, _of("bytes_per_second")]
    multiprocessors: Annotated[Any, _of("count")]
    peak: Annotated[dict[Dtype, Flops], Field(min_length=1)]
    best: dict[Dtype, Flops] = Field(default_factory=dict)


def _number(least: float, most: float) -> AfterValidator:
    def check(raw: Any) -> Any:
        if not isinstance(raw, int | float) or isinstance(raw, bool) or not least <= raw <= most:
            raise ValueError(f"{said(raw)} is not a number from {least:g} to {most:g}")
        return raw

    return AfterValidator(check)


Slower = Annotated[Any, _number(0.1, 1000)]
"""Seconds over seconds. Noise may take it below 1."""
Source = Annotated[str, Field(strict=True, min_length=1, max_length=LONGEST_SOURCE), AfterValidator(_printable)]


class _GridTable(_Table):
    seconds: Any
    low_seconds: Any
    high_seconds: Any
    repeats: Whole
    tag: Tag | None = None
    source: Source | None = None

    @model_validator(mode="before")
    @classmethod
    def _numbers(cls, table: Any) -> Any:
        axes = cls.axes()
        whole = isinstance(table, dict) and all(key in table for key in (*axes, *SECONDS))
        if whole and (wrong := wrong_with_grid(table, axes)):
            raise ValueError("; ".join(wrong))
        return table

    @classmethod
    def axes(cls) -> tuple[str, ...]:
        return AXES[cls.__name__.removesuffix("Grid").lower()]


class MatmulGrid(_GridTable):
    dtype: Dtype
    operands: Literal["nt", "nn", "tn"]
    m: Any
    n: Any
    k: Any


class KernelGrid(_GridTable):
    dtype: Dtype
    name: Name
    bytes: Any


class AttentionGrid(_GridTable):
    dtype: Dtype
    direction: Literal["forward", "backward"]
    rows: Any
    seq_len: Any
    head_dim: Any


class OptimizerGrid(_GridTable):
    dtype: Dtype
    bytes: Any


class ExchangeGrid(_GridTable):
    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "broadcast"]
    ranks: Annotated[int, Field(ge=2, le=LARGEST, strict=True)]
    nodes: Whole
    bytes: Any


class BesideTable(_Table):
    ranks: Whole
    compute: Slower
    exchange: Slower


class TogetherTable(_Table):
    ranks: Annotated[int, Field(ge=2, le=LARGEST, strict=True)]
    matmul: Slower = None
    kernel: Slower = None
    attention: Slower = None
    optimizer: Slower = None


Overhead = Annotated[Any, _number(0, 100)]


class FrameworkTable(_Table):
    parameter: Overhead = None
    sharded_parameter: Overhead = None
    unit: Overhead = None
    bucket: Overhead = None
    redistribution: Overhead = None


class MeasuredTable(_Table):
    tag: Tag
    source: Source
    streams: Annotated[bool, Field(strict=True)] = True
    operation_seconds: Annotated[Any, _number(1e-9, 1)] = None
    beside: BesideTable | None = None
    together: TogetherTable | None = None
    framework: FrameworkTable | None = None
    matmul: list[MatmulGrid] = Field(default_factory=list)
    kernel: list[KernelGrid] = Field(default_factory=list)
    attention: list[AttentionGrid] = Field(default_factory=list)
    optimizer: list[OptimizerGrid] = Field(default_factory=list)
    exchange: list[ExchangeGrid] = Field(default_factory=list)


def _coefficient(name: str) -> AfterValidator:
    def check(raw: Any) -> Any:
        coefficient(name, raw, "")
        return raw

    return AfterValidator(check)


Observed = Annotated[Any, _number(1e-6, 1e6)]
"""Seconds of a step."""


def _texts(raw: Any) -> Any:
    if not isinstance(raw, list) or not all(isinstance(each, str) and each.isprintable() for each in raw):
        raise ValueError(f"{said(raw)} is not a list of printable texts")
    return raw


class ObservationTable(_Table):
    model: Name
    engine: Name
    precision: Name
    layout: Source
    seconds: Observed
    predicted_seconds: Observed
    doubts: Annotated[Any, AfterValidator(_texts)] = Field(default_factory=list)


class InAStepTable(_Table):
    matmul: Annotated[Any, _coefficient("matmul")] = None
    matmul_untabled: Annotated[Any, _coefficient("matmul_untabled")] = None
    matmul_fp8: Annotated[Any, _coefficient("matmul_fp8")] = None
    attention: Annotated[Any, _coefficient("attention")] = None
    memory: Annotated[Any, _coefficient("memory")] = None
    host_seconds: Annotated[Any, _coefficient("host_seconds")] = None
    expert_seconds: Annotated[Any, _coefficient("expert_seconds")] = None
    intra_node: Annotated[Any, _coefficient("intra_node")] = None
    inter_node: Annotated[Any, _coefficient("inter_node")] = None
    beside: Annotated[Any, _coefficient("beside")] = None
    covariance: Any = Field(default_factory=dict)
    observation: list[ObservationTable] = Field(default_factory=list)

    @model_validator(mode="after")
    def _a_covariance(self) -> Any:
        if wrong := wrong_with_covariance(self.covariance):
            raise ValueError(wrong)
        return self


class ClusterTable(_Table):
    name: Name | None = None
    nodes: Whole
    gpus_per_node: Whole
    chip: Any
    launch_blocking: Annotated[bool, Field(strict=True)] = False
    intra_node: LinkTable | None = None
    inter_node: LinkTable | None = None
    host: HostTable | None = None
    measured: MeasuredTable | None = None
    in_a_step: InAStepTable | None = None


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
    if twice := repeated(table.get("measured", {})):
        return [f"measured.{grid} stands twice" for grid in twice]
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
        owner = _owner(schema, detail["loc"][:-1])
        close = difflib.get_close_matches(steps[-1], owner.model_fields, n=1)
        return f"unknown key '{cut_short(key)}'" + (f" (did you mean {close[0]}?)" if close else "")
    if kind == "value_error":
        return f"{key}: {detail['ctx']['error']}"
    if kind == "literal_error":
        return f"{key} is none of {detail['ctx']['expected']}"
    if kind.startswith(("int", "greater", "less")):
        least = detail.get("ctx", {}).get("ge", 1)
        return f"{key} = {said(given)} is not a whole number from {least} to {LARGEST:,}"
    if kind in ("model_type", "dict_type"):
        return f"{key} = {said(given)} is not a table"
    if kind == "list_type":
        return f"{key} = {said(given)} is not a list of tables ([[{key}]])"
    if kind == "bool_type":
        return f"{key} = {said(given)} is neither true nor false"
    if kind == "string_type":
        return f"{key} = {said(given)} is not text"
    return f"{key} = {said(given)}: {detail['msg'][0].lower()}{detail['msg'][1:]}"


def _owner(schema: type[_Table], path: tuple[Any, ...]) -> type[_Table]:
    """The table that a key was written into."""
    for step in path:
        if step in schema.model_fields:
            inside = _tables_in(schema.model_fields[step].annotation)
            schema = inside[0] if inside else schema
    return schema


def _tables_in(annotation: Any) -> list[type[_Table]]:
    if isinstance(annotation, type) and issubclass(annotation, _Table):
        return [annotation]
    return [table for part in get_args(annotation) for table in _tables_in(part)]
