"""Real runs beside their predictions: the dozen of `nanum verify --all --quick`, and each check seen to fail.

Ranks are forked and meet over gloo; what is compared is counted by PyTorch, the kernel and one process alone.
"""

from __future__ import annotations

import copy
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanum import processes
from nanum.cli.verification import broken_rules
from nanum.conventions import Conventions
from nanum.engines.engine import Engine
from nanum.engines.torch import on_gloo
from nanum.job import Job
from nanum.layout import Structure
from nanum.model import Model
from nanum.verify import Case, Verification, questions
from nanum.verify.checks import loss
from nanum.verify.matrix import MATRIX, cases

if processes.torch_is_missing():
    pytest.skip("real runs need torch", allow_module_level=True)

Run = Callable[..., Any]
QUICK = [ask.name for ask in MATRIX if ask.quick]
Answers = dict[str, dict[str, Any]]


TOLD: list[tuple[float, str]] = []
"""What the dozen's ranks said of how far they are."""


def tell(done: int, total: int, what: str = "", /) -> None:
    TOLD.append((done / total, what))


@pytest.fixture(scope="session")
def answers() -> Answers:
    """What the ranks of the dozen counted, by the layout's name."""
    asked = cases(quick=True)
    found = processes.run("nanum.live.worker", [], tell, question=questions(asked))
    return {case.name: answer for case, answer in zip(asked, found["answers"], strict=True)}


def case_of(name: str) -> Case:
    return next(ask.case() for ask in MATRIX if ask.name == name)


def verified(name: str, answer: dict[str, Any], engine: Engine | None = None) -> Verification:
    case = case_of(name)
    return Verification(case, engine or on_gloo(case.bucket_cap_mb), answer)


@pytest.mark.parametrize("name", QUICK)
def test_a_real_run_is_as_predicted(answers: Answers, name: str) -> None:
    found = verified(name, answers[name])
    assert [check.to_dict() for check in found.checks if check.ok is False] == []
    assert all(row.ok for row in found.rows)
    exact = ("params", "grads", "optimizer_states", "saved")
    assert all(each.predicted == each.counted for each in found.held if each.category in exact)


def test_ranks_say_how_far_they_are(answers: Answers) -> None:
    """Between two layouts too, and never back."""
    shares = [share for share, _ in TOLD]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert all(len([what for _, what in TOLD if what == name]) > 4 for name in answers)


def test_the_dozen_has_every_way() -> None:
    asked = cases(quick=True)
    assert 12 <= len(asked) <= 16
    assert {axis for case in asked for axis, size in case.layout.sizes.items() if size > 1} == {
        "dp_replicate",
        "dp_shard",
        "cp",
        "tp",
        "pp",
    }
    assert {case.layout.structure.zero for case in asked} == {0, 1, 3}


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_every_layout_of_the_matrix_may_be_asked(case: Case) -> None:
    assert broken_rules(case.model, case.job, case.layout, on_gloo(), case.ranks) == []


def test_the_matrix_has_what_was_promised() -> None:
    asked = cases()
    assert len(asked) >= 40
    assert len({case.name for case in asked}) == len(asked)
    assert {case.ranks for case in asked} >= {1, 2, 3, 4, 8}
    assert {case.job.precision for case in asked} == {"fp32", "bf16"}
    assert {case.model.tie_word_embeddings for case in asked} == {True, False}
    assert {case.layout.structure.schedule for case in asked if case.layout.pp > 1} == {
        "gpipe",
        "1f1b",
        "interleaved",
        "looped-bfs",
        "zb-h1",
        "zbv",
        "dualpipev",
    }
    assert any(case.model.vocab_size % case.layout.tp for case in asked)


# --- a wrong prediction is caught -------------------------------------------------------------------------------------
def failing(found: Verification) -> set[str]:
    return {check.name for check in found.checks if check.ok is False}


def breaking(**wrong: Any) -> Engine:
    """The engine with a convention that is not PyTorch's."""
    right = on_gloo()

    def conventions(model: Model, job: Job, structure: Structure) -> Conventions:
        return replace(right.conventions(model, job, structure), **wrong)

    return replace(right, conventions=conventions)


@pytest.mark.parametrize(
    ("name", "wrong", "caught"),
    [
        ("fsdp 2", {"root_reshards": False}, {"communication", "memory", "wire"}),
        ("fsdp 2", {"gather_copies": False, "reduce_copies": False}, {"memory"}),
        ("tp 2, sequence parallel", {"loss_parallel": True}, {"communication", "memory", "wire"}),
        ("tp 2, sequence parallel", {"optimizer_sums": 1}, {"communication"}),
        ("tp 2, sequence parallel", {"regather": True}, {"communication", "memory", "wire"}),
        ("one rank", {"fused": frozenset({"norm"})}, {"memory"}),
    ],
)
def test_a_broken_rule_is_caught(answers: Answers, name: str, wrong: dict[str, Any], caught: set[str]) -> None:
    assert failing(verified(name, answers[name])) == set()
    assert failing(verified(name, answers[name], breaking(**wrong))) == caught


