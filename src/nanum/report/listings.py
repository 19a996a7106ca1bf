"""Presets on a terminal: models, clusters and chips."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from nanum.report.numbers import gib, whole
from nanum.report.tables import Document, print_table, say, title
from nanum.units import GB, TFLOPS, format_short_count

MODELS = ("model", "parameters", "layers", "hidden\nsize", "context")
CLUSTERS = ("name", "the same as", "in a node\nGB/s a GPU", "between nodes\nGB/s a GPU")
CHIPS = ("name", "memory\nGiB", "memory\nGB/s", "16-bit dense\nTFLOPS", "fp8 dense\nTFLOPS")


def print_models(document: Document, console: Console) -> None:
    """Print `models`' document."""
    rows = (
        (
            model["name"],
            _parameters(model),
            *(whole(model[name]) for name in ("num_hidden_layers", "hidden_size", "max_position_embeddings")),
        )
        for model in document["models"]
    )
    print_table(console, MODELS, rows, words=1)


def print_clusters(document: Document, console: Console) -> None:
    """Print `clusters`' document: presets, and the chips that NODESxGPUSxCHIP may name."""
    title(console, "Clusters")
    clusters = (
        (
            cluster["name"],
            f"{cluster['nodes']}x{cluster['gpus_per_node']}x{cluster['chip']}",
            *(_rate(cluster[tier]["bytes_per_second"]) for tier in ("intra_node", "inter_node")),
        )
        for cluster in document["clusters"]
    )
    print_table(console, CLUSTERS, clusters, words=2)
    title(console, "Chips, to be named as NODESxGPUSxCHIP")
    chips = (
        (
            chip["name"],
            gib(chip["memory_bytes"]["value"]),
            _rate(chip["memory_bytes_per_second"]),
            *(_peak(chip["peak_flops_per_second"], dtypes) for dtypes in (("bf16", "fp16"), ("fp8",))),
        )
        for chip in document["chips"]
    )
    print_table(console, CHIPS, chips, words=1)
    say(console, "Where each number is from: --json", "dim")


def _rate(quantity: Document) -> str:
    return f"{quantity['value'] / GB:,.2f}".rstrip("0").rstrip(".")


def _peak(peaks: Document, dtypes: Sequence[str]) -> str:
    """The peak of the first of `dtypes` that the chip has."""
    return next((whole(peaks[dtype]["value"] / TFLOPS) for dtype in dtypes if dtype in peaks), "-")


def _parameters(model: Document) -> str:
    count = model["parameters"]
    about = "" if model["verified"] == "exact" else "about "
    return f"{about}{whole(count)} ({format_short_count(count)})"
