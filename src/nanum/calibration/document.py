"""A calibration as one document of plain Python values: `predict`'s of the calibrated machine, and beside it what was
observed, what that moved, and what it implies.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nanum.calibration import Calibration
from nanum.calibration.coefficients import WHAT
from nanum.calibration.implied import Implied, Place
from nanum.cluster.in_a_step import NAMES
from nanum.prediction import Prediction
from nanum.prediction.document import layout_document


def document(c: Calibration, implied: Implied, file: str | None, runs: tuple[float, ...]) -> dict[str, Any]:
    """`predict`'s document of the calibrated machine, with `observed`. `file` is where it was written, if anywhere."""
    return {**c.after.to_dict(), "observed": observed(c, implied, file, runs)}


def observed(c: Calibration, implied: Implied, file: str | None, runs: tuple[float, ...]) -> dict[str, Any]:
    """What was observed, what that moved, and what it implies."""
    return {
        "step_seconds": c.seconds,
        "runs_seconds": list(runs),
        "standard_deviations": c.learned.deviations,
        "steps_seen": len(c.after.cluster.in_a_step.observations),  # type: ignore[union-attr]
        "before": _time(c.before),
        "after": _time(c.after),
        "least_seconds": c.least_seconds,
        "coefficients": _coefficients(c),
        "notes": [*c.notes, *(f"the best layouts are not sought: {why}" for why in implied.refused)],
        "best": [_place(place) for place in implied.places],
        "reordered": implied.reordered,
        "file": file,
    }


def _time(p: Prediction) -> dict[str, float]:
    return {key: getattr(p.time, key) for key in ("step_seconds", "step_seconds_low", "step_seconds_high")}


def _coefficients(c: Calibration) -> list[dict[str, Any]]:
    before, after = np.exp(c.held.mean), np.exp(c.learned.belief.mean)
    unsure = (np.sqrt(held.covariance.diagonal()) for held in (c.held, c.learned.belief))
    return [
        {
            "name": name,
            "what": WHAT[name],
            "unit": "seconds" if name.endswith("_seconds") else "ratio",
            "before": float(old),
            "after": float(new),
            "deviation_before": float(wide),
            "deviation_after": float(narrow),
            "slope": float(slope),
            "moved": name in c.moved,
            "at_bound": name in c.at_bound,
        }
        for name, old, new, wide, narrow, slope in zip(NAMES, before, after, *unsure, c.learned.slopes, strict=True)
    ]


def _place(place: Place) -> dict[str, Any]:
    p = place.prediction
    return {
        "layout": layout_document(p.layout, p.num_microbatches),
        "step_seconds_before": place.before_seconds,
        "step_seconds": place.after_seconds,
        "place_before": place.before,
        "place": place.after,
    }
