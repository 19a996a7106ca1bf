"""`nanum validate`: what a row says, what is skipped and why, and what the command answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from test_documents import covers, documented, leaves

from nanum.errors import Refused
from nanum.model import Experts, LatentAttention
from nanum.units import GB, GIB
from nanum.validate import read, validate
from nanum.validate.questions import Question, question_of
from nanum.validate.rows import SHIPPED, Row

ROW = {
    "id": "own-1",
    "source": "a notebook",
    "model": {
        "name": "Llama 1B", "layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 128256,
        "seq": 4096,
    },
    "hardware": {"gpu": "H100-SXM5-80GB", "gpus_per_node": 8},
    "layout": {"gpus": 8, "tp": 2, "pp": 1, "dp": 4, "cp": 1, "sequence_parallel": True},
    "micro_batch": 1,
    "global_batch": 32,
    "recompute": "none",
    "precision": "bf16",
    "measured": {"step_time_s": 1.5, "memory_gb": 20, "memory_def": "GiB allocated"},
}  # fmt: skip


def lines(file: Path, *rows: Any) -> Path:
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return file


def asked(tmp_path: Path, **changes: Any) -> Question | list[str]:
    """The row above with other fields: a path's keys are joined by two underscores, and None takes one away."""
    table = json.loads(json.dumps(ROW))
    for path, value in changes.items():
        *above, key = path.split("__")
        inner = table
        for name in above:
            inner = inner.setdefault(name, {})
        inner[key] = value
    return question_of(read(lines(tmp_path / "rows.jsonl", table))[0])


def question(tmp_path: Path, **changes: Any) -> Question:
    found = asked(tmp_path, **changes)
    assert isinstance(found, Question), found
    return found


def why(tmp_path: Path, **changes: Any) -> str:
    found = asked(tmp_path, **changes)
    assert isinstance(found, list)
    return "; ".join(found)


# --- the shipped rows, and the traps that their readme names ----------------------------------------------------------
@pytest.fixture(scope="module")
def shipped() -> dict[str, Row]:
    return {row.id: row for row in read()}


@pytest.fixture(scope="module")
def questions(shipped: dict[str, Row]) -> dict[str, Question | list[str]]:
    return {name: question_of(row) for name, row in shipped.items()}


def test_all_rows_are_there_and_each_is_asked_or_skipped(questions: dict[str, Question | list[str]]) -> None:
    assert len(questions) == 1590
    assert all(found for found in questions.values())  # a skipped row has a reason


def test_sources_are_told_apart(shipped: dict[str, Row]) -> None:
    counts: dict[str, int] = {}
    for row in shipped.values():
        counts[row.source] = counts.get(row.source, 0) + 1
    assert counts["vtrain/single"] == 720
    assert counts["vtrain/multi"] == 26
    assert counts["vtrainlarge"] == 83
    assert counts["simumax/dense"] == 16
    assert counts["simumax/moe"] == 12
    assert counts["mbridge/dense"] == 70
    assert counts["titan"] == 25
    assert {name: n for name, n in counts.items() if name.startswith("dgxc")} == {
        "dgxc/dense": 70, "dgxc/moe": 18, "dgxc25": 24
    }  # fmt: skip


def test_a_run_that_is_shipped_is_completed_by_its_recipe(tmp_path: Path, shipped: dict[str, Row]) -> None:
    """Not by what was measured; and only where it is the same run."""
    table = next(
        found
        for line in SHIPPED.read_text("utf-8").splitlines()
        if (found := json.loads(line)).get("cuda_graphs") == "partial"
    )
    whole = shipped[table["id"]]
    silent = {
        key: value for key, value in table.items() if key not in ("cuda_graphs", "overlap", "recompute", "dispatcher")
    }
    silent |= {"measured": {"step_time_s": 1.25}, "derived": {}}
    besides = {"notes": "read off a table", "confidence": "table", "micro_batches": 8}
    silent |= besides
    silent["hardware"] |= {"intra_node": "NVLink", "inter_node": "RDMA", "memory_gb": 80, "notes": "500 W"}
    silent["model"] |= {"params_b": 70, "config_source": "its config.json"}
    (row,) = read(lines(tmp_path / "own.jsonl", silent))
    assert {path: row[path] for path in whole.fields if not path.startswith(("measured", "derived"))} == {
        path: value for path, value in whole.fields.items() if not path.startswith(("measured", "derived"))
    }
    assert {path for path in row.fields if path.startswith(("measured", "derived"))} == {"measured.step_time_s"}
    silent["layout"] |= {"tp": 2 * silent["layout"]["tp"]}
    (other,) = read(lines(tmp_path / "own.jsonl", silent))
    assert other["cuda_graphs"] is None


