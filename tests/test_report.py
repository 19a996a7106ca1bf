"""What is printed: everything the document says, at 80 columns, with no number cut."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from nanum.report.layouts import layout_words
from nanum.report.numbers import gib, gigabytes, percent, ranges
from nanum.report.terminal import print_plan, print_prediction

COLUMNS = 80


def shown(printer: Any, document: dict[str, Any], *, terminal: bool = False, columns: int = COLUMNS) -> str:
    out = io.StringIO()
    printer(document, Console(file=out, width=columns, force_terminal=terminal, highlight=False), ["seq_len 8192"])
    return out.getvalue()


def flowing(text: str) -> str:
    """The text with its line breaks and paddings undone."""
    return " ".join(text.split())


@pytest.mark.parametrize("printer", [print_prediction, print_plan])
def test_eighty_columns_are_enough_and_a_pipe_gets_no_colours(
    printer: Any, prediction_document: dict[str, Any], plan_document: dict[str, Any]
) -> None:
    document = prediction_document if printer is print_prediction else plan_document
    text = shown(printer, document)
    assert max(len(line) for line in text.splitlines()) <= COLUMNS
    assert "…" not in text
    assert "\x1b" not in text
    assert "\x1b" in shown(printer, document, terminal=True)


def test_a_prediction_says_what_its_document_says(prediction_document: dict[str, Any]) -> None:
    text = flowing(shown(print_prediction, prediction_document))
    for words in (
        "llama-3.1-70b, 70,553,706,496 parameters",
        "8x8xh100-sxm, 64 GPUs",
        "torchtitan 0.2.0",
        "by default seq_len 8192",
        "It fits: 54.00 of 79.65 GiB, on stage 0, at the last backward of layer 19.",
        "50.00 allocated, 52.00 reserved by PyTorch, 2.00 for contexts and communicators",
        "1-2 8.00 8.00 16.00 8.00 <0.01 40.00",
        "all_gather of params, bf16, forward 2,688 1,129 1,058 22.6 s 2.26 s",
        "exposed communication 1.00 s 12.5%",
        "pipeline bubble 750 ms 9.4%",
        "between 7.25 s and 9.50 s",
        "524,288 tokens/s, 8,192 a GPU; MFU 41.2%, HFU 53.8% of 989 TFLOPS a GPU",
        "serial fraction 0.0123",
        "ASSUMED inter_node.bytes_per_second: 50.0",
        "[nvidia-smi] on the node",
        "[failures] and restarts",
    ):
        assert words in text


def test_stages_that_send_the_same_are_shown_once(prediction_document: dict[str, Any]) -> None:
    text = shown(print_prediction, prediction_document)
    assert text.count("reduce_scatter of grads") == 2  # of stages 0-2, which send activations on, and of the last
    assert "stage 0-2; times are of stage 0" in text


def test_what_does_not_fit_says_by_how_much_and_where(prediction_document: dict[str, Any]) -> None:
    prediction_document["fits"] = False
    prediction_document["memory"]["capacity_bytes"] = 42_949_672_960
    text = flowing(shown(print_prediction, prediction_document))
    assert "It does not fit: 54.00 of 40.00 GiB, 14.00 GiB too much, on stage 0, at the last backward" in text


def test_unknown_numbers_are_question_marks(prediction_document: dict[str, Any]) -> None:
    prediction_document["throughput"]["hfu"] = None
    prediction_document["time"] |= {"step_seconds_low": None, "serial_fraction": None}
    text = flowing(shown(print_prediction, prediction_document))
    assert "HFU ? of" in text
    assert "between ? and 9.50 s" in text
    assert "serial fraction" not in text


def test_a_small_serial_fraction_is_not_shown_as_zero(prediction_document: dict[str, Any]) -> None:
    prediction_document["time"]["serial_fraction"] = -1.49e-06
    text = flowing(shown(print_prediction, prediction_document))
    assert "serial fraction -1.49e-06 (Karp-Flatt" in text
    assert "below 0: a GPU has less to do than its share of one GPU's work" in text


def test_one_gpu_exchanges_nothing_and_says_so(prediction_document: dict[str, Any]) -> None:
    prediction_document["communication"] = []
    assert "Communication of one GPU in one step none" in flowing(shown(print_prediction, prediction_document))


def test_a_plan_ranks_explains_and_counts(plan_document: dict[str, Any]) -> None:
    text = flowing(shown(print_plan, plan_document))
    words = "5,400 layouts in 310 ms: 1,200 impossible, 4,000 too large for the memory, 200 ranked, and 7 of them tried"
    assert words in text
    assert text.index("dp_shard 16 · pp 4") < text.index("dp_shard 2 · tp 8 · pp 4")
    assert "dp_shard 16 · pp 4 beats tp 8: 1.0 s less of exposed communication" in text
    assert "1,200: tp=7 does not divide num_attention_heads=64" in text
    assert "1 near tie is folded" in text
    assert "(near ties: dp_replicate 2 · nothing sharded (ZeRO-3 of 1 rank))" in text


def test_a_plan_in_which_nothing_fits_says_so(plan_document: dict[str, Any]) -> None:
    plan_document["best"] = []
    assert "No layout fits." in shown(print_plan, plan_document)
    plan_document["count"] |= {"too_large": 0}  # then more memory would not help
    assert "No layout is possible" in shown(print_plan, plan_document)


def test_layout_words_name_what_divides_and_what_saves_memory() -> None:
    layout = {
        "dp_replicate": 2,
        "dp_shard": 4,
        "cp": 1,
        "tp": 8,
        "pp": 1,
        "zero": 3,
        "reshard": False,
        "tensor": "sequence",
    }
    assert (
        layout_words(layout) == "dp_replicate 2 · dp_shard 4 · tp 8 · ZeRO-3, weights kept gathered · sequence parallel"
    )
    assert layout_words({"cp": 4, "cp_kind": "ulysses", "zero": 3}) == "cp 4 · ZeRO-3 · ulysses context parallel"
    assert layout_words({"dp_shard": 1, "zero": 0}) == "one GPU · no ZeRO"
    assert layout_words({"dp_shard": 4, "tp": 2, "etp": 1}) == "dp_shard 4 · tp 2 · etp 1"
    assert layout_words({"dp_shard": 4, "tp": 2, "etp": 2}) == "dp_shard 4 · tp 2"


def test_zero_among_one_rank_shards_nothing_and_is_called_so() -> None:
    alone = {"dp_replicate": 8, "dp_shard": 1, "zero": 3, "reshard": False}
    assert layout_words(alone) == "dp_replicate 8 · nothing sharded (ZeRO-3 of 1 rank)"
    assert "ZeRO-3" in layout_words({**alone, "cp": 2}).split(" · ")[2]  # it is over dp_shard and cp
    assert "hpZ" in layout_words({**alone, "hpz": True})  # which shards over replicas
    experts = {"dp_replicate": 2, "dp_shard": 1, "tp": 4, "ep": 2, "etp": 1, "zero": 1}  # of whose copies there are two
    assert "ZeRO-1" in layout_words(experts).split(" · ")
    assert "nothing sharded (ZeRO-1 of 1 rank)" in layout_words({**experts, "ep": 4})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (gib(2**30 * 12.345), "12.35"),
        (gib(1024), "<0.01"),
        (gib(0), "0"),
        (gib(None), "?"),
        (gib(-(2**30)), "-1.00"),
        (gigabytes(4_294_967_296), "4.29"),
        (gigabytes(67_108_864), "0.067"),
        (gigabytes(1_128_859_303_936), "1,129"),
        (gigabytes(8), "<0.001"),
        (percent(0.5), "50.0%"),
        (ranges([0, 1, 2, 3, 7]), "0-3, 7"),
        (ranges([5]), "5"),
    ],
)
def test_numbers(text: str, expected: str) -> None:
    assert text == expected