def test_every_other_check_can_fail(answers: Answers) -> None:
    name = "pp 2, 1f1b"

    def with_answer(change: Callable[[dict[str, Any]], None]) -> set[str]:
        answer = copy.deepcopy(answers[name])
        change(answer["ranks"][0])
        return failing(verified(name, answer))

    def swap(rank: dict[str, Any]) -> None:
        rank["did"][0], rank["did"][1] = rank["did"][1], rank["did"][0]

    def lose_a_gradient(rank: dict[str, Any]) -> None:
        rank["gradients"].popitem()

    assert with_answer(swap) == {"schedule"}
    assert with_answer(lose_a_gradient) == {"gradients"}
    assert with_answer(lambda rank: rank["gradients"].update({"embedding.weight": 0.1})) == {"gradients"}
    assert with_answer(lambda rank: rank.update(received_bytes=rank["received_bytes"] * 2)) == {"wire"}
    assert with_answer(lambda rank: rank["reference_losses"].__setitem__(0, 1.0)) == {"loss"}
    assert with_answer(lambda rank: rank["memory"].update(params=1)) == {"memory"}
    assert with_answer(lambda rank: rank["gradients"].update({"layers.0.norm1.weight": float("nan")})) == {"gradients"}


def test_a_rank_that_differs_from_its_replica_is_caught(answers: Answers) -> None:
    answer = copy.deepcopy(answers["ddp 2"])
    answer["ranks"][1]["traces"]["head.weight"][0] *= 1.01
    assert failing(verified("ddp 2", answer)) == {"gradients"}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_that_never_updates_is_caught(precision: str) -> None:
    """Its loss stays, where one process's falls as it did in a real run."""
    alone = [7.49, 6.08, 4.95, 4.13]
    ranks = [{"reference_losses": alone, "losses": [[7.49]] * 4}]
    assert loss(ranks, precision).ok is False
    ranks[0]["losses"] = [[value * 1.001] for value in alone]
    assert loss(ranks, "bf16").ok is True


QUESTION = ["--ranks", "2", "--layers", "2"]


def question_of(nanum: Run, words: list[str]) -> dict[str, Any]:
    """What a command asks, as its launch would."""
    command = nanum("verify", *words, "--print-launch").stdout.splitlines()[-1]
    (question,) = json.loads(shlex.split(command.split(" --question ")[1])[0])["questions"]
    return dict(question)


def test_an_answer_to_something_else_is_refused(answers: Answers, nanum: Run, tmp_path: Path) -> None:
    file = tmp_path / "answer.json"
    words = ["verify", *QUESTION, "--zero", "3", "--answer", str(file)]
    file.write_text(json.dumps({"answers": [answers["fsdp 2"]]}))  # of another model's name
    assert "answers another question" in nanum(*words).stderr
    question = question_of(nanum, [*QUESTION, "--zero", "3"])
    for ranks in ([1, 2], [{"rank": 0}, {"rank": 1}], []):
        file.write_text(json.dumps({"answers": [{"question": question, "ranks": ranks, "torch": "", "backend": ""}]}))
        found = nanum(*words)
        assert (found.returncode, found.stdout) == (2, "")
        assert "not what `python -m nanum.live.worker` writes" in found.stderr


def test_a_mismatch_is_shown_side_by_side(answers: Answers, nanum: Run, tmp_path: Path) -> None:
    """The command compares an answer that it is given: one row of it is changed."""
    name = "fsdp 2"
    answer = copy.deepcopy(answers[name])
    row = answer["ranks"][1]["exchanges"][0]
    row[6] += 8
    asked = [*QUESTION, "--zero", "3"]
    answer["question"] = question_of(nanum, asked)
    (tmp_path / "answer.json").write_text(json.dumps({"answers": [answer]}))
    words = ["verify", *asked, "--answer", str(tmp_path / "answer.json")]
    found = nanum(*words)
    assert found.returncode == 1
    assert "Exchanges that differ (1 rows)" in found.stdout
    document = json.loads(nanum(*words, "--json").stdout)
    assert not document["ok"]
    differing = [
        line for line in document["communication"] if line["predicted_payload_bytes"] != line["counted_payload_bytes"]
    ]
    assert [(line["rank"], line["counted_payload_bytes"] - line["predicted_payload_bytes"]) for line in differing] == [
        (1, 8)
    ]


