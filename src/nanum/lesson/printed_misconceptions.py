"""The five beliefs on a page."""

from __future__ import annotations

from typing import Any

from nanum.lesson.page import Page
from nanum.lesson.words import gigabytes, percent, times
from nanum.units import format_seconds


def print_m(part: dict[str, Any], page: Page) -> None:
    page.title("M.title")
    twice = part["twice_the_gpus"]
    page.paragraph(
        "M.twice_the_gpus_noisy" if twice["noise"]["noisy"] else "M.twice_the_gpus",
        serial=percent(twice["serial_fraction"]),
        gpus=twice["gpus"],
        speedup=times(twice["speedup"]),
        doubling=times(twice["measured"]),
        ideal_speedup=times(twice["ideal_speedup"]),
        ideal_doubling=times(twice["ideal"]),
        spread=percent(twice["noise"]["worst_spread"]),
        limit=f"{twice['limit']:.0f}",
    )
    volume = part["least_volume"]
    page.paragraph(
        "M.least_volume",
        gpus=volume["gpus"],
        sequences=volume["sequences"],
        bytes=_by_way({way: f"{gigabytes(count)} GB" for way, count in volume["bytes"].items()}, page),
        in_node=_by_way(_steps(volume["ways"], "in_node"), page),
        between_nodes=_by_way(_steps(volume["ways"], "between_nodes"), page),
        first_in_node=page.say(volume["fastest"]["in_node"]),
        first_between_nodes=page.say(volume["fastest"]["between_nodes"]),
    )
    memory = part["memory_is_parameters"]
    page.paragraph(
        "M.memory_is_parameters",
        kept=times(memory["kept_over_params"]),
        activations=times(memory["activations_over_params"]),
        moment=page.say(f"C.moment.{memory['training_peak_moment']}"),
        training=times(memory["training_peak_over_params"]),
        inference=times(memory["inference_peak_over_params"]),
    )
    zero = part["zero_is_free"]
    page.paragraph(
        "M.zero_is_free",
        gpus=zero["gpus"],
        before=gigabytes(zero["bytes_per_gpu"]["none"]),
        after=gigabytes(zero["bytes_per_gpu"]["all"]),
        sent_before=_sent(zero["wire_bytes"]["none"]),
        sent_after=_sent(zero["wire_bytes"]["all"]),
    )
    real = part["a_real_cluster"]
    low, high = real["predicted_seconds_range"]
    page.paragraph(
        "M.a_real_cluster",
        cluster=real["cluster"],
        gpus=real["gpus"],
        sequences=real["sequences"],
        tokens=f"{real['tokens']:,}",
        one=format_seconds(real["one_gpu_seconds"]),
        arithmetic=format_seconds(real["arithmetic_seconds"]),
        predicted=format_seconds(real["predicted_seconds"]),
        low=format_seconds(low),
        high=format_seconds(high),
        worse=times(real["times_worse"]),
        speedup=times(real["speedup"]),
        exposed=format_seconds(real["exposed_communication_seconds"]),
        latency=format_seconds(real["latency_seconds"]),
        bubble=format_seconds(real["bubble_seconds"]),
        imbalance=format_seconds(real["imbalance_seconds"]),
        serial=percent(real["serial_fraction"], 1),
    )


def _steps(ways: dict[str, Any], place: str) -> dict[str, str]:
    return {way: format_seconds(places[place]["step_seconds"]) for way, places in ways.items()}


def _by_way(said: dict[str, str], page: Page) -> str:
    return ", ".join(f"{page.say(way)} {text}" for way, text in said.items())


def _sent(wire_bytes: int | None) -> str:
    return "?" if wire_bytes is None else gigabytes(wire_bytes)
