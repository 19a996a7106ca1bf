"""A scaling as one document of plain Python values: what `--json` prints and a table is laid out from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nanum.prediction.document import layout_document, question_document, unmodelled
from nanum.scaling.curve import Curve, Point, Rejected
from nanum.scaling.cuts import Cut, Serial, Uncut
from nanum.scaling.laws import (
    Pair,
    WithShares,
    amdahl_limit,
    amdahl_speedup,
    fit_amdahl,
    fit_gustafson,
    fit_with_shares,
    gpus_at_half_efficiency,
    gustafson_speedup,
)

if TYPE_CHECKING:
    from nanum.scaling import Scaling

DOUBLINGS_CONTINUED = 3
"""How far beyond the largest count a fitted curve is continued."""


def document(scaling: Scaling) -> dict[str, Any]:
    """`scale`'s document."""
    q, growth = scaling.asked, scaling.asked.growth
    curves = scaling.curves.values()
    largest = next((curve.predictions[-1] for curve in curves if curve.predictions), None)
    return {
        **question_document(q.model, q.job, q.cluster, q.engine),
        "best": growth is None,
        "grows": None if growth is None else growth.axis,
        "most_gpus": None if growth is None else growth.most_gpus(q.job.global_batch_size),
        "one_gpu_seconds": next((point.one_gpu_seconds for point in scaling.strong.points), None),
        "one_gpu_bytes": scaling.one_gpu_bytes,
        "one_gpu_fits": scaling.one_gpu_fits,
        "points": _points(scaling.strong),
        "amdahl": {**_amdahl(scaling.strong.pairs), "over_first": _over_first(scaling.strong)},
        "serial": None if scaling.serial is None else _serial(scaling.serial),
        "cuts": [_cut(cut) for cut in scaling.cuts if isinstance(cut, Cut)],
        "uncut": [{"cut": cut.name, "why": cut.why} for cut in scaling.cuts if isinstance(cut, Uncut)],
        "weak": {"points": _points(scaling.weak), "gustafson": _gustafson(scaling.weak.pairs)},
        "rejected": [_rejected(each) for curve in curves for each in curve.rejected],
        "capacity_bytes": int(q.cluster.chip.memory_bytes.value),
        "assumptions": [] if largest is None else largest.assumptions,
        "unmodelled": [*q.model.left_out, *([] if largest is None else unmodelled(largest.layout, q.job, q.cluster))],
    }


def _points(curve: Curve) -> list[dict[str, Any]]:
    law = fit_amdahl(curve.pairs) if curve.form == "strong" else fit_gustafson(curve.pairs)
    speedup = amdahl_speedup if curve.form == "strong" else gustafson_speedup
    return [_point(curve, point, None if law is None else speedup(law, point.gpus)) for point in curve.points]


def _point(curve: Curve, point: Point, by_the_law: float | None) -> dict[str, Any]:
    p, time = point.prediction, point.prediction.time
    return {
        "gpus": point.gpus,
        "nodes": p.cluster.nodes,
        "global_batch_size": p.job.global_batch_size,
        "step_seconds": time.step_seconds,
        "step_seconds_low": time.step_seconds_low,
        "step_seconds_high": time.step_seconds_high,
        "one_gpu_seconds": point.one_gpu_seconds,
        "speedup": point.speedup,
        "efficiency": point.efficiency,
        "speedup_over_first": point.speedup_over_first,
        "efficiency_over_first": point.efficiency_over_first,
        "serial_fraction": curve.serial_fraction(point),
        "speedup_by_the_law": by_the_law,
        "compute_seconds": time.compute_seconds,
        "exposed_communication_seconds": time.exposed_communication_seconds,
        "bubble_seconds": time.bubble_seconds,
        "optimizer_seconds": time.optimizer_seconds,
        "tokens_per_second": p.rates(time.step_seconds)["tokens_per_second"],
        "device_bytes": p.worst.device_bytes,
        "layout": layout_document(p.layout, p.num_microbatches),
    }


