"""The command as its users meet it: a process, its stdout, its stderr and its exit code."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

COMMANDS = ("plan", "predict", "scale", "verify", "validate", "lesson", "models", "clusters")
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


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_that_names_the_command(nanum: Run, command: str) -> None:
    done = nanum(command, "--help")
    assert done.returncode == 0
    assert re.search(rf"Examples:\n +nanum {command}\b", done.stdout)
    assert "--json" in done.stdout


def test_help_of_the_whole(nanum_process: Run) -> None:
    done = nanum_process("--help")
    assert done.returncode == 0
    assert "Example: nanum plan llama-3.1-70b 8x8xh100-sxm" in done.stdout
    assert all(re.search(rf"^  {command} ", done.stdout, re.MULTILINE) for command in COMMANDS)
    assert "..." not in done.stdout.split("Commands:")[1]  # no command's summary is cut


def test_version(nanum_process: Run) -> None:
    assert re.fullmatch(r"nanum \S.*\n", nanum_process("--version").stdout)


@pytest.mark.parametrize("argv", [["--help"], ["plan", "--help"], ["predict", "--help"], ["scale", "--help"]])
def test_help_waits_for_nothing_heavy(argv: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "nanum", *argv], capture_output=True, text=True, check=True
    )
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "nanum.cli.commands" in imported
    assert not imported & {"numpy", "torch", "pydantic", "nanum.model.presets"}


def reasons_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The reasons of a refusal, which must look like one: exit code 2, nothing on stdout, no traceback."""
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    assert all(line.startswith("nanum: ") for line in lines), done.stderr
    return [line.removeprefix("nanum: ") for line in lines]


NODE = "1x8xh100-sxm"
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


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        pytest.param(
            ["llama-3.1-8b", "1x7xh100-sxm", "--tp", "7"], ["tp=7 does not divide num_attention_heads=32"], id="heads"
        ),
        pytest.param(["llama-3.1-8b", NODE, "--tp", "4", "--dp-shard", "4"], ["16", "8 GPUs"], id="world size"),
        pytest.param(["llama-3.1-8b", NODE, "--pp", "8", "--global-batch-size", "3"], ["3"], id="batch"),
    ],
)
def test_an_impossible_layout_is_refused_in_the_users_words(nanum: Run, argv: list[str], expected: list[str]) -> None:
    reasons = "\n".join(reasons_of(nanum("predict", *argv)))
    assert all(words in reasons for words in expected), reasons


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


def test_a_file_may_begin_with_the_mark_that_some_editors_write(nanum: Run, tmp_path: Path) -> None:
    model, cluster = tmp_path / "config.json", tmp_path / "mine.toml"
    model.write_text(json.dumps(LLAMA), encoding="utf-8-sig")
    cluster.write_text('nodes = 1\r\ngpus_per_node = 8\r\nchip = "h100-sxm"\r\n', encoding="utf-8-sig", newline="")
    answer(nanum("predict", str(model), str(cluster), "--json"))


@pytest.mark.parametrize("argv", [["/dev/zero", NODE], ["gpt2", "/dev/zero"]])
def test_a_file_without_an_end_is_not_read_to_it(nanum: Run, argv: list[str]) -> None:
    assert ["too large" in reason for reason in reasons_of(nanum("predict", *argv))] == [True]


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


def answer(done: subprocess.CompletedProcess[str], code: int = 0) -> dict[str, Any]:
    assert done.returncode == code, done.stderr
    document: dict[str, Any] = json.loads(done.stdout, parse_constant=lambda word: pytest.fail(f"{word} in JSON"))
    return document


def test_models_and_clusters_list_what_the_other_commands_take(nanum: Run) -> None:
    models = {model["name"]: model for model in answer(nanum("models", "--json"))["models"]}
    assert models["llama-3.1-70b"]["parameters"] == 70_553_706_496
    assert any(model["notes"] for model in models.values())
    clusters = answer(nanum("clusters", "--json"))
    assert "h100-sxm" in {chip["name"] for chip in clusters["chips"]}
    assert all(chip["memory_bytes"]["source"] for chip in clusters["chips"])
    assert "70,553,706,496" in nanum("models").stdout
    assert "h100-sxm" in nanum("clusters").stdout


