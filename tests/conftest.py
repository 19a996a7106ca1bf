"""What several tests share: the command as a user runs it, documents by hand, and the lesson as text."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings
from rich.console import Console

from nanum import cli, lesson
from nanum.lesson.page import Page
from nanum.lesson.words import Words

# The same examples each time: what passes here passes everywhere. No deadline: a slow machine is not a wrong answer.
settings.register_profile("nanum", deadline=None, derandomize=True, max_examples=100)
settings.load_profile("nanum")

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def nanum() -> Run:
    """`nanum(*words)`, with stdout and stderr apart, in this process: a start of Python and its imports are saved."""

    def run(
        *words: str, cwd: Path | None = None, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="") for _ in range(2))
        with (
            contextlib.chdir(cwd or "."),
            mock.patch.dict(os.environ, env or {}),
            mock.patch.object(sys, "argv", ["nanum", *words]),
            mock.patch.object(sys, "excepthook", sys.excepthook),  # which typer sets
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as ends,
        ):
            cli.main()
        said = []
        for stream in (out, err):
            stream.flush()
            said.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
        return subprocess.CompletedProcess(words, int(ends.value.code or 0), *said)

    return run


@pytest.fixture(scope="session")
def nanum_process() -> Run:
    """`nanum(*words)` as a process of its own, as a user starts it."""

    def run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        options = {"capture_output": True, "text": True, "timeout": 120, "encoding": "utf-8"} | options
        return subprocess.run([sys.executable, "-m", "nanum", *words], check=False, **options)

    return run


NODE = "1x8xh100-sxm"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1000,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
"""A model's file, as published ones are."""


def _stage(stage: int, params: int, activations: int) -> dict[str, Any]:
    by_category = {
        "params": params,
        "grads": params,
        "optimizer_states": 2 * params,
        "activations": activations,
        "buffers": 1024,
    }
    return {"stage": stage, "allocated_peak_bytes": sum(by_category.values()), "by_category": by_category}


def _row(stage: int, axis: str, kind: str, phase: str, what: str, calls: int, payload_bytes: int) -> dict[str, Any]:
    return {
        "stage": stage,
        "axis": axis,
        "kind": kind,
        "phase": phase,
        "what": what,
        "dtype": "bf16",
        "group_size": 16,
        "link": "inter_node",
        "calls": calls,
        "payload_bytes": payload_bytes,
        "wire_bytes": payload_bytes * 15 // 16,
        "seconds": payload_bytes / 50e9,
        "exposed_seconds": payload_bytes / 500e9,
    }


