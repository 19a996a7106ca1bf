"""The numbers of the cost model: constants, each from a source outside the published runs (`data/measured/cost.toml`),
and the few that are fitted on those (`data/measured/fitted.toml`, written by `make calibrate`), with how far they
differ from machine to machine (`data/measured/spread.toml`, written with it).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from importlib.resources import files
from statistics import NormalDist
from typing import Any, get_args

from nanum.cluster import Cluster, InAStep
from nanum.cluster import Quantity as Stated
from nanum.cluster.in_a_step import OF_HOST
from nanum.program import Library


@dataclass(frozen=True)
class Family:
    """What chips of one kind reach: `matmul` is typical over best, attention is causal FLOPs over the peak."""

    name: str
    chips: tuple[str, ...]
    matmul: Stated | None  # None where no table of matmuls is at hand: `Fitted.matmul_untabled`
    attention: Mapping[tuple[str, str], Stated]  # by the library of its kernel (`program.Library`), and the direction


@dataclass(frozen=True)
class Fitted:
    """Global, physical, and no more than a dozen; of a step, over what the same does alone. All are ratios but those in
    seconds. A value may be an array of several to be tried at once.
    """

    matmul: Stated  # rate of matmuls
    matmul_untabled: Stated  # typical over best matmul of a family of which no table is at hand (H100's)
    matmul_fp8: Stated  # that of fp8 over that of bf16, each over its own best
    attention: Stated  # rate of attention
    memory: Stated  # bandwidth over its peak
    host_seconds: Stated  # of the host, to launch a kernel from Python
    expert_seconds: Stated  # and for an operation on experts' slots, where it goes through them by expert
    intra_node: Stated  # rate of an exchange inside a node
    inter_node: Stated  # and between nodes
    beside: Stated  # what compute loses of the time that an exchange is beside it


@dataclass(frozen=True)
class Range:
    """Least and most of a step over what is predicted: percentiles of published runs that had no part in the fit, each
    source alike.
    """

    low: float
    high: float


@dataclass(frozen=True)
class Ranges:
    """Of dense models, of such with experts, and of what no published run is like."""

    dense: Range
    moe: Range
    unlike: Range
    engines: tuple[str, ...]  # that enough of those runs had, by name
    chips: tuple[str, ...]  # and chips
    source: str

    def of(self, engine: str, chip: str, *, experts: bool) -> Range:
        """That of a step with this engine on this chip, with or without experts."""
        if engine not in self.engines or chip not in self.chips:
            return self.unlike
        return self.moe if experts else self.dense


@dataclass(frozen=True)
class Spread:
    """Standard deviations of natural logarithms: of each coefficient, from one machine with its software to another;
    and of a step, from what the coefficients of its own machine would say of it (`run`).
    """

    of: Mapping[str, float]
    run: float
    source: str


@dataclass(frozen=True)
class Coefficients:
    """The numbers of the files."""

    matmul_unhidden: Stated
    matmul_tile: Stated
    matmul_best_fraction: Stated
    matmul_by: Mapping[str, Stated]  # of fp8, by `dtypes.Scales`, over one with a scale for all of an operand
    launch_seconds: Stated
    uneven: Stated  # of GPUs of one kind, the standard deviation of their rate of products over its mean
    families: tuple[Family, ...]
    fitted: Fitted
    ranges: Ranges
    spread: Spread
    observed: Mapping[int, Ranges]  # of a machine on which so many steps of the same model were observed, or more

    def ranges_after(self, observations: int) -> Ranges:
        """Those of a machine on which so many steps of the same model, engine and precision were observed."""
        return next((self.observed[n] for n in sorted(self.observed, reverse=True) if n <= observations), self.ranges)

    def slowest(self, gpus: int) -> float:
        """How long the slowest of so many GPUs takes for products, over a usual one, where their times are normal
        around its own. A step waits for it: what the others wait for is what it has not done yet. Of kernels that were
        measured on the cluster itself nothing is said: they took what they took there.
        """
        return 1 + self.uneven.value * most_of(gpus)

    @property
    def alone(self) -> Coefficients:
        """Those of kernels and exchanges that are done alone, as they are timed."""
        one, none = Stated(1.0, "derived", "alone"), Stated(0.0, "derived", "alone")
        free = dict.fromkeys((*OF_HOST, "beside"), none)
        others = {**free, "matmul_untabled": self.fitted.matmul_untabled}
        names = (f.name for f in fields(Fitted))
        return replace(self, uneven=none, fitted=Fitted(**{name: others.get(name, one) for name in names}))

    def family(self, chip: str) -> Family:
        """The family that lists this chip, or the first where none does."""
        return next((family for family in self.families if chip in family.chips), self.families[0])


def most_of(n: int) -> float:
    """What the most of n standard normal numbers is expected to be: 0 of one (Blom, Statistical Estimates and
    Transformed Beta-Variables, 1958).
    """
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25))


def _table(name: str) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((files("nanum") / f"data/measured/{name}.toml").read_text("utf-8"))
    return table


@cache
def coefficients(without: str = "") -> Coefficients:
    """Those that the package ships; or, for a published run, those fitted `without` its source's runs."""
    table, fitted = _table("cost"), _table("fitted")
    left_out, ranges = fitted.pop("without").get(without, {}), fitted.pop("range")
    for name, entry in fitted.items():
        entry["value"] = left_out.get(name, entry["value"])
    of = left_out.get("range", ranges)
    usual = {"engines": tuple(ranges["engines"]), "chips": tuple(ranges["chips"])}
    families = tuple(
        Family(
            name=entry["name"],
            chips=tuple(entry["chips"]),
            matmul=Stated(**entry["matmul"]) if "matmul" in entry else None,
            attention={
                (library, way): Stated(**entry.get(f"{library}_{way}", entry[f"flash_{way}"]))
                for library in get_args(Library)
                for way in ("forward", "backward")
                if library
            },
        )
        for entry in table["family"]
    )
    return Coefficients(
        matmul_unhidden=Stated(**table["matmul"]["unhidden"]),
        matmul_tile=Stated(**table["matmul"]["tile"]),
        matmul_best_fraction=Stated(**table["matmul"]["best_fraction"]),
        matmul_by={scales: Stated(**table["matmul"][f"by_{scales}"]) for scales in ("rows", "blocks")},
        launch_seconds=Stated(**table["launch"]["seconds"]),
        uneven=Stated(**table["gpus"]["uneven"]),
        families=families,
        fitted=Fitted(**{name: Stated(**entry) for name, entry in fitted.items()}),
        ranges=_ranges(of, usual, ranges["source"]),
        **_spread(without, usual),
    )


def _ranges(table: Mapping[str, Any], usual: Mapping[str, tuple[str, ...]], source: str) -> Ranges:
    of = {name: Range(*table[name]) for name in ("dense", "moe", "unlike")}
    return Ranges(**of, engines=usual["engines"], chips=usual["chips"], source=source)


def _spread(without: str, usual: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """How far coefficients differ, and what is missed where some steps were observed."""
    table = _table("spread")
    of = {**table, **table["without"].get(without, {})}
    run, source = of["spread"]["run"], table["source"]
    return {
        "spread": Spread({name: sd for name, sd in of["spread"].items() if name != "run"}, run, source),
        "observed": {int(n): _ranges(each, usual, source) for n, each in of["after"].items()},
    }


def on(cluster: Cluster, known: Coefficients) -> Coefficients:
    """The shipped coefficients, with a cluster's own in their place; sets that are chosen otherwise stand."""
    own = cluster.in_a_step
    return _with(own) if own is not None and known is coefficients() else known


@lru_cache(maxsize=64)
def _with(own: InAStep) -> Coefficients:
    """One object of equal ones: what is remembered by identity is found again."""
    shipped = coefficients()
    return replace(shipped, fitted=replace(shipped.fitted, **dict(own.values)))