PREDICTION_KEYS = {
    "": "engine model job cluster layout fits memory communication time throughput assumptions unmodelled",
    "engine": "name version",
    "model": "name parameters active_parameters",
    "memory": "capacity_bytes worst stages",
    "memory.worst": "stage moment allocated_bytes reserved_bytes device_bytes context_bytes",
    "memory.stages": "stage allocated_peak_bytes by_category",
    "communication": "stage axis kind phase what dtype group_size link calls payload_bytes wire_bytes seconds "
    "exposed_seconds",
    "time": "step_seconds step_seconds_low step_seconds_high compute_seconds exposed_communication_seconds "
    "bubble_seconds optimizer_seconds bubble_fraction serial_fraction",
    "throughput": "tokens_per_second tokens_per_second_per_gpu model_flops mfu hfu peak_flops_per_second",
    "assumptions": "what value tag source",
}


def check_prediction(document: dict[str, Any]) -> None:
    """The document has every key of the contract, and its figures agree with each other."""
    for path, keys in PREDICTION_KEYS.items():
        part: Any = document
        for name in path.split(".") if path else []:
            part = part[name]
        for one in part if isinstance(part, list) else [part]:
            assert set(keys.split()) <= set(one), path
    memory = document["memory"]
    assert document["fits"] == (memory["worst"]["device_bytes"] <= memory["capacity_bytes"])
    for stage in memory["stages"]:
        assert set(stage["by_category"]) == {"params", "grads", "optimizer_states", "activations", "buffers"}
        assert sum(stage["by_category"].values()) == stage["allocated_peak_bytes"]
    time_document = document["time"]
    assert time_document["step_seconds_low"] <= time_document["step_seconds"] <= time_document["step_seconds_high"]
    assert time_document["bubble_fraction"] == pytest.approx(
        time_document["bubble_seconds"] / time_document["step_seconds"]
    )


def test_predict_answers_with_the_contracts_document(nanum_process: Run) -> None:
    done = nanum_process("predict", "llama-3.1-8b", NODE, "--tp", "2", "--pp", "2", "--recompute", "full", "--json")
    document = answer(done)
    check_prediction(document)
    assert document["engine"]["name"] == "torchtitan"
    assert document["layout"]["dp_shard"] == 2  # what tp 2 and pp 2 leave of 8
    assert document["job"]["seq_len"] == 8192
    assert document["job"]["global_batch_size"] == 4 * 2**20 // 8192


def test_predict_on_a_terminal_says_which_defaults_it_took(nanum: Run) -> None:
    text = " ".join(nanum("predict", "llama-3.1-8b", NODE, "--recompute", "full").stdout.split())
    assert "by default seq_len 8192 · global_batch_size 512 · precision bf16 · optimizer adamw" in text
    assert "dp_shard 8 · zero 3" in text


def test_what_does_not_fit_exits_1_and_is_answered_in_full(nanum_process: Run) -> None:
    document = answer(nanum_process("predict", "llama-3.1-405b", "1x8xa100-sxm-40gb", "--json"), code=1)
    check_prediction(document)
    assert document["fits"] is False
    assert "It does not fit" in nanum_process("predict", "llama-3.1-405b", "1x8xa100-sxm-40gb").stdout


def test_plan_answers_with_the_contracts_document(nanum_process: Run) -> None:
    document = answer(nanum_process("plan", "llama-3.1-8b", "2x8xh100-sxm", "--top", "3", "--json"))
    count = document["count"]
    assert count["enumerated"] == count["impossible"] + count["too_large"] + count["ranked"]
    assert 1 <= len(document["best"]) <= 3
    for one in document["best"]:
        check_prediction(one)
    steps = [one["time"]["step_seconds"] for one in document["best"]]
    assert steps == sorted(steps)
    assert all(one["why"] and one["count"] > 0 for one in document["rejected"])