def test_no_time_comes_from_flops(questions: dict[str, Question | list[str]]) -> None:
    """Some count what is recomputed, some half of attention, some neither: only rows with a time are compared."""
    flops_alone = questions["simumax-a100pcie-dsv2-ep8-mbc8"]
    assert isinstance(flops_alone, list)
    assert any("neither a step's time" in reason for reason in flops_alone)


def test_a_layout_that_is_no_layout_is_refused(questions: dict[str, Question | list[str]]) -> None:
    found = questions["jz-v100-perf-00-18b-g16-p8-gb256"]  # tp 4 and pp 8 on 16 GPUs
    assert isinstance(found, list)
    assert any("= 32, but the cluster has 16 GPUs" in reason for reason in found)


@pytest.mark.parametrize(
    ("name", "kind", "size"),
    [
        ("titan-8b-8-fsdp", "reserved", 82.4 * GIB),
        ("simumax-b200-llama3_405b_l4_tp2_pp1_dp4_mbc4", "allocated", 81.59 * GIB),
        ("bs176-009-196B-h13824-l84-a64-n48-d4t8p12-m4-gb2048", "device", 52 * GIB),
        ("zb-t4-1.5b-zb-2p-m24", "allocated", 59 * GB),  # "allocator definition not stated", and taken for granted
    ],
)
def test_memory_is_what_the_source_means_by_it(
    questions: dict[str, Question | list[str]], name: str, kind: str | None, size: float | None
) -> None:
    found = questions[name]
    assert isinstance(found, Question)
    assert (found.memory_kind, found.memory_bytes) == (kind, size)


def test_schedules_are_those_named(questions: dict[str, Question | list[str]]) -> None:
    for name, schedule in {"zb-2p-m24": "zb-h2", "zb-1p-m24": "zb-h1", "1f1b-m24": "1f1b"}.items():
        found = questions[f"zb-t4-1.5b-{name}"]
        assert isinstance(found, Question)
        assert found.layout.structure.schedule == schedule


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("zero-t1-7.5b-z1-dp1", "a formula's value, not a run"),
        ("gpipe-transformer-k2-m1", "only ratios between runs are stated"),
        ("titan-nvfp4-8b-nvfp4", "fp4 is not modelled"),
        ("palm-540b", "no chip like 'TPUv4' is shipped"),
        ("neox-20b", "the micro-batch is not stated"),
    ],
)
def test_what_is_skipped_says_why(questions: dict[str, Question | list[str]], name: str, reason: str) -> None:
    found = questions[name]
    assert isinstance(found, list)
    assert reason in found


def test_lora_and_hybrids_are_skipped(shipped: dict[str, Row], questions: dict[str, Question | list[str]]) -> None:
    for name, row in shipped.items():
        if "LoRA" in (row["task"] or ""):
            assert "the rank of its LoRA is not stated" in questions[name]  # type: ignore[operator]
        if row["family"] == "hybrid":
            assert "state-space layers are not modelled" in questions[name]  # type: ignore[operator]


def test_fp8_has_many_names(questions: dict[str, Question | list[str]]) -> None:
    for name in ("titan-8b-8-fsdp-compile-fp8", "mbridge-26.08-deepseekv3-gb300-mxfp8-g256-1"):
        found = questions[name]
        assert isinstance(found, Question), found
        assert found.job.precision == "fp8"


def test_experts_and_latent_attention_are_the_rows(questions: dict[str, Question | list[str]]) -> None:
    found = questions["simumax-b200-deepseekv3_l4_tp1_ep8_pp1_dp8_mbc4"]
    assert isinstance(found, Question)
    assert found.model.attention == LatentAttention(128, 1536, 512, 128, 64, 128)
    mlp = found.model.mlp
    assert isinstance(mlp, Experts)
    assert mlp.shared is not None
    assert (mlp.num_experts, mlp.num_experts_per_tok, mlp.expert.intermediate_size) == (256, 8, 2048)
    assert [layer.mlp == mlp for layer in found.model.layers] == [False, True, True, True]
    assert (found.layout.ep, found.layout.structure.own_experts) == (8, True)


def test_a_public_model_has_what_its_row_leaves_out(questions: dict[str, Question | list[str]]) -> None:
    """Megatron-Bridge's models are the published ones; llm-foundry's MPT is of its own recipe, which has biases."""
    gpt, qwen, deepseek, kimi, mpt = (
        questions[name].model  # type: ignore[union-attr]
        for name in (
            "mbridge-26.04-gptoss120b-b200-bf16-g64-123",
            "mbridge-26.04-qwen330ba3b-b300-mxfp8-g8-127",
            "mbridge-26.04-deepseekv3-gb200-mxfp8-g256-117",
            "mbridge-26.04-kimik2-gb300-mxfp8-g256-146",
            "mpt-7b-s2048-g512-h100_80gb-m6-gb3072",
        )
    )
    assert (gpt.attention.sinks, gpt.attention.qkv_bias, gpt.mlp.expert.bias, gpt.mlp.router_bias) == (True,) * 4
    assert qwen.attention.qk_norm == "head"
    assert (deepseek.mlp.groups, deepseek.mlp.group_topk) == (8, 4)
    assert kimi.attention.kv_lora_rank == 512
    assert {model.max_position_embeddings for model in (gpt, qwen, deepseek, kimi)} == {4096}
    assert mpt.attention.qkv_bias


