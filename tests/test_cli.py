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
from conftest import LLAMA, NODE, Run

from nanum.report.flags import flags_of

COMMANDS = ("plan", "predict", "scale", "verify", "validate", "lesson", "models", "clusters")


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


@pytest.mark.parametrize(
    "words",
    [
        f"predict gpt2 {NODE} --json",
        f"predict gpt2 {NODE}",
        f"predict llama-3.1-70b {NODE}",
        f"predict gpt2 {NODE} --tp 5",
        f"predict gpt2 {NODE} --tpp 5",
    ],
    ids=["a document", "a page", "bad news", "a refusal", "usage"],
)
def test_a_process_of_its_own_says_the_same(nanum: Run, nanum_process: Run, words: str) -> None:
    """Most tests run the command in their own process."""
    one, other = (run(*words.split()) for run in (nanum, nanum_process))
    assert (one.returncode, one.stdout, one.stderr) == (other.returncode, other.stdout, other.stderr)


def answer(done: subprocess.CompletedProcess[str], code: int = 0) -> dict[str, Any]:
    assert done.returncode == code, done.stderr
    document: dict[str, Any] = json.loads(done.stdout, parse_constant=lambda word: pytest.fail(f"{word} in JSON"))
    return document


def test_a_file_may_begin_with_the_mark_that_some_editors_write(nanum: Run, tmp_path: Path) -> None:
    model, cluster = tmp_path / "config.json", tmp_path / "mine.toml"
    model.write_text(json.dumps(LLAMA), encoding="utf-8-sig")
    cluster.write_text('nodes = 1\r\ngpus_per_node = 8\r\nchip = "h100-sxm"\r\n', encoding="utf-8-sig", newline="")
    answer(nanum("predict", str(model), str(cluster), "--json"))


@pytest.mark.parametrize("name", ["tiny-mixtral", "mixtral-8x7b", "gpt2"])
def test_listed_counts_are_those_of_a_prediction(nanum: Run, name: str) -> None:
    (listed,) = (model for model in json.loads(nanum("models", "--json").stdout)["models"] if model["name"] == name)
    predicted = json.loads(nanum("predict", name, "1x1xh100-sxm", "--global-batch-size", "1", "--json").stdout)["model"]
    for key in ("parameters", "active_parameters"):
        assert listed[key] == predicted[key]


def test_links_are_listed_to_the_digit(nanum: Run) -> None:
    """Eight A100 of a p4d share 400 Gb/s."""
    assert re.search(r"aws-p4d-64 .* 6\.25\b", nanum("clusters").stdout)


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


def test_of_several_engines_each_layout_says_its_own(nanum: Run) -> None:
    """Where all that are listed are of one, too."""
    words = ("plan", "llama-3.1-8b", "1x8xh100-sxm", "--engine", "any", "--top", "1")
    document = json.loads(nanum(*words, "--json").stdout)
    (first,) = document["best"]
    engine = first["engine"]["name"]
    lines = [line for line in nanum(*words).stdout.splitlines() if f"{engine}: " in line]
    row, alone = (line for line in lines if not line.startswith("- "))
    assert row.split()[0] == "1"
    assert alone.startswith(f"{engine}: ")
    assert document["explanations"]
    assert all(line.startswith(("torchtitan: ", "megatron: ")) for line in document["explanations"])


@pytest.mark.parametrize(
    ("model", "flags", "said"),
    [
        ("deepseek-v2-lite", ("--engine", "megatron", "--dispatcher", "flex"), {"dispatcher": "flex"}),
        ("megatron-39.1b", ("--engine", "megatron", "--tp-overlap"), {"tp_overlap": True, "sp": True}),
        ("gpt3-175b", ("--compile", "--tp-overlap"), {"tp_overlap": True, "compile": True}),
        ("llama-3.1-8b", ("--compile",), {"compile": True}),
    ],
)
def test_a_plan_s_layouts_are_as_is_said(nanum: Run, model: str, flags: tuple[str, ...], said: dict[str, Any]) -> None:
    of = (model, "8x8xh100-sxm", *flags)
    plan = nanum("plan", *of, "--top", "1")
    (first,) = json.loads(nanum("plan", *of, "--top", "1", "--json").stdout)["best"]
    assert {key: first["layout"][key] for key in said} == said
    command = " ".join(plan.stdout.partition("by stage: nanum ")[2].partition("\nassumed")[0].split())
    again = json.loads(nanum(*command.split(), "--json").stdout)
    assert {key: again[key] for key in ("layout", "memory", "time")} == {
        key: first[key] for key in ("layout", "memory", "time")
    }


@pytest.mark.parametrize(
    ("of", "why"),
    [
        (("llama-3.1-8b", "--dispatcher", "flex"), "are of experts, and llama-3.1-8b has none"),
        (("deepseek-v2-lite", "--dispatcher", "flex"), "is not modelled for torchtitan: megatron has it"),
        (("deepseek-v2-lite", "--engine", "any", "--dispatcher", "flex"), "is not modelled for torchtitan"),
        (("deepseek-v2-lite", "--engine", "megatron", "--dispatch-dtype", "fp8"), "fp8 is of --dispatcher flex"),
        (("gpt2", "--tp-overlap"), "--tp-overlap is a pass of torch.compile in torchtitan: it needs --compile"),
        (("gpt2", "--tp-overlap", "--engine", "deepspeed"), "--tp-overlap is not in deepspeed: megatron and torchtit"),
        (("gpt2", "--compile", "--engine", "megatron"), "--compile is not for megatron"),
        (("gpt2", "--compile", "--engine", "any"), "--compile with --engine any: name an engine that compiles"),
    ],
)
def test_a_plan_of_no_layout_that_could_be_is_refused(nanum: Run, of: tuple[str, ...], why: str) -> None:
    model, *flags = of
    refused = nanum("plan", model, "1x8xh100-sxm", *flags)
    assert (refused.returncode, refused.stdout) == (2, "")
    (line,) = refused.stderr.splitlines()
    assert why in line


