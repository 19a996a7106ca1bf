"""Published runs, a JSON object a line, with what is wrong in a line as a reason.

The fields are those of the rows that are shipped (`data/measured/published.jsonl`); an absent one means that the source
does not say. An unknown one is a slip and is refused by name, but for other quantities that were measured or derived.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanum import files
from nanum.errors import Refused, cut_short

SHIPPED = Path(__file__).resolve().parents[1] / "data" / "measured" / "published.jsonl"
LARGEST_FILE_BYTES = 64 * 2**20
MOST_REASONS = 20

Check = Callable[[Any], bool]


MOST = 2**31
"""Of what is counted: beyond any model, machine or batch."""


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST


def _between(least: float, most: float) -> tuple[str, Check]:
    def within(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most

    return f"a number from {least:g} to {most:g}", within


def _one_of(*words: str) -> tuple[str, Check]:
    return f"{', '.join(words[:-1])} or {words[-1]}", lambda value: value in words


WHOLE = (f"a whole number from 1 to {MOST:,}", _whole)
MEASURED = _between(1e-9, 1e12)
TEXT = ("text", lambda value: isinstance(value, str))
FLAG = ("true or false", lambda value: isinstance(value, bool))
STAGE = ("0, 1, 2 or 3", lambda value: type(value) is int and 0 <= value <= 3)
WHOLE_OR_TEXT = (f"a whole number from 1 to {MOST:,}, or text", lambda value: _whole(value) or isinstance(value, str))
WORD = (
    "printable text, of a thousand characters at most",
    lambda value: isinstance(value, str) and bool(value.strip()) and value.isprintable() and len(value) <= 1000,
)

FIELDS: dict[str, tuple[str, Check]] = {
    "id": WORD,
    **dict.fromkeys(("source", "row_kind", "family", "task", "recompute", "precision", "schedule", "overlap"), TEXT),
    "dispatcher": _one_of("alltoall", "flex"),
    "cuda_graphs": _one_of("none", "router", "partial", "full"),
    "grad_reduce": _one_of("bf16", "fp32"),
    "attention_library": _one_of("cudnn", "flash"),
    **dict.fromkeys(("micro_batch", "global_batch", "model.mtp_layers"), WHOLE),
    "expert_capacity": _between(1e-6, 1e6),
    "oom": FLAG,
    "launch_blocking": FLAG,
    "model.name": TEXT,
    **dict.fromkeys((f"model.{n}" for n in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq")), WHOLE),
    **dict.fromkeys((f"model.moe.{n}" for n in ("experts", "topk", "moe_ffn", "shared_ffn", "shared_experts")), WHOLE),
    **dict.fromkeys(("model.moe.dense_layers", "model.moe.head_dim"), WHOLE),
    **dict.fromkeys(("model.moe.attention", "model.moe.sliding_window"), TEXT),
    "hardware.gpu": TEXT,
    "hardware.gpus_per_node": WHOLE,
    **dict.fromkeys((f"layout.{n}" for n in ("gpus", "tp", "pp", "dp", "cp", "ep", "etp")), WHOLE),
    "layout.vpp": WHOLE_OR_TEXT,
    "layout.zero_stage": STAGE,
    "layout.sequence_parallel": FLAG,
    **dict.fromkeys((f"measured.{n}" for n in ("step_time_s", "tokens_per_s_per_gpu", "memory_gb")), MEASURED),
    "measured.memory_def": TEXT,
    "derived.step_time_s": MEASURED,
}
"""By their paths. What is below `measured` and `derived` and not here is another quantity of the same run."""
OBJECTS = ("model", "model.moe", "hardware", "layout", "measured", "derived")
OPEN = ("measured", "derived")
NEARLY = 0.9
"""How alike a key must be to one that is read there (by `difflib`), to be a slip of it."""
UNREAD = (
    *("confidence", "notes", "micro_batches", "memory_by_rank", "memory_reserved_gib", "model.params_b"),
    *("model.config_source", "hardware.intra_node", "hardware.inter_node", "hardware.memory_gb", "hardware.notes"),
)
"""What such rows say besides, for people."""


@dataclass(frozen=True)
class Row:
    """One published run, its fields by their paths."""

    fields: Mapping[str, Any]

    def __getitem__(self, path: str) -> Any:
        """The field, or None where the source does not say."""
        return self.fields.get(path)

    @property
    def id(self) -> str:
        return str(self.fields["id"])

    @property
    def source(self) -> str:
        """Whose run it is: the id up to its first dash, and a part of those that had better not be mixed."""
        name, _, rest = self.id.partition("-")
        if name == "vtrain":
            return f"{name}/{'single' if rest.startswith('single') else 'multi'}"
        if name in ("mbridge", "simumax", "dgxc"):
            return f"{name}/{'dense' if (self['family'] or 'dense') == 'dense' else 'moe'}"
        return name

    @property
    def unseen(self) -> str:
        """The source that its coefficients never saw: its own; of what is held out, the one that stands for it, or
        none: those are of all sources that a fit sees.
        """
        return HELD_OUT.get(self.source, self.source)


HELD_OUT = {"vtrainlarge": "vtrain/multi", "dgxc/dense": "", "dgxc/moe": "", "dgxc25": ""}
"""Sources that no fit and no range sees. Where one is of a table, machine and software with another, its coefficients
are those that saw neither; the others' are those of all sources that a fit sees, which are a user's."""
LAUNCHES = re.compile(r"vtrain-single-.*-(\d{1,9})")
MODULES = {
    "model.name": "Qwen3-30B-A3B",
    "hardware.gpu": "H100-SXM5-80GB",
    "micro_batch": 1,
    "overlap": "none",
    "cuda_graphs": "none",
}


def tells_launches(row: Row) -> bool:
    """Is a run one of those that tell what a software stack's launches cost, as a user's own few steps would? They are
    at most a twentieth of their source's, have a part in each fit, and none in a score: every twentieth of vTrain's on
    one node; and of Megatron-Bridge the small experts on H100, one sequence at a time, without a CUDA graph and without
    exchanges beside compute.
    """
    if number := LAUNCHES.fullmatch(row.id):
        return int(number[1]) % 20 == 0
    return row.source == "mbridge/moe" and all(row[path] == value for path, value in MODULES.items())


def read(file: Path | None = None) -> list[Row]:
    """The rows of a file, or those that are shipped. A run that is shipped too is completed by what is said there.

    Raises Refused with every reason.
    """
    if file is None:
        return _read(SHIPPED)
    rows, shipped = _read(file), {row.id: row for row in _read(SHIPPED)}
    return [_completed(row, shipped[row.id]) if row.id in shipped else row for row in rows]


RUN = ("model.", "hardware.", "layout.", "micro_batch", "global_batch", "precision")
"""What tells a run from another, and not only what is told of it."""


def _completed(row: Row, shipped: Row) -> Row:
    """With what the shipped row of its id says besides, from scripts and recipes, of how the same run was made; but for
    what was measured. As it is where the two are not of one run.
    """
    said = {path: value for path, value in shipped.fields.items() if not path.startswith(OPEN)}
    one_run = all(row[path] in (None, value) for path, value in said.items() if path.startswith(RUN))
    return Row({**said, **row.fields}) if one_run else row


def _read(path: Path) -> list[Row]:
    raw = files.read(path, "a file of published runs", LARGEST_FILE_BYTES)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise Refused(f"{path}: not UTF-8, which JSON is written in") from None
    reasons: list[str] = []
    rows: list[Row] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}: line {number}"
        row, wrong = _row(line)
        if row is not None and row.id in seen:
            wrong = [f"id {cut_short(row.id)} is line {seen[row.id]}'s already"]
        reasons += [f"{where}: {reason}" for reason in wrong]
        if row is not None:
            seen.setdefault(row.id, number)
            rows.append(row)
    if not rows and not reasons:
        reasons = [f"{path}: there is no row in it"]
    if reasons:
        more = len(reasons) - MOST_REASONS
        raise Refused([*reasons[:MOST_REASONS], *([f"{path}: and {more} more like these"] if more > 0 else [])])
    return rows


def _row(line: str) -> tuple[Row | None, list[str]]:
    """A line as a row, or every reason why it is none."""
    try:
        table = json.loads(line)
    except (ValueError, RecursionError):
        return None, ["not a JSON object"]
    if not isinstance(table, dict):
        return None, ["not a JSON object"]
    wrong: list[str] = []
    for path in OBJECTS:
        found = _at(table, path)
        if found is not None and not isinstance(found, dict):
            wrong.append(f"{path} = {cut_short(json.dumps(found))} is not an object")
    wrong += _unknown(table)
    fields: dict[str, Any] = {}
    for path, (what, check) in FIELDS.items():
        value = _at(table, path)
        if value is None:
            continue
        if check(value):
            fields[path] = value
        else:
            wrong.append(f"{path} = {cut_short(json.dumps(value))} is not {what}")
    if _at(table, "id") is None:
        wrong.append("it has no id")
    if "model.moe" not in fields and isinstance(_at(table, "model.moe"), dict):
        fields["model.moe"] = True
    return (None, wrong) if wrong else (Row(fields), [])


def _unknown(table: Mapping[str, Any]) -> Iterator[str]:
    for parent in ("", *OBJECTS):
        inside = _at(table, parent) if parent else table
        for key in inside if isinstance(inside, dict) else ():
            path = f"{parent}.{key}" if parent else key
            if path in KNOWN:
                continue
            if parent in OPEN and any(path.startswith(f"{known}_") for known in FIELDS):
                continue  # the spread of what is read, or its like
            close = difflib.get_close_matches(path, READ, n=1, cutoff=NEARLY if parent in OPEN else 0.6)
            if close or parent not in OPEN:
                yield f"unknown key {cut_short(path)}" + (f" (did you mean {close[0]}?)" if close else "")


READ = (*FIELDS, *OBJECTS)
KNOWN = frozenset((*READ, *UNREAD))


def _at(table: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(table, dict):
            return None
        table = table.get(key)
    return table
