"""Part D on a page. Which of its texts is true is decided by the document's verdicts alone."""

from __future__ import annotations

from typing import Any

from nanum.lesson.page import Page
from nanum.lesson.words import megabytes, percent, processor, seconds_between, times
from nanum.units import format_seconds


def print_d(part: dict[str, Any], page: Page) -> None:
    page.title("D.title")
    job = part["job"]
    page.paragraph(
        "D.intro",
        device=processor(part["processor"], page.say),
        torch=part["torch"],
        backend=part["backend"],
        layers=job["layers"],
        hidden=job["hidden"],
        parameters=f"{job['parameters']:,}",
        precision=job["precision"],
        sequences=job["sequences"],
        seq=job["seq_len"],
    )
    _print_rounds(part, page)
    _print_formula(part, page)
    _print_run(part, page)
    _print_law(part, page)
    _print_exchanges(part, page)


def _print_rounds(part: dict[str, Any], page: Page) -> None:
    rounds, need, spread = part["rounds"], part["rounds_to_agree"], percent(part["worst_spread"])
    if need <= rounds:
        page.paragraph("D.turns", rounds=rounds, need=need, spread=spread)
    else:
        page.paragraph("D.turns_few", rounds=rounds, spread=spread)
    cores, most = part["cores"], part["apart"]["ranks"]
    key = "D.cores_one" if cores == 1 else "D.cores_left" if cores > most else "D.cores"
    page.paragraph(key, cores=cores, n=most)


def _print_formula(part: dict[str, Any], page: Page) -> None:
    job, apart, n = part["job"], part["apart"], part["apart"]["ranks"]
    page.paragraph(
        "D.formula",
        parameters=f"{job['parameters']:,}",
        grads=megabytes(job["grads_bytes"]),
        wire=megabytes(_exchange(part, "buckets")["wire_bytes"]),
        n=n,
    )
    low, high = part["predicted"]["seconds"]
    serial_low, serial_high = part["predicted"]["serial_fraction"]
    page.paragraph(
        "D.apart",
        one=format_seconds(part["base_seconds"]),
        share=format_seconds(apart["share_seconds"]),
        forward=format_seconds(apart["forward_seconds"]),
        backward=format_seconds(apart["backward_seconds"]),
        optimizer=format_seconds(apart["optimizer_seconds"]),
        reduce=format_seconds(apart["all_reduce_seconds"]),
        n=n,
        low=format_seconds(low),
        high=format_seconds(high),
        serial_low=percent(serial_low, 1),
        serial_high=percent(serial_high, 1),
    )


def _print_run(part: dict[str, Any], page: Page) -> None:
    page.paragraph("D.run")
    rows = []
    for scaled in part["scaling"]:
        serial, likely = scaled["serial_fraction"], scaled["serial_fraction_range"]
        rows.append(
            [
                str(scaled["ranks"]),
                format_seconds(scaled["median_seconds"]),
                seconds_between(*scaled["quartile_seconds"]),
                times(scaled["speedup"]),
                percent(scaled["efficiency"]),
                "" if serial is None else percent(serial, 1),
                _range(likely) if likely else "",
            ]
        )
    names = ("B.median", "B.middle_half", "D.speedup", "B.efficiency")
    page.table(["N", *map(page.say, names), "s", page.say("D.likely")], rows, right=set(range(7)))
    if part["crowded"]:
        one, last = part["scaling"][0], part["scaling"][-1]
        page.paragraph("D.crowded", n=last["ranks"], running=percent(last["running"]), one=percent(one["running"]))
    predicted = part["predicted"]
    page.paragraph(
        f"D.difference_{predicted['verdict']}",
        measured=format_seconds(predicted["measured_seconds"]),
        range=seconds_between(*predicted["seconds"]),
        percent=percent(abs(predicted["difference"])),
        agree=predicted["rounds_outside"],
        rounds=part["rounds"],
        n=part["apart"]["ranks"],
    )


def _print_law(part: dict[str, Any], page: Page) -> None:
    law, last, parts = part["amdahl"], part["scaling"][-1], part["parts"]
    serial = {"serial": percent(law["serial_fraction"], 1), "range": _range(law["serial_fraction_range"])}
    page.paragraph(
        "D.parts",
        serial=serial["serial"],
        optimizer=percent(parts["optimizer"], 1),
        pieces=percent(parts["small_pieces"], 1),
        exchange=percent(parts["exchange_and_contention"], 1),
    )
    if law["noisy"]:
        page.paragraph("D.law_noisy", range=serial["range"])
    if law["serial_fraction"] >= 1:
        page.paragraph("D.no_speedup", n=last["ranks"], **serial)
    elif law["limit"] is None:
        page.paragraph("D.no_serial", n=last["ranks"], speedup=times(last["speedup"]), **serial)
    else:
        page.paragraph("D.law", **serial)
        columns = [str(point["gpus"]) for point in law["curve"]]
        speedups = [times(point["speedup"]) for point in law["curve"]]
        page.table([*columns, page.say("B.limit")], [[*speedups, times(law["limit"])]], right=set(range(11)))
        page.paragraph("D.ceiling", limit=times(law["limit"]), half=f"{law['gpus_at_half_efficiency']:,.1f}")


def _print_exchanges(part: dict[str, Any], page: Page) -> None:
    page.paragraph("D.exchanges", n=part["apart"]["ranks"])
    rows = [
        [
            page.say(f"D.{each['exchange']}"),
            f"{each['calls']:,}",
            f"{megabytes(each['wire_bytes'])} MB",
            seconds_between(*each["predicted_seconds"]),
            format_seconds(each["median_seconds"]),
            f"{100 * each['difference']:+.0f}%" if each["difference"] else "0",
            percent(each["serial_fraction"], 1),
        ]
        for each in part["exchanges"]
    ]
    names = ("D.exchange", "A.messages", "A.sent_bytes", "D.by_formula", "D.as_measured", "D.off")
    page.table([*map(page.say, names), "s"], rows, right=set(range(1, 7)))
    for effect in part["effects"]:
        _print_effect(effect, part, page)
    page.paragraph("D.on_a_cpu")


def _print_effect(effect: dict[str, Any], part: dict[str, Any], page: Page) -> None:
    before, after = _exchange(part, effect["from"]), _exchange(part, effect["to"])
    named = page.say(
        f"D.effect.{effect['effect']}",
        calls_before=before["calls"],
        calls_after=after["calls"],
        sent_before=megabytes(before["wire_bytes"]),
        sent_after=megabytes(after["wire_bytes"]),
    )
    verdict = effect["verdict"]
    page.paragraph(
        f"D.told_{verdict}",
        effect=named,
        percent=percent(abs(effect["seconds_ratio"] - 1)),
        agree=effect["rounds_slower" if verdict == "slower" else "rounds_faster"],
        faster=effect["rounds_faster"],
        rounds=part["rounds"],
        before=percent(before["serial_fraction"], 1),
        after=percent(after["serial_fraction"], 1),
    )


def _exchange(part: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in part["exchanges"] if each["exchange"] == name)


def _range(fractions: list[float]) -> str:
    low, high = fractions
    return f"{percent(low)} – {percent(high)}"