def test_a_plan_folds_near_ties_and_lists_them_when_asked(nanum: Run) -> None:
    words = ["plan", "gpt2", NODE, "--top", "3"]
    document = answer(nanum(*words, "--json"))
    of_all = answer(nanum(*words, "--ties", "--json"))
    assert [one["layout"] for one in document["best"]] == [one["layout"] for one in of_all["best"]]
    assert [one["layout"] for one in of_all["shortlist"]] == [one["layout"] for one in of_all["best"]]
    assert [one["place"] for one in of_all["shortlist"]] == [1, 2, 3]
    assert not any(one["near_ties"] for one in of_all["shortlist"])
    first, *_ = document["shortlist"]
    assert len(document["shortlist"]) == 3
    assert first["layout"] == document["best"][0]["layout"]
    assert first["near_ties"]
    for tie in first["near_ties"]:
        assert tie["layout"]["tp"] == first["layout"]["tp"]
        assert tie["time"]["step_seconds"] <= 1.01 * first["time"]["step_seconds"]
        assert tie["memory"]["worst"]["device_bytes"] >= first["memory"]["worst"]["device_bytes"]
    folded, listed = (" ".join(nanum(*words, *more).stdout.split()) for more in ([], ["--ties"]))
    assert "are folded into the rows that name them" in folded
    assert "near tie" not in listed


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
    found = re.search(r"nanum (predict .*?)(?: But it | Left out|$)", " ".join(done.stdout.split()))
    assert found is not None
    words = shlex.split(found[1])
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
    """What is nearest divides sequences in the same way, or not at all."""
    document = answer(nanum("predict", *argv, "--json"), code=1)
    check_prediction(document)
    assert document["layout"]["cp"] == 2
    assert document["communication"]
    if near := document["nearest"]:
        kind = document["layout"]["cp_kind"]
        assert near["layout"]["cp_kind"] == (kind if near["layout"]["cp"] > 1 else "none")
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


@pytest.mark.parametrize(
    "words",
    [
        "mixtral-8x7b 4x8xh100-sxm --engine megatron --tp 2 --etp 1 --recompute full",
        "mixtral-8x7b 4x8xh100-sxm --engine megatron --tp 4 --etp 2 --ep 8 --recompute moe_act,layernorm",
        "mixtral-8x7b 4x8xh100-sxm --ep 8 --expert-imbalance 1.7 --recompute full",
        "llama-3.1-8b 2x8xh100-sxm --cp 4 --cp-kind allgather --loss chunked --loss-chunks 4 --compile",
        "llama-3.1-70b 2x8xh100-sxm --engine megatron --tp 8 --offload optimizer --offload-fraction 0.333333",
        "llama-3.1-8b 2x8xh100-sxm --engine deepspeed --zero 3 --dp-replicate 2 --hpz",
        "llama-3.1-8b 2x8xh100-sxm --tp 4 --rank-order pp,tp,dp_replicate,dp_shard,cp --train layers",
    ],
)
def test_the_flags_of_a_layout_ask_for_it_again(nanum: Run, words: str) -> None:
    model, cluster, *_ = words.split()
    asked = json.loads(nanum("predict", *words.split(), "--json").stdout)
    again = json.loads(nanum("predict", model, cluster, *flags_of(asked).split(), "--json").stdout)
    for key in ("layout", "job", "memory", "time"):
        assert again[key] == asked[key]


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


def test_a_plan_says_how_layers_that_do_not_divide_are_cut(nanum: Run, tmp_path: Path) -> None:
    model = tmp_path / "nine.json"
    model.write_text(json.dumps({**LLAMA, "num_hidden_layers": 9}))
    document = answer(nanum("plan", str(model), "1x8xh100-sxm", "--engine", "megatron", "--top", "1", "--json"))
    (why,) = (one["why"] for one in document["rejected"] if "does not divide num_hidden_layers" in one["why"])
    assert "--first-stage-layers, --last-stage-layers" in why
    words = ["--engine", "megatron", "--pp", "32", "--first-stage-layers", "30", "--ep", "8", "--recompute", "full"]
    check_prediction(answer(nanum("predict", "deepseek-v3", "64x8xh100-sxm", *words, "--json"), code=1))


def test_the_command_that_a_plan_suggests_says_the_layers_of_uneven_ends(nanum: Run, tmp_path: Path) -> None:
    model = tmp_path / "five.json"
    model.write_text(json.dumps({**LLAMA, "num_hidden_layers": 5}))
    asked = [str(model), "1x2xh100-sxm", "--engine", "megatron", "--top", "40", "--ties"]
    found = answer(nanum("plan", *asked, "--json"))["best"]
    uneven = [one for one in found if one["layout"]["pp"] > 1]
    ends = {tuple(one["layout"][f"{end}_stage_layers"] for end in ("first", "last")) for one in uneven}
    assert ends == {(3, 2)}
    one = uneven[0]
    flags = shlex.split(flags_of(one))
    assert "--first-stage-layers" in flags
    again = answer(nanum("predict", *asked[:2], *flags, "--json"))
    assert (again["layout"], again["time"], again["memory"]) == (one["layout"], one["time"], one["memory"])
