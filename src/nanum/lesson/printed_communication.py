"""Part A on a page."""

from __future__ import annotations

import re
from typing import Any

from nanum.lesson.page import Page
from nanum.lesson.words import gigabytes, percent, times
from nanum.units import format_rate, format_seconds

WAYS = ("data_parallel", "tensor_parallel", "pipeline")
LESSON_TENSOR_PARALLEL_GB = "4.30"  # as the shorter lesson that this one grew from prints 4,294,967,296 bytes


def print_a(part: dict[str, Any], page: Page) -> None:
    page.title("A.title")
    dimensions, count = part["dimensions"], part["parameters"]
    page.paragraph(
        "A.intro",
        layers=dimensions["num_hidden_layers"],
        hidden=dimensions["hidden_size"],
        seq=dimensions["seq_len"],
        batch=dimensions["micro_batch_size"],
    )
    page.table(
        [page.say("way"), page.say("A.bytes"), page.say("A.exactly"), page.say("A.when"), page.say("A.what")],
        [
            [
                page.say(way),
                f"{gigabytes(part[way]['bytes'])} GB",
                f"{part[way]['bytes']:,}",
                page.say(f"A.{way}.when"),
                page.say(f"A.{way}.what"),
            ]
            for way in WAYS
        ],
        right={1, 2},
    )
    ours = gigabytes(part["tensor_parallel"]["bytes"])
    page.paragraph("A.convention", lesson=LESSON_TENSOR_PARALLEL_GB, ours=ours)
    real = gigabytes(part["real_data_parallel_bytes"])
    page.paragraph("A.parameters", model=count["model"], real=f"{count['real']:,}", bytes=real)
    _print_growth(part, page)
    _print_sent(part, page)
    _print_bubble(part["bubble"], page)
    _print_overlaid(part["overlaid"], page)


def _print_growth(part: dict[str, Any], page: Page) -> None:
    page.paragraph("A.sweep")
    doubled = list(part[WAYS[0]]["growth"])
    rows = []
    for way in WAYS:
        growth = part[way]["growth"]
        rows.append(
            [page.say(way), *(f"{growth[name]['ratio']:.2f} {page.say(growth[name]['kind'])}" for name in doubled)]
        )
    page.table([page.say("way"), *(page.say(name) for name in doubled)], rows)
    page.paragraph("A.sweep_reading")


def _print_sent(part: dict[str, Any], page: Page) -> None:
    in_node, between = ([part[way]["sent"][place] for way in WAYS] for place in (0, 1))
    page.paragraph(
        "A.sent",
        model=part["parameters"]["model"],
        group=in_node[0]["group_size"],
        engine=part["engine"],
        **{place: _described(link, page) for place, link in part["links"].items()},
    )
    rows = []
    for way, near, far in zip(WAYS, in_node, between, strict=True):
        forward = near["wire_bytes_by_phase"].get("forward", 0)
        rows.append(
            [
                page.say(way),
                f"{gigabytes(forward)} GB",
                f"{gigabytes(near['wire_bytes'] - forward)} GB",
                f"{near['calls']:,}",
                format_seconds(near["seconds"]),
                format_seconds(far["seconds"]),
            ]
        )
    columns = [
        page.say("way"),
        *(page.say(f"A.{name}") for name in ("forward", "backward", "messages", "in_node", "between_nodes")),
    ]
    page.table(columns, rows, right={1, 2, 3, 4, 5})
    _print_reconciled(part, page)
    _print_same_step(part["same_step"], page)