def test_a_plan_without_an_answer_exits_1(nanum: Run) -> None:
    document = answer(nanum("plan", "llama-3.1-405b", "1x1xa100-sxm-40gb", "--json"), code=1)
    assert document["best"] == []


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param(["llama-3.1-405b", "1x1xa100-sxm-40gb"], id="one engine"),
        pytest.param(["mixtral-8x7b", "1x1xh100-sxm", "--engine", "any"], id="any engine"),
        pytest.param(["llama-3.1-405b", "1x2xh100-sxm", "--lora-rank", "4", "--lora-targets", "qv"], id="adapters"),
    ],
)
def test_a_plan_without_an_answer_says_what_comes_nearest_and_its_prediction(nanum: Run, argv: list[str]) -> None:
    done = nanum("plan", *argv)
    assert (done.returncode, done.stderr) == (1, "")
    found = re.search(r"nanum (predict .*?) Left out|nanum (predict .*)", " ".join(done.stdout.split()))
    assert found is not None
    words = shlex.split(found[1] or found[2])
    least = answer(nanum("plan", *argv, "--json"), code=1)["least"]
    predicted = answer(nanum(*words, "--json"), code=1)
    assert {key: predicted[key] for key in ("engine", "model", "job", "layout")} == {
        key: least[key] for key in ("engine", "model", "job", "layout")
    }
    assert predicted["memory"]["worst"]["device_bytes"] == least["device_bytes"]


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param(["llama-3.1-70b", "1x4xh100-sxm", "--cp", "2"], id="nothing fits"),
        pytest.param(["llama-3-8b", "1x8xh100-sxm", "--cp", "2", "--seq-len", "131072"], id="a ring"),
        *(
            pytest.param(
                ["llama-3-8b", "1x8xh100-sxm", "--cp", "2", "--engine", "megatron", "--cp-kind", kind], id=kind
            )
            for kind in ("ring", "allgather", "ulysses")
        ),
    ],
)  # fmt: skip
def test_context_parallel_that_does_not_fit_is_answered_in_full(nanum: Run, argv: list[str]) -> None:
    """What is nearest has no context parallelism, for a plan searches none, and so no kind of it."""
    document = answer(nanum("predict", *argv, "--json"), code=1)
    check_prediction(document)
    assert document["layout"]["cp"] == 2
    assert document["communication"]
    if near := document["nearest"]:
        assert (near["layout"]["cp"], near["layout"]["cp_kind"]) == (1, "none")
        assert near["fits"]


def test_the_lessons_arithmetic(nanum_process: Run) -> None:
    part = answer(nanum_process("lesson", "A", "--json"))["A"]
    assert part["data_parallel"]["bytes"] == 28e9
    assert part["tensor_parallel"]["bytes"] == 4_294_967_296
    assert part["pipeline"]["bytes"] == 67_108_864


def test_the_command_that_a_plan_suggests_gives_its_first_layout(nanum: Run, tmp_path: Path) -> None:
    model = tmp_path / "my model.json"
    model.write_text(json.dumps(LLAMA))
    asked = [str(model), "1x4xh100-sxm", "--precision", "fp16", "--optimizer", "sgd", "--global-batch-size", "64"]
    text = " ".join(nanum("plan", *asked).stdout.replace("\n", " ").split())
    found = re.search(r"nanum (predict .*?) assumed, and listed", text)
    assert found is not None
    words = shlex.split(found[1])
    best = answer(nanum("plan", *asked, "--json"))["best"][0]
    assert answer(nanum(*words, "--json"))["layout"] == best["layout"]
    assert answer(nanum(*words, "--json"))["time"] == best["time"]


def test_the_command_that_a_plan_suggests_says_a_file_that_looks_like_a_flag(tmp_path: Path) -> None:
    (tmp_path / "-x.json").write_text(json.dumps(LLAMA))
    words = [sys.executable, "-m", "nanum", "plan", "--top", "1", "--", "-x.json", NODE]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert f"nanum predict ./-x.json {NODE}" in " ".join(done.stdout.split())


def test_an_imbalance_of_experts_that_are_not_spread_is_said_to_change_nothing(nanum: Run) -> None:
    words = ["predict", "mixtral-8x7b", "8x8xh100-sxm", "--engine", "megatron", "--tp", "8", "--expert-imbalance", "2"]
    alone, spread = (answer(nanum(*words, *more, "--json")) for more in ([], ["--ep", "8"]))
    said = [
        any("--expert-imbalance changes nothing here" in each for each in one["unmodelled"]) for one in (alone, spread)
    ]
    assert said == [True, False]


def test_a_plan_says_how_layers_that_do_not_divide_are_cut(nanum: Run) -> None:
    document = answer(nanum("plan", "deepseek-v3", "64x8xh100-sxm", "--engine", "megatron", "--top", "1", "--json"))
    (why,) = (one["why"] for one in document["rejected"] if "does not divide num_hidden_layers" in one["why"])
    assert "--first-stage-layers, --last-stage-layers" in why
    words = ["--engine", "megatron", "--pp", "16", "--first-stage-layers", "1", "--ep", "8", "--recompute", "full"]
    assert answer(nanum("predict", "deepseek-v3", "64x8xh100-sxm", *words, "--json"))["fits"]
