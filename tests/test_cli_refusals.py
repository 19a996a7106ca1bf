"""What the command refuses: exit code 2, every reason in the user's words, and no traceback."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import LLAMA, NODE, Run


def reasons_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The reasons of a refusal, which must look like one: exit code 2, nothing on stdout, no traceback."""
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    assert all(line.startswith("nanum: ") for line in lines), done.stderr
    return [line.removeprefix("nanum: ") for line in lines]


HUGE = "9" * 5000


REFUSED = {
    "unknown model": (f"predict lama-3.1-8b {NODE}", ["lama-3.1-8b"]),
    "unknown chip": ("predict gpt2 1x8xh1000", ["h1000"]),
    "unknown cluster": ("predict gpt2 nowhere", ["nowhere"]),
    "negative": (f"predict gpt2 {NODE} --tp -2", ["--tp -2 must be at least 1"]),
    "zero": (f"predict gpt2 {NODE} --pp 0", ["--pp 0 must be at least 1"]),
    "NaN": (f"predict gpt2 {NODE} --tp nan", ["--tp nan is not a whole number"]),
    "infinite": (f"predict gpt2 {NODE} --tp inf", ["--tp inf is not a whole number"]),
    "fraction": (f"predict gpt2 {NODE} --tp 7.5", ["--tp 7.5 is not a whole number"]),
    "empty": (f"predict gpt2 {NODE} --tp ''", ["--tp '' is not a whole number"]),
    "text": (f"predict gpt2 {NODE} --seq-len long", ["--seq-len long is not a whole number"]),
    "huge": (
        f"predict gpt2 {NODE} --global-batch-size {HUGE}",
        ["--global-batch-size 99999999999999999999… must be at most 10,000,000"],
    ),
    "unknown choice": (
        f"predict gpt2 {NODE} --recompute some",
        ["--recompute some: must be none, selective or full, or of core_attn, layernorm, "],
    ),
    "chunks of a loss without": (
        f"predict gpt2 {NODE} --loss-chunks 0",
        ["--loss-chunks 0 must be at least 1", "--loss-chunks 0 is for --loss chunked"],
    ),
    "from 0": (f"predict gpt2 {NODE} --mtp-layers -1", ["--mtp-layers -1 must be at least 0"]),
    "a kind of none": (f"predict gpt2 {NODE} --cp-kind ring", ["--cp-kind ring is for --cp over 1"]),
    "a ratio without bounds": (
        f"predict mixtral-8x7b {NODE} --ep 8 --expert-imbalance 1e308",
        ["--expert-imbalance 1e308: must be a number of at least 1, and at most a million"],
    ),
    "a schedule of no engine": (
        f"predict llama-3.1-8b {NODE} --pp 2 --schedule zb-h2",
        ["schedule=zb-h2 is not in torchtitan"],
    ),
    "several stages": (
        f"predict llama-3.1-8b {NODE} --pp 2 --virtual-stages 2",
        ["use interleaved, looped-bfs, zb-h1, zbv, dualpipev"],
    ),
    "adapters over the layer": (
        f"predict gpt2 {NODE} --lora-rank 100000",
        ["lora_rank=100000 exceeds hidden_size=768"],
    ),
    "not modelled": (
        f"predict gpt2 {NODE} --schedule zbv --ep 2 --offload disk",
        [
            "schedule=zbv with virtual_stages=1 needs pp > 1",
            "ep=2, but gpt2 has no experts",
            "--offload disk: must be none, or of optimizer, params, activations, with a plus between",
        ],
    ),
    "parts of experts that are none": (f"predict gpt2 {NODE} --tp 2 --etp 1", ["etp=1, but gpt2 has no experts"]),
    "GPUs that do not divide": (
        f"predict gpt2 {NODE} --tp 3",
        [
            "tp 3 = 3 ranks, which do not divide the 8 GPUs of the cluster: none are left for --dp-shard",
            "tp=3 does not divide seq_len=1024",
        ],
    ),
    "rank order": (f"predict gpt2 {NODE} --rank-order tp,pp", ["--rank-order tp,pp"]),
    "missing model file": (f"predict no/such/config.json {NODE}", ["no/such/config.json"]),
    "missing cluster file": ("predict gpt2 no/such.toml", ["no/such.toml"]),
    "top": (f"plan gpt2 {NODE} --top 0", ["--top 0 must be at least 1"]),
    "what is read and what is broken": (
        f"plan gpt2 {NODE} --top 0 --seq-len 2048",
        ["--top 0 must be at least 1", "seq_len=2048 exceeds max_position_embeddings=1024"],
    ),
    "unknown engine": (
        f"predict llama-3.1-8b {NODE} --engine foo --tp 16 --dp-shard 1",
        ["--engine foo is unknown", "tp=16 does not divide num_key_value_heads=8", "the cluster has 8 GPUs"],
    ),
    "heads": (
        "predict llama-3.1-8b 1x7xh100-sxm --tp 7",
        [
            "tp=7 does not divide num_attention_heads=32",
            "num_key_value_heads=8 (of",
            "tp=7 does not divide seq_len=8192",
        ],
    ),
    "world size": (
        f"predict llama-3.1-8b {NODE} --tp 4 --dp-shard 4",
        ["dp_replicate·dp_shard·cp·tp·pp = 16, but the cluster has 8 GPUs"],
    ),
    "batch": (
        f"predict llama-3.1-8b {NODE} --pp 8 --global-batch-size 3",
        ["pp=8 needs at least 8 micro-batches, and there are 3: global_batch_size=3"],
    ),
    "a stage that ZeRO has not, of ranks": ("verify --ranks 2 --zero 9", ["--zero 9: must be 0, 1, 2 or 3"]),
    "a schedule that is none, of stages": (
        f"predict gpt2 {NODE} --pp 2 --schedule 2f2b --virtual-stages 2",
        ["--schedule 2f2b: must be gpipe, 1f1b"],
    ),
    "offloaded twice": (
        f"predict gpt2 {NODE} --offload params+params,optimizer",
        ["--offload params+params,optimizer: names params more than once"],
    ),
    "everything": (
        "plan nobody nowhere --seq-len 0 --precision fp4 --engine all --top x",
        ["nobody", "nowhere", "--seq-len 0", "--precision fp4", "--engine all", "--top x"],
    ),
    "everything of a layout": (
        "predict nobody nowhere --tp 7.5 --pp 0 --dp-shard nan --zero 5",
        ["nobody", "nowhere", "--tp 7.5", "--pp 0", "--dp-shard nan", "--zero 5"],
    ),
}
"""What is asked, and the words of each reason why it cannot be."""


