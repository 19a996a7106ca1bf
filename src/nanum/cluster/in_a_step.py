"""What steps observed on a machine say of its coefficients: what is done in a step over what is done alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nanum.cluster.quantity import Quantity

LIMITS: Mapping[str, tuple[float, float]] = {
    "matmul": (0.01, 1.0),
    "matmul_untabled": (0.01, 1.0),
    "matmul_fp8": (0.01, 2.0),
    "attention": (0.01, 1.0),
    "memory": (0.01, 1.0),
    "host_seconds": (1e-8, 1e-2),
    "expert_seconds": (1e-8, 1e-2),
    "intra_node": (0.01, 1.0),
    "inter_node": (0.01, 1.0),
    "beside": (0.001, 1.0),
}
"""The least and the most that each may be (`account.coefficients.Fitted` says what it is). A most of 1 is physical:
nothing is faster in a step than alone, and compute loses no more than all of what an exchange takes. The others are
beyond any machine, and keep a slip out."""
NAMES = tuple(LIMITS)
OF_HOST = ("host_seconds", "expert_seconds")
"""Those of launches by the host."""
PHYSICAL = 1.0
"""The most of what cannot be faster in a step than alone."""


@dataclass(frozen=True)
class Observation:
    """One step that was observed on the machine; `layout` in words."""

    model: str
    engine: str
    precision: str
    layout: str
    seconds: float
    predicted_seconds: float  # before it was observed
    doubts: tuple[str, ...] = ()  # why it may not be what it is said to be

    @property
    def source(self) -> str:
        return "observed, and doubted" if self.doubts else "observed"


@dataclass(frozen=True)
class InAStep:
    """Coefficients of this machine, as steps on it have them; by name, those that are known.

    `covariance` is of the natural logarithms of those in `sure`, in that order.
    """

    values: tuple[tuple[str, Quantity], ...]
    sure: tuple[str, ...] = ()
    covariance: tuple[tuple[float, ...], ...] = ()
    observations: tuple[Observation, ...] = ()

    def seen(self, model: str, engine: str, precision: str) -> int:
        """How many steps of this model, engine and precision were observed here."""
        asked = model, engine, precision
        return sum((each.model, each.engine, each.precision) == asked for each in self.observations)