# --- the command ------------------------------------------------------------------------------------------------------
def test_one_run_from_the_command_line(nanum_process: Run) -> None:
    found = nanum_process("verify", "tiny-llama", "--ranks", "2", "--tp", "2", "--layers", "1", "--json")
    assert (found.returncode, found.stderr) == (0, "")
    document = json.loads(found.stdout)
    assert document["ok"]
    assert (document["ranks"], document["backend"], document["engine"]["name"]) == (2, "gloo", "torch")
    assert {check["name"] for check in document["checks"]} == {
        "loss",
        "gradients",
        "communication",
        "memory",
        "wire",
    }
    assert {row["rank"] for row in document["communication"]} == {0, 1}
    assert all(row["predicted_calls"] == row["counted_calls"] > 0 for row in document["communication"])
    assert {each["category"] for each in document["memory"]} >= {"params", "grads", "optimizer_states"}


@pytest.mark.parametrize(
    ("words", "reasons"),
    [
        ([], ["--ranks N is missing"]),
        (["--ranks", "2", "--zero", "2"], ["ZeRO-2"]),
        (["--ranks", "2", "--tp", "2", "--engine", "megatron"], ["--engine megatron", "PyTorch itself"]),
        (["--ranks", "x", "--tp", "y"], ["--ranks x is not a whole number", "--tp y is not a whole number"]),
        (["--ranks", "3", "--tp", "3"], ["tp=3 does not divide num_attention_heads=8"]),
        (["--ranks", "2", "--pp", "2", "--precision", "fp16"], ["--precision fp16 is not run here"]),
        (["--ranks", "2", "--steps", "3"], ["--steps 3"]),
        (["no-such-model", "--ranks", "2"], ["unknown model 'no-such-model'"]),
        (["--ranks", "2", "--bucket-cap-mb", "-1"], ["--bucket-cap-mb -1"]),
        (["--quick", "--ranks", "1"], ["--quick is for --all"]),
        (["--all", "--ranks", "2"], ["--all runs a matrix of its own", "--ranks"]),
        (["--all", "--quick", "--no-reshard", "--no-sp"], ["takes no --no-reshard, --no-sp"]),
        (["llama-3.1-405b", "--ranks", "8", "--zero", "3"], ["GiB are free here", "--layers"]),
        (["tiny-gpt", "--ranks", "2", "--pp", "2"], ["ties its embeddings", "two tables"]),
        (["--ranks", "1", "--vocab", "1"], ["--vocab 1"]),
        (["--ranks", "2", "--zero", "3", "--bucket-cap-mb", "1"], ["--bucket-cap-mb is DDP's"]),
        (["--ranks", "8", "--dp-replicate", "2", "--tp", "2", "--pp", "2"], ["loses the gradients"]),
        (["--ranks", "1", "--answer", "nowhere.json"], ["nowhere.json: no such file"]),
    ],
)
def test_what_cannot_be_asked(nanum: Run, words: list[str], reasons: list[str]) -> None:
    found = nanum("verify", *words)
    assert (found.returncode, found.stdout) == (2, "")
    assert "Traceback" not in found.stderr
    for reason in reasons:
        assert reason in found.stderr


def test_a_launch_is_the_same_question(nanum_process: Run) -> None:
    found = nanum_process("verify", "--ranks", "2", "--zero", "3", "--print-launch")
    assert found.returncode == 0
    assert "torchrun" in found.stdout
    assert "-m nanum.live.worker --question" in found.stdout
    begin = found.stdout.index("'{") + 1
    question = json.loads(found.stdout[begin : found.stdout.rindex("}'") + 1])
    assert len(question["questions"]) == 1
    assert question["questions"][0]["layout"]["dp_shard"] == 2


@pytest.mark.slow
def test_a_launch_by_torchrun_is_the_same_run(nanum_process: Run, tmp_path: Path) -> None:
    """The command that --print-launch prints, on one machine, and its answer compared."""
    words = ["verify", "--ranks", "2", "--zero", "3", "--layers", "1"]
    command = nanum_process(*words, "--print-launch").stdout.splitlines()[-1].split(" --question ")[1]
    question = shlex.split(command)[0]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    worker = ["-m", "nanum.live.worker", "--question", question, "--answer", str(tmp_path / "answer.json")]
    subprocess.run([*launch, *worker], check=True, timeout=300, capture_output=True)
    found = nanum_process(*words, "--answer", str(tmp_path / "answer.json"))
    assert found.returncode == 0, found.stdout


@pytest.mark.slow
def test_all_of_the_matrix(nanum_process: Run) -> None:
    found = nanum_process("verify", "--all", "--json", timeout=1200)
    document = json.loads(found.stdout)
    wrong = {case["name"]: [c for c in case["checks"] if not c["ok"]] for case in document["cases"] if not case["ok"]}
    assert wrong == {}
    assert found.returncode == 0