def _amdahl(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The law through the points, if one is of several GPUs; it goes on beyond them where anything is serial."""
    s = fit_amdahl(pairs)
    if s is None:
        nothing = dict.fromkeys(("serial_fraction", "limit", "gpus_at_half_efficiency", "worst_error", "with_shares"))
        return {**nothing, "continued": []}
    shares = fit_with_shares(pairs)
    return {
        **_law(s),
        "worst_error": _worst_error(s, pairs),
        "with_shares": None if shares is None else _with_shares(shares, pairs),
        "continued": [_continued(s, n) for n in beyond(pairs)] if s > 0 else [],
    }


def _over_first(curve: Curve) -> dict[str, Any] | None:
    """The law of the first count of GPUs as if it were one, which is the same where it is; None for less than two."""
    pairs, first = curve.pairs_over_first, curve.points[0].gpus if curve.points else 1
    s = fit_amdahl(pairs)
    if s is None:
        return None
    half = gpus_at_half_efficiency(s)
    counts = [point.gpus for point in curve.points] + ([round(n * first) for n in beyond(pairs)] if s > 0 else [])
    return {
        **_law(s),
        "gpus": first,
        "gpus_at_half_efficiency": None if half is None else half * first,
        "worst_error": _worst_error(s, pairs),
        "curve": [{**_continued(s, n / first), "gpus": n} for n in counts],
    }


def _worst_error(serial_fraction: float, pairs: Sequence[Pair]) -> float:
    return max(abs(amdahl_speedup(serial_fraction, n) / speedup - 1) for n, speedup in pairs)


def beyond(pairs: Sequence[Pair]) -> list[float]:
    """The largest count, doubled on."""
    return [max(n for n, _ in pairs) * 2**i for i in range(1, DOUBLINGS_CONTINUED + 1)]


def _law(serial_fraction: float) -> dict[str, Any]:
    return {
        "serial_fraction": serial_fraction,
        "limit": amdahl_limit(serial_fraction),
        "gpus_at_half_efficiency": gpus_at_half_efficiency(serial_fraction),
    }


def _with_shares(law: WithShares, pairs: Sequence[Pair]) -> dict[str, Any]:
    return {
        "serial_fraction": law.serial_fraction,
        "share_efficiency": law.share_efficiency,
        "limit": amdahl_limit(law.serial_fraction),
        "gpus_at_half_efficiency": law.gpus_at_half_efficiency,
        "worst_error": max(abs(law.speedup(n) / speedup - 1) for n, speedup in pairs),
    }


def _continued(serial_fraction: float, gpus: float) -> dict[str, Any]:
    speedup = amdahl_speedup(serial_fraction, gpus)
    return {"gpus": gpus, "speedup": speedup, "efficiency": speedup / gpus}


def _serial(serial: Serial) -> dict[str, Any]:
    return {
        "gpus": serial.gpus,
        "serial_fraction": serial.fraction(serial.prediction.time.step_seconds),
        "parts": [
            {"part": part.name, "seconds": part.seconds, "serial_fraction": part.serial_fraction}
            for part in serial.parts()
        ],
        "exchanges": [
            {
                **{key: getattr(row, key) for key in ("stage", "axis", "kind", "what", "phase", "link")},
                "exposed_seconds": row.exposed_seconds,
                "serial_fraction": fraction,
            }
            for row, fraction in serial.exchanges()
        ],
    }


def _cut(cut: Cut) -> dict[str, Any]:
    return {
        "cut": cut.name,
        "what": cut.what,
        "kind": cut.kind,
        "step_seconds": cut.step_seconds,
        "times_faster": cut.times_faster,
        **_law(cut.serial_fraction),
        "fits": cut.fits,
    }


def _gustafson(pairs: Sequence[Pair]) -> dict[str, Any]:
    s = fit_gustafson(pairs)
    worst = None if s is None else max(abs(gustafson_speedup(s, n) / speedup - 1) for n, speedup in pairs)
    return {"serial_fraction": s, "worst_error": worst}


def _rejected(each: Rejected) -> dict[str, Any]:
    return {"gpus": each.gpus, "form": each.form, "why": list(each.why), "device_bytes": each.device_bytes}