def test_windows_come_before_whole_attention(questions: dict[str, Question | list[str]]) -> None:
    found = questions["mbridge-26.04-gptoss120b-b200-bf16-g64-123"]
    assert isinstance(found, Question)
    assert [layer.attention.window for layer in found.model.layers[:4]] == [128, None, 128, None]  # type: ignore[union-attr]
    assert found.model.attention.head_dim == 64


def test_no_prediction_reads_what_was_measured(tmp_path: Path) -> None:
    ordinary = question(tmp_path)
    other = question(tmp_path, measured__step_time_s=99.0, measured__memory_gb=1)
    for field in ("model", "job", "cluster", "layout", "engine"):
        assert getattr(ordinary, field) == getattr(other, field)


# --- a row of one's own -----------------------------------------------------------------------------------------------
def test_a_rate_is_a_time(tmp_path: Path) -> None:
    found = question(tmp_path, measured={"tokens_per_s_per_gpu": 8192})
    assert found.step_seconds == pytest.approx(32 * 4096 / (8 * 8192))
    assert found.memory_kind is None


@pytest.mark.parametrize(
    ("said", "kind", "unit"),
    [
        ("GiB; peak reserved", "reserved", GIB),
        ("GB, peak allocated", "allocated", GB),
        ("nvidia-smi", "device", GIB),
        ("GB", None, None),
        ("GB allocated or reserved, which is not stated", None, None),
    ],
)
def test_memory_def(tmp_path: Path, said: str, kind: str | None, unit: int | None) -> None:
    found = question(tmp_path, measured__memory_def=said)
    assert found.memory_kind == kind
    assert found.memory_bytes == (20 * unit if unit else None)


def test_every_reason_at_once(tmp_path: Path) -> None:
    said = why(tmp_path, precision="nvfp4", hardware__gpu="TPUv4", micro_batch=None, model__layers=None)
    for reason in ("fp4", "no chip like 'TPUv4'", "the micro-batch", "the model's size is not stated (layers)"):
        assert reason in said


@pytest.mark.parametrize("chip", ["h200-sxm", "gb300"])
def test_a_shipped_chip_may_be_named_as_it_is(tmp_path: Path, chip: str) -> None:
    assert question(tmp_path, hardware__gpu=chip).cluster.chip.name == chip


def test_an_impossible_layout_is_skipped(tmp_path: Path) -> None:
    assert "tp=3 does not divide num_attention_heads=32" in why(tmp_path, layout__tp=3, layout__dp=8, layout__gpus=24)


def test_a_run_that_did_not_fit_is_right_where_the_prediction_does_not(tmp_path: Path) -> None:
    base = {**ROW, "oom": True, "measured": {"memory_def": "nvidia-smi"}}
    large = {**base, "id": "own-large", "model": {**ROW["model"], "layers": 200}}  # type: ignore[dict-item]
    rows = read(lines(tmp_path / "rows.jsonl", base, large))
    found = {row["id"]: row for row in validate(rows)["rows"]}
    assert found["own-1"]["oom_right"] is False
    assert found["own-large"]["oom_right"] is True
    assert found["own-large"]["signed_error"] is None
    assert validate(rows)["summary"]["memory_bytes"]["oom"] == {"n": 2, "right": 1}


# --- the command ------------------------------------------------------------------------------------------------------
SUMMARY = {"n", "mape", "median", "p90", "max", "bias", "in_range", "width_median"}