PREDICTION: dict[str, Any] = {
    "engine": {"name": "torchtitan", "version": "0.2.0"},
    "model": {"name": "llama-3.1-70b", "parameters": 70_553_706_496, "active_parameters": 70_553_706_496},
    "job": {"seq_len": 8192, "global_batch_size": 512, "precision": "bf16", "optimizer": "adamw"},
    "cluster": {"name": "8x8xh100-sxm", "nodes": 8, "gpus_per_node": 8, "chip": "h100-sxm"},
    "layout": {
        "dp_replicate": 1,
        "dp_shard": 16,
        "cp": 1,
        "tp": 1,
        "pp": 4,
        "ep": 1,
        "etp": 1,
        "zero": 3,
        "reshard": True,
        "schedule": "1f1b",
        "virtual_stages": 1,
        "recompute": "full",
        "micro_batch_size": 1,
        "sp": False,
        "attention": "flash",
        "compile": False,
        "rank_order": "pp,dp_replicate,dp_shard,cp,tp",
    },
    "fits": True,
    "memory": {
        "capacity_bytes": 85_520_809_984,
        "worst": {
            "stage": 0,
            "moment": "the last backward of layer 19",
            "allocated_bytes": 53_687_092_224,
            "reserved_bytes": 55_834_574_848,
            "device_bytes": 57_982_058_496,
            "device_bytes_high": 61_203_283_968,
            "context_bytes": 2_147_483_648,
        },
        "stages": [
            _stage(0, 10_737_418_240, 10_737_418_240),
            _stage(1, 8_589_934_592, 8_589_934_592),
            _stage(2, 8_589_934_592, 8_589_934_592),
            _stage(3, 9_663_676_416, 4_294_967_296),
        ],
    },
    "communication": [
        row
        for stage in range(4)
        for row in (
            _row(stage, "dp_shard", "all_gather", "forward", "params", 2688, 1_128_859_303_936),
            _row(stage, "dp_shard", "reduce_scatter", "backward", "grads", 672, 564_429_651_968),
            _row(stage, "pp", "send", "forward", "activations", 32 if stage < 3 else 0, 4_294_967_296),
        )
        if row["calls"]
    ],
    "time": {
        "step_seconds": 8.0,
        "step_seconds_low": 7.25,
        "step_seconds_high": 9.5,
        "compute_seconds": 6.0,
        "exposed_communication_seconds": 1.0,
        "bubble_seconds": 0.75,
        "optimizer_seconds": 0.25,
        "bubble_fraction": 0.09375,
        "serial_fraction": 0.0123,
    },
    "throughput": {
        "tokens_per_second": 524_288.0,
        "tokens_per_second_per_gpu": 8_192.0,
        "model_flops": 2.0e18,
        "mfu": 0.412,
        "hfu": 0.538,
        "peak_flops_per_second": 989.4e12,
    },
    "assumptions": [
        {
            "what": "inter_node.bytes_per_second",
            "value": 50e9,
            "unit": "bytes_per_second",
            "tag": "assumed",
            "source": "400 Gb/s a GPU, where no link is named",
        },
        {
            "what": "chip.memory_bytes",
            "value": 85_520_809_984,
            "unit": "bytes",
            "tag": "measured",
            "source": "[nvidia-smi] on the node",
        },
    ],
    "unmodelled": ["stragglers", "[failures] and restarts"],
}


@pytest.fixture
def prediction_document() -> dict[str, Any]:
    """`predict`'s document, by the contract, of a pipeline of four stages that fits."""
    return copy.deepcopy(PREDICTION)


@pytest.fixture
def plan_document(prediction_document: dict[str, Any]) -> dict[str, Any]:
    """`plan`'s document, by the contract, with three layouts ranked, the last of which is a near tie."""
    second = copy.deepcopy(prediction_document)
    second["layout"] |= {"tp": 8, "dp_shard": 2, "sp": True}
    second["time"]["step_seconds"] = 9.0
    tie = copy.deepcopy(second)
    tie["layout"] |= {"dp_replicate": 2, "dp_shard": 1}
    return {
        "count": {"enumerated": 5400, "impossible": 1200, "too_large": 4000, "ranked": 200, "several_stages": 7},
        "seconds": 0.31,
        "best": [prediction_document, second, tie],
        "shortlist": [
            {**prediction_document, "place": 1, "near_ties": []},
            {**second, "place": 2, "near_ties": [{**tie, "place": 3}]},
        ],
        "rejected": [{"why": "tp=7 does not divide num_attention_heads=64", "count": 1200}],
        "question": {key: prediction_document[key] for key in ("engine", "model", "job", "cluster")},
        "least": None,
        "explanations": ["dp_shard 16 · pp 4 beats tp 8: 1.0 s less of exposed communication"],
    }


def nothing(done: int, total: int, what: str = "", /) -> None:
    """Progress that nobody watches."""


def printed(lang: str, part: str, document: dict[str, Any], width: int = 80) -> str:
    """What a part of the lesson prints."""
    page = io.StringIO()
    lesson.PRINTERS[part](document, Page(Words(lang), Console(file=page, width=width, highlight=False)))
    return page.getvalue()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The keys of the lesson's texts that were printed so far."""
    keys: set[str] = set()
    say = Words.__call__

    def noted(words: Words, key: str, **values: object) -> str:
        keys.add(key)
        return say(words, key, **values)

    monkeypatch.setattr(Words, "__call__", noted)
    return keys


def widest(text: str) -> int:
    """Columns of a terminal that the longest line takes."""
    console = Console(width=200)
    return max(console.measure(line).maximum for line in text.splitlines())
