"""What makes a layout that is too large fit, beside another layout: what a plan does not search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from nanum.prediction import Prediction, reasons

LEVERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--loss chunked", {"loss": "chunked"}),
    ("--loss fused", {"loss": "fused"}),
    ("--optimizer adamw-bf16", {"optimizer": "adamw-bf16"}),
    ("--optimizer adamw-8bit", {"optimizer": "adamw-8bit"}),
    ("--offload optimizer", {"offload": ("optimizer",)}),
    ("--offload params", {"offload": ("params",)}),
    ("--offload activations", {"offload": ("activations",)}),
)
"""Flags of `predict`, with what they change of a job or of a layout's structure; the cheaper ones first."""


def levers(p: Prediction) -> Iterator[dict[str, Any]]:
    """Those that an engine has and that make the layout fit, each by itself: its flags and the bytes of its fullest
    device.
    """
    for flags, changed in LEVERS:
        job = {k: v for k, v in changed.items() if k == "optimizer"}
        structure = {k: v for k, v in changed.items() if k != "optimizer"}
        layout = replace(p.layout, structure=replace(p.layout.structure, **structure))
        other = replace(p, job=replace(p.job, **job), layout=layout)
        if not reasons(other.model, other.job, other.cluster, other.layout, other.engine) and other.fits:
            yield {"flags": flags, "device_bytes": int(other.worst.device_bytes)}