def test_the_contract_of_the_document(nanum: Run, tmp_path: Path) -> None:
    silent = {**ROW, "id": "own-2", "measured": {"step_time_s": 1.0, "memory_gb": 3, "memory_def": "GB"}}
    other = {**silent, "id": "own-4", "layout": {"gpus": 8, "tp": 8}, "measured": {"step_time_s": 9.0}}
    file = lines(tmp_path / "rows.jsonl", ROW, silent, {**ROW, "id": "own-3", "precision": "nvfp4"}, other, "")
    done = nanum("validate", str(file), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    keys = {"id", "source", "quantity", "measured", "predicted", "low", "high", "signed_error"}
    assert all(keys <= row.keys() for row in found["rows"])
    assert [(row["id"], row["quantity"]) for row in found["rows"]] == [
        ("own-1", "step_seconds"), ("own-1", "memory_bytes"), ("own-2", "step_seconds"), ("own-4", "step_seconds")
    ]  # fmt: skip
    time, memory, *_ = found["rows"]
    assert [row["group"] for row in found["rows"]] == ["own-1", None, "own-1", "own-1"]
    assert time["likely_cause"] == "repeats of this run differ by 50%"  # own-2 is this run in a second
    assert time["signed_error"] == pytest.approx(time["predicted"] / 1.5 - 1)
    assert time["low"] < time["predicted"] < time["high"]
    assert memory["measured"] == 20 * GIB
    assert [row["id"] for row in found["skipped"]] == ["own-3"]
    assert found["skipped"][0]["why"] == "fp4 is not modelled"
    assert [row["id"] for row in found["left_out"]] == ["own-2"]
    rows, printed = documented("validate"), set(leaves(found))
    assert {leaf for leaf in printed if not any(covers(row, leaf) for row in rows)} == set()
    assert {row for row in rows if not any(covers(row, leaf) for leaf in printed)} == set()
    for part in (found["summary"], found["by_source"]["own"]):
        assert part["step_seconds"].keys() >= SUMMARY
        assert part["memory_bytes"].keys() >= SUMMARY
        assert (part["step_seconds"]["n"], part["memory_bytes"]["n"]) == (3, 1)
        assert part["ranking"] == {
            "sources": 1,
            "groups": 1,
            "pairs": 1,  # the repeats are one layout
            "right": 1.0,
            "threshold": 0.05,
            "regret_median": 0.0,
            "regret_worst": 0.0,
            "worst_group": {"layouts": 2, "chosen": "own-1", "best": "own-1"},
        }
    shown = nanum("validate", str(file), "--rows")
    assert shown.returncode == 0
    for words in ("Step times", "Which layout is faster", "Memory, worst first", "fp4 is not modelled"):
        assert words in shown.stdout
    assert "own-1" in shown.stdout.splitlines()


def test_a_long_id_is_whole_and_no_range_is_none(nanum: Run, tmp_path: Path) -> None:
    """On a line of its own, wider than the terminal if need be. Of allocated memory there is no range to be in."""
    name = f"own-{'x' * 90}"
    counted = {"step_time_s": 1.5, "memory_gb": 20, "memory_def": "GB allocated"}
    file = lines(tmp_path / "rows.jsonl", {**ROW, "id": name, "measured": counted})
    shown = nanum("validate", str(file), "--rows").stdout.splitlines()
    assert shown.count(name) == 2
    memory = shown[shown.index("Memory") :]
    assert next(line for line in memory if line.startswith("own ")).split()[-2:] == ["-", "-"]


def test_nothing_to_compare_is_bad_news(nanum_process: Run, tmp_path: Path) -> None:
    done = nanum_process("validate", str(lines(tmp_path / "rows.jsonl", {**ROW, "precision": "nvfp4"})), "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["rows"] == []


def test_a_bad_file_has_every_reason(nanum: Run, tmp_path: Path) -> None:
    bad = {**ROW, "id": "own-2", "micro_batch": 0, "model": {**ROW["model"], "layers": "many"}}  # type: ignore[dict-item]
    slips = {"micro_batchsize": 1, "note": "x", "measured": {"step_time": 1, "loss": 2.0, "step_time_s_std": 0.1}}
    file = lines(tmp_path / "rows.jsonl", ROW, "{", bad, ROW, {"model": []}, {**ROW, "id": "own-3", **slips})
    done = nanum("validate", str(file))
    assert done.returncode == 2
    assert not done.stdout
    assert "Traceback" not in done.stderr
    for reason in (
        "line 2: not a JSON object",
        "line 3: micro_batch = 0 is not a whole number from 1 to 2,147,483,648",
        'line 3: model.layers = "many" is not a whole number from 1 to 2,147,483,648',
        "line 4: id own-1 is line 1's already",
        "line 5: it has no id",
        "line 5: model = [] is not an object",
        "line 6: unknown key micro_batchsize (did you mean micro_batch?)",
        "line 6: unknown key note",
        "line 6: unknown key measured.step_time (did you mean measured.step_time_s?)",
    ):
        assert reason in done.stderr
    assert not {"loss", "step_time_s_std"} & set(done.stderr.replace(".", " ").split())  # other quantities of the run


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(Refused, match="no row"):
        read(lines(tmp_path / "rows.jsonl", text))


def test_no_file_is_refused(nanum: Run, tmp_path: Path) -> None:
    done = nanum("validate", str(tmp_path / "rows.jsonl"))
    assert (done.returncode, "no such file" in done.stderr) == (2, True)
