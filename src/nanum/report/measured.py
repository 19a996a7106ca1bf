"""A measured cluster on a terminal."""

from __future__ import annotations

from rich.console import Console

from nanum.report.numbers import whole
from nanum.report.tables import Document, print_list, print_table, say, title
from nanum.units import (
    GB,
    format_bytes,
    format_decimal_bytes,
    format_flops_per_second,
    format_rate,
    format_seconds,
)

EXCHANGES = ("exchange", "ranks", "nodes", "payload", "time", "low … high", "algbw\nGB/s", "busbw\nGB/s")


def print_measured(document: Document, console: Console) -> None:
    """Print `measure`'s document."""
    cluster = document["cluster"]
    say(console, f"{document['file']}: {cluster['nodes']} x {cluster['gpus_per_node']} x {cluster['chip']}")
    lines = [
        f"best matmul, {dtype}: {format_flops_per_second(r)}" for dtype, r in cluster["best_flops_per_second"].items()
    ]
    lines.append(f"memory: {format_bytes(cluster['memory_bytes'])}, {format_rate(cluster['memory_bytes_per_second'])}")
    if document["operation_seconds"] is not None:
        lines.append(f"shortest operation: {format_seconds(document['operation_seconds'])}")
    if (ratios := document["together"]) is not None:
        said = ", ".join(f"{subject} {ratio:.2f}" for subject, ratio in ratios.items() if subject != "ranks")
        lines.append(f"with all {ratios['ranks']} at it at once, times as long: {said}")
    if (beside := document["beside"]) is not None:
        lines.append(
            f"beside each other, times as long: compute {beside['compute']:.2f}, exchanges {beside['exchange']:.2f}"
        )
    host = {work: seconds for work, seconds in document["framework"].items() if seconds is not None}
    if host:
        said = ", ".join(f"{work.replace('_', ' ')} {format_seconds(seconds)}" for work, seconds in host.items())
        lines.append(f"the host's own work: {said}")
    if any(document["grids"].values()):  # of logs the chip is taken as it is known
        print_list(console, "Measured", lines)
    print_list(console, "Links, of one GPU", map(_link, cluster["links"]))
    if document["exchanges"]:
        title(console, "Exchanges, by the conventions of nccl-tests")
        print_table(console, EXCHANGES, (row for e in document["exchanges"] for row in _rows(e)), words=1)
    for source in document["sources"]:
        say(console, source, "dim")


def _link(link: Document) -> str:
    among = f"{link['efficiency']:.1%} of it among {link['efficiency_group_size']} ranks ({link['efficiency_tag']})"
    hop = f"{format_seconds(link['latency_seconds'])} a hop ({link['latency_tag']})"
    return f"{link['name']}: {format_rate(link['bytes_per_second'])} ({link['tag']}), {among}, {hop}"


def _rows(e: Document) -> list[tuple[str, ...]]:
    heading = (e["kind"], whole(e["ranks"]), whole(e["nodes"]))
    return [
        (
            *(heading if i == 0 else ("", "", "")),
            format_decimal_bytes(e["payload_bytes"][i]),
            format_seconds(e["seconds"][i]),
            f"{format_seconds(e['low_seconds'][i])} … {format_seconds(e['high_seconds'][i])}",
            _rate(e["algbw_bytes_per_second"][i]),
            _rate(e["busbw_bytes_per_second"][i]),
        )
        for i in range(len(e["payload_bytes"]))
    ]


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / GB:.3g}"