@pytest.mark.parametrize(("asked", "expected"), REFUSED.values(), ids=REFUSED)
def test_a_bad_question_is_refused_with_every_reason(nanum: Run, asked: str, expected: list[str]) -> None:
    reasons = reasons_of(nanum(*shlex.split(asked), *(["--json"] if len(expected) > 1 else [])))
    assert len(reasons) == len(expected)
    assert all(sum(words in reason for reason in reasons) == 1 for words in expected), reasons


def test_a_model_file_with_keys_it_cannot_have_is_refused_with_each(nanum_process: Run, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA | {"hidden_sizes": 3, "vocab_size": -1}))
    reasons = reasons_of(nanum_process("predict", str(config), NODE))
    assert any("hidden_sizes" in reason for reason in reasons)
    assert any("vocab_size" in reason for reason in reasons)


def test_a_cluster_file_with_a_key_it_cannot_have_is_refused(nanum: Run, tmp_path: Path) -> None:
    cluster = tmp_path / "mine.toml"
    cluster.write_text('nodes = 2\ngpus_per_node = 8\nchip = "h100-sxm"\ncolour = "red"\n')
    assert any("colour" in reason for reason in reasons_of(nanum("predict", "gpt2", str(cluster))))


@pytest.mark.parametrize("argv", [["Z"], ["A", "--lang", "fr"], ["A", "Z", "--json"]])
def test_the_lesson_refuses_what_it_has_not(nanum_process: Run, argv: list[str]) -> None:
    done = nanum_process("lesson", *argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert "is not a" in done.stderr


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param(json.dumps(LLAMA)[:40], "not JSON (line 1", id="truncated"),
        pytest.param("[1]", "not the JSON object", id="list"),
        pytest.param(json.dumps(LLAMA | {"vocab_size": float("nan")}), "vocab_size = NaN", id="NaN"),
        pytest.param(
            '{"vocab_size": 1, ' + json.dumps(LLAMA)[1:], "'vocab_size' stands there more than once", id="twice"
        ),
        pytest.param('{"vocab_size": 1' + "0" * 6000 + "}", "a number is too long", id="thousands of digits"),
        pytest.param(json.dumps(LLAMA | {"layer_types": 5}), "layer_types = 5 is not a list", id="layer types"),
        pytest.param(json.dumps(LLAMA | {"a\nb\x1b[31m": 5}), r"unknown key 'a\nb\x1b[31m'", id="control characters"),
        pytest.param(json.dumps(LLAMA | {"x" * 9000: 5}), "x…'", id="a long key"),
    ],
)
def test_a_broken_model_file_is_refused_in_one_line(nanum: Run, tmp_path: Path, text: str, reason: str) -> None:
    config = tmp_path / "config.json"
    config.write_text(text)
    (said,) = reasons_of(nanum("predict", str(config), NODE))
    assert reason in said
    assert len(said) < len(str(config)) + 200


