"""Part C on a page."""

from __future__ import annotations

from typing import Any

from nanum.lesson.arithmetic import ZERO_GPUS
from nanum.lesson.page import Page
from nanum.lesson.words import gigabytes, megabytes, processor, tenths_of_gigabytes, times

TRADE_GPUS = "8"


def print_c(part: dict[str, Any], page: Page) -> None:
    page.title("C.title")
    _print_kept(part["measured"], page)
    zero = part["zero"]
    page.paragraph("C.zero")
    gpus = [str(n) for n in ZERO_GPUS]
    columns = [page.say("C.sharded"), *(page.say("one_gpu") if n == "1" else page.say("gpus", n=n) for n in gpus)]
    right = set(range(1, len(columns)))
    rows = [
        [page.say(f"C.{row['sharded']}"), *(f"{tenths_of_gigabytes(row['bytes_per_gpu'][n])} GB" for n in gpus)]
        for row in zero
    ]
    page.table(columns, rows, right=right)
    page.paragraph("C.zero_sent", model=part["model"], engine=part["engine"])
    page.table(
        columns,
        [[page.say(f"C.{row['sharded']}"), *(_sent(row["sent"][n], page) for n in gpus)] for row in zero],
        right=right,
    )
    reasons = dict.fromkeys(
        reason for row in zero for sent in row["sent"].values() for reason in (sent or {}).get("refused", [])
    )
    if reasons:
        page.paragraph("C.refused", reasons="; ".join(reasons))
    _print_calls(zero, page)
    _print_trade(zero, page)


def _sent(sent: dict[str, Any] | None, page: Page) -> str:
    """`23.6 (130)`: GB and messages."""
    if sent is None:
        return "0"
    return page.say("refused") if "refused" in sent else f"{gigabytes(sent['wire_bytes'])} GB ({sent['calls']:,})"


def _print_calls(zero: list[dict[str, Any]], page: Page) -> None:
    """What the messages of each stage are; said only where the engine has every stage."""
    sent = [row["sent"][TRADE_GPUS] for row in zero]
    if any("refused" in each for each in sent):
        return
    none, optimizer, grads, params = (each["calls_by_kind"] for each in sent)
    page.paragraph(
        "C.calls",
        all_reduces=none["all_reduce"],
        buckets_reduced=optimizer["reduce_scatter"],
        buckets_gathered=optimizer["all_gather"],
        parts_reduced=grads["reduce_scatter"],
        parts_gathered=grads["all_gather"],
        gathered_twice=params["all_gather"],
        reduced_once=params["reduce_scatter"],
    )


def _print_trade(zero: list[dict[str, Any]], page: Page) -> None:
    whole, divided = zero[0], zero[-1]
    before, after = whole["sent"][TRADE_GPUS], divided["sent"][TRADE_GPUS]
    if "refused" not in before and "refused" not in after:
        page.paragraph(
            "C.trade",
            gpus=TRADE_GPUS,
            before=tenths_of_gigabytes(whole["bytes_per_gpu"][TRADE_GPUS]),
            after=tenths_of_gigabytes(divided["bytes_per_gpu"][TRADE_GPUS]),
            times=times(after["wire_bytes"] / before["wire_bytes"]),
        )


def _print_kept(measured: dict[str, Any], page: Page) -> None:
    model, allocator = measured["model"], measured["allocator"]
    page.paragraph(
        "C.intro",
        device=processor(measured["processor"], page.say),
        torch=measured["torch"],
        parameters=f"{model['parameters']:,}",
        layers=model["layers"],
        hidden=model["hidden"],
    )
    columns = [page.say("C.what"), page.say("C.memory"), page.say("C.multiple")]
    rows = []
    for name in ("params", "grads", "optimizer_states", "total"):
        count = measured[f"{name}_bytes"]
        rows.append([page.say(f"C.{name}"), f"{megabytes(count)} MB", f"{measured['ratio'][name]:.3f}"])
        if allocator is not None:
            rows[-1].append(f"{megabytes(allocator[f'{name}_bytes'])} MB")
    activations = measured["activations_bytes"]
    rows.append(
        [page.say("C.activations"), f"{megabytes(activations)} MB", f"{activations / measured['params_bytes']:.3f}"]
    )
    if allocator is not None:
        columns.append(page.say("C.allocator"))
        rows[-1].append("")
    page.table(columns, rows, right={1, 2, 3})
    page.paragraph("C.step_counters", bytes=measured["step_counters_bytes"])
    if allocator is not None:
        workspace = allocator["matmul_workspace_bytes"]
        rest = megabytes(allocator["grads_bytes"] - workspace)
        page.paragraph("C.workspace", workspace=megabytes(workspace), grads=rest)
    page.paragraph("C.activations_grow", rows=model["rows"])
    _print_peaks(measured, page)


def _print_peaks(measured: dict[str, Any], page: Page) -> None:
    """Three ratios near one another, each over what it is over; and why the peak is not the table's sum."""
    model, params = measured["model"], measured["params_bytes"]
    training, inference = measured["training_peak_bytes"], measured["inference_peak_bytes"]
    together = measured["total_bytes"] + measured["activations_bytes"]
    over = training - measured["total_bytes"]
    matrix = params / model["parameters"] * model["hidden"] ** 2
    page.paragraph(
        "C.peaks",
        inference=megabytes(inference),
        inference_ratio=times(inference / params),
        training=megabytes(training),
        training_ratio=times(training / params),
        times=times(training / inference),
    )
    page.paragraph(
        f"C.peak_{measured['training_peak_moment']}",
        together=megabytes(together),
        together_ratio=times(together / params),
        over=megabytes(over),
        matrices=f"{over / matrix:.1f}",
        layers=model["layers"],
    )