def _print_reconciled(part: dict[str, Any], page: Page) -> None:
    """From the first table's bytes to those of the table above."""
    found, tensor = part["reconciled"], part["tensor_parallel"]["sent"][0]
    forward = tensor["wire_bytes_by_phase"]["forward"]
    page.paragraph(
        "A.reconciled",
        loose_data=gigabytes(part["data_parallel"]["bytes"]),
        loose_tensor=gigabytes(part["tensor_parallel"]["bytes"]),
        real=f"{part['parameters']['real']:,}",
        group=found["group_size"],
        ring=f"{found['ring_factor']:g}",
        grad=f"{found['grad_bytes_per_parameter']:g}",
        grads=gigabytes(found["grads_bytes"]),
        data=gigabytes(part["data_parallel"]["sent"][0]["wire_bytes"]),
        layers=gigabytes(found["tensor_layers_bytes"]),
        ends=gigabytes(found["tensor_ends_bytes"]),
        forward=gigabytes(forward),
        both=gigabytes(tensor["wire_bytes"]),
    )


def _described(link: dict[str, Any], page: Page) -> str:
    """A link's speed is worth little without how it is known, and the group that it was measured in."""
    return page.say(
        "A.link",
        name=page.say("network") if link["name"] == "network" else link["name"],
        rate=format_rate(link["bytes_per_second"]["value"]),
        rate_known=_known(link["bytes_per_second"], page),
        efficiency=percent(link["efficiency"]["value"]),
        efficiency_known=_known(link["efficiency"], page),
        group=link["group_size"],
    )


def _known(quantity: dict[str, Any], page: Page) -> str:
    """A quantity's tag, and of its source what it was borrowed from: `assumed, borrowed from h200-sxm`."""
    tag = page.say(f"tag.{quantity['tag']}")
    borrowed = re.match(r"borrowed from ([^\s:]+)", quantity["source"])
    return page.say("A.borrowed", tag=tag, where=borrowed[1]) if borrowed else tag


def _print_same_step(same: dict[str, Any], page: Page) -> None:
    page.paragraph("A.same_step", sequences=same["sequences"])
    rows = []
    for way, places in same["ways"].items():
        steps = [
            f"{format_seconds(place['step_seconds'])} ({format_seconds(place['exposed_seconds'])})"
            for place in places.values()
        ]
        anywhere = places["in_node"]
        rows.append([page.say(way), f"{gigabytes(anywhere['wire_bytes'])} GB", f"{anywhere['calls']:,}", *steps])
    columns = [
        page.say("way"),
        *(page.say(f"A.{name}") for name in ("sent_bytes", "messages", "in_node", "between_nodes")),
    ]
    page.table(columns, rows, right={1, 2, 3, 4})
    fastest = {place: page.say(way) for place, way in same["fastest"].items()}
    page.paragraph("A.price", **fastest)


def _print_bubble(bubble: list[dict[str, Any]], page: Page) -> None:
    page.paragraph("A.bubble", stages=bubble[0]["stages"])
    columns = [page.say("A.microbatches"), *(str(row["num_microbatches"]) for row in bubble)]
    waits = [page.say("A.waits"), *(percent(row["fraction"]) for row in bubble)]
    page.table(columns, [waits], right=set(range(1, len(columns))))


def _print_overlaid(overlaid: dict[str, Any], page: Page) -> None:
    placed, divided = overlaid["placements"], overlaid["layout"]
    page.paragraph(
        "A.overlaid",
        cluster=overlaid["cluster"],
        microbatches=overlaid["num_microbatches"],
        sequences=overlaid["sequences"],
        tokens=f"{overlaid['tokens']:,}",
        **divided,
    )
    best = placed[0]["time"]["step_seconds"]
    rows = [
        [
            page.say(f"A.{place['placement']}"),
            format_seconds(place["time"]["step_seconds"]),
            format_seconds(place["time"]["exposed_communication_seconds"]),
            times(place["time"]["step_seconds"] / best),
        ]
        for place in placed
    ]
    page.table([page.say(f"A.{name}") for name in ("placement", "step", "exposed", "times")], rows, right={1, 2, 3})
    worst = max(place["time"]["step_seconds"] for place in placed)
    low, high = (placed[0]["time"][f"step_seconds_{end}"] / best for end in ("low", "high"))
    page.paragraph("A.overlaid_reading", worst=times(worst / best), low=times(low), high=times(high))