@pytest.mark.parametrize(
    "argv",
    [
        ["predict", "PIPE", NODE],
        ["plan", "gpt2", "PIPE"],
        ["validate", "PIPE"],
        ["predict", "/dev/zero", NODE],
        ["predict", "gpt2", "/dev/zero"],
    ],
)
def test_a_pipe_or_a_device_is_no_file(nanum: Run, tmp_path: Path, argv: list[str]) -> None:
    """Nobody writes into this pipe: who opens it waits for ever."""
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    (said,) = reasons_of(nanum(*(str(pipe) if word == "PIPE" else word for word in argv)))
    assert said.endswith("is a device or a pipe, and no file to read")


SHELL = 'predict() { "$PYTHON" -m nanum predict "$1" "$NODE" --json; }; '


def by_shell(line: str, config: Path) -> subprocess.CompletedProcess[str]:
    known = {**os.environ, "PYTHON": sys.executable, "NODE": NODE, "CONFIG": str(config)}
    words = ["bash", "-c", SHELL + line]
    return subprocess.run(words, env=known, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    "line", ['cat "$CONFIG" | predict /dev/stdin', 'predict <(cat "$CONFIG")', 'predict /dev/stdin < "$CONFIG"']
)
def test_what_a_shell_hands_on_is_read(tmp_path: Path, line: str) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    done = by_shell(line, config)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["parameters"] > 0


def test_a_stdin_without_an_end_is_not_read_to_it(tmp_path: Path) -> None:
    (said,) = reasons_of(by_shell("predict /dev/stdin < /dev/zero", tmp_path))
    assert "too large" in said


@pytest.mark.parametrize("lines", ["", "\n \n"])
def test_runs_without_a_row_are_refused_as_the_help_says(nanum: Run, tmp_path: Path, lines: str) -> None:
    file = tmp_path / "runs.jsonl"
    file.write_text(lines)
    assert reasons_of(nanum("validate", str(file))) == [f"{file}: there is no row in it"]
    assert "2 where the file cannot be read or has no row" in " ".join(nanum("validate", "--help").stdout.split())


def test_words_with_control_characters_are_repeated_without_them(nanum: Run) -> None:
    reasons = reasons_of(nanum("predict", "a\nb", "c\x1b[31m"))
    assert [r"a\nb" in reasons[0], r"c\x1b[31m" in reasons[1], len(reasons)] == [True, True, 2]


def test_unknown_flags_and_missing_words_exit_2_without_a_traceback(nanum_process: Run) -> None:
    for argv in (["predict", "gpt2", NODE, "--tpp", "8"], ["predict", "gpt2"], ["predit"], ["plan", "gpt2", NODE, "x"]):
        done = nanum_process(*argv)
        assert done.returncode == 2
        assert done.stdout == ""
        assert "Traceback" not in done.stderr
        assert done.stderr
