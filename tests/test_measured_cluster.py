"""Cluster files with measured grids: written, read back, and refused with every reason."""

import copy
import tomllib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanum.cluster import Quantity, load
from nanum.cluster.grids import AXES, KEYS, SUBJECTS
from nanum.cluster.measured import Beside, Exchange, Framework, Grid, Measured, Together
from nanum.cluster.parse import from_table
from nanum.errors import Refused
from nanum.measure.write import text

SOURCE = "a test, 2026-11-29, torch 2.13.0"
KNOWN = ("measured", SOURCE)


def table():
    grid = {"seconds": [1e-5, 2e-5], "low_seconds": [1e-5, 1e-5], "high_seconds": [2e-5, 3e-5], "repeats": 5}
    return {
        "nodes": 1,
        "gpus_per_node": 8,
        "chip": "h100-sxm",
        "measured": {
            "tag": "measured",
            "source": SOURCE,
            "streams": False,
            "operation_seconds": 4e-6,
            "beside": {"ranks": 8, "compute": 1.5, "exchange": 2.5},
            "together": {"ranks": 8, "matmul": 1.1, "kernel": 3},
            "framework": {"unit": 2e-3, "parameter": 0},
            "matmul": [{"dtype": "bf16", "operands": "nt", "m": [8], "n": [16, 32], "k": [64], **grid}],
            "kernel": [{"dtype": "fp32", "name": "mul", "bytes": [1000, 2000], **grid}],
            "attention": [
                {"dtype": "bf16", "direction": "backward", "rows": [4], "seq_len": [128, 256], "head_dim": [64], **grid}
            ],
            "optimizer": [{"dtype": "fp32", "bytes": [1000, 2000], **grid}],
            "exchange": [{"kind": "all_reduce", "ranks": 8, "nodes": 1, "bytes": [1024, 4096], **grid}],
        },
    }


def reasons(changed):
    with pytest.raises(Refused) as refused:
        from_table(changed, "lab", where="lab.toml")
    return refused.value.reasons


def test_a_file_may_hold_grids_and_ratios():
    found = from_table(table(), "lab", where="lab.toml").measured
    assert found.matmul["bf16", "nt"].sizes == ((8,), (16, 32), (64,))
    assert found.kernel["fp32", "mul"].seconds == (1e-5, 2e-5)
    assert found.attention["bf16", "backward"].points == 2
    assert found.exchanges == (Exchange("all_reduce", 8, 1, found.exchanges[0].grid),)
    assert found.together is not None
    assert found.together.ratios["kernel"] == Quantity(3.0, "measured", SOURCE)
    assert found.beside == Beside(8, Quantity(1.5, "measured", SOURCE), Quantity(2.5, "measured", SOURCE))
    assert found.framework == Framework(parameter=Quantity(0.0, *KNOWN), unit=Quantity(2e-3, *KNOWN))
    assert found.operation_seconds == Quantity(4e-6, "measured", SOURCE)
    assert not found.streams
    assert {g.source for g in (*found.matmul.values(), *found.optimizer.values())} == {SOURCE}


def test_a_grid_may_have_a_source_of_its_own():
    one = table()
    one["measured"]["kernel"][0] |= {"tag": "derived", "source": "elsewhere"}
    found = from_table(one, "lab", where="lab.toml").measured
    assert (found.kernel["fp32", "mul"].tag, found.kernel["fp32", "mul"].source) == ("derived", "elsewhere")


def test_files_without_grids_have_none():
    assert load("1x8xh100-sxm").measured == Measured()
    assert not load("1x8xh100-sxm").measured


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.pop("source"), "measured.source is missing"),
        (lambda m: m.update(tag="guessed"), "measured.tag is none of"),
        (lambda m: m.update(streams="no"), "measured.streams = 'no' is neither true nor false"),
        (lambda m: m.update(matmuls=[]), "unknown key 'measured.matmuls' (did you mean matmul?)"),
        (lambda m: m["beside"].update(compute=-1), "measured.beside.compute: -1 is not a number from 0.1 to 1000"),
        (lambda m: m["beside"].pop("ranks"), "measured.beside.ranks is missing"),
        (lambda m: m["together"].update(ranks=1), "measured.together.ranks = 1 is not a whole number from 2 to"),
        (lambda m: m["framework"].update(units=1), "unknown key 'measured.framework.units' (did you mean unit?)"),
        (lambda m: m["together"].update(matmull=1), "unknown key 'measured.together.matmull' (did you mean matmul?)"),
        (lambda m: m.update(operation_seconds="4 us"), "measured.operation_seconds: '4 us' is not a number"),
        (lambda m: m.update(kernel={}), "measured.kernel = {} is not a list of tables ([[measured.kernel]])"),
        (lambda m: m["kernel"][0].pop("bytes"), "measured.kernel.0.bytes is missing"),
        (lambda m: m["kernel"][0].update(bytes=[2000, 1000]), "measured.kernel.0: bytes does not ascend"),
        (lambda m: m["kernel"][0].update(bytes=[0, 1]), "measured.kernel.0: bytes is not a list of sizes above 0"),
        (lambda m: m["kernel"][0].update(seconds=[1e-5]), "measured.kernel.0: seconds has 1 numbers for 2 points"),
        (lambda m: m["kernel"][0].update(seconds=[1e-5, float("inf")]), "measured.kernel.0: seconds is not a list"),
        (lambda m: m["kernel"][0].update(low_seconds=[1, 1]), "a median is not between its low_seconds and"),
        (lambda m: m["kernel"][0].update(repeats=0), "measured.kernel.0.repeats = 0 is not a whole number from 1"),
        (lambda m: m["matmul"][0].update(operands="tt"), "measured.matmul.0.operands is none of 'nt', 'nn' or 'tn'"),
        (lambda m: m["matmul"][0].update(dtype="int8"), "measured.matmul.0.dtype is none of"),
        (lambda m: m["exchange"][0].update(kind="gossip"), "measured.exchange.0.kind is none of"),
        (lambda m: m["exchange"][0].update(ranks=1), "measured.exchange.0.ranks = 1 is not a whole number from 2"),
        (lambda m: m["exchange"].append(m["exchange"][0]), "measured.exchange: all_reduce 8 1 stands twice"),
    ],
)
def test_what_is_wrong_with_a_measured_table(change, said):
    changed = copy.deepcopy(table())
    change(changed["measured"])
    (only,) = reasons(changed)
    assert only.startswith("lab.toml: ")
    assert said in only


def test_every_reason_at_once():
    changed = table()
    changed["measured"]["kernel"][0]["bytes"] = [1]
    changed["measured"]["matmul"][0]["m"] = "8"
    del changed["measured"]["tag"]
    assert len(reasons(changed)) == 3


# Written and read back.

numbers = st.floats(1e-9, 1e3)
names = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S")), min_size=1, max_size=12)
tags = st.sampled_from(["measured", "derived", "assumed", "datasheet"])


@st.composite
def grids(draw, subject):
    axes = AXES[subject]
    sizes = tuple(tuple(sorted(draw(st.sets(st.integers(1, 2**40), min_size=1, max_size=3)))) for _ in axes)
    points = 1
    for several in sizes:
        points *= len(several)
    each = [sorted(draw(st.tuples(numbers, numbers, numbers))) for _ in range(points)]
    low, middle, high = zip(*each, strict=True)
    floats = tuple(tuple(map(float, several)) for several in sizes)
    return Grid(axes, floats, middle, low, high, draw(st.integers(1, 99)), draw(tags), draw(names))


dtypes = st.sampled_from(["fp32", "bf16", "fp16"])


@st.composite
def measurements(draw):
    def some(subject, *keys):
        return draw(st.dictionaries(st.tuples(*keys) if len(keys) > 1 else keys[0], grids(subject), max_size=2))

    tag, source = draw(tags), draw(names)
    known = st.builds(Quantity, st.floats(0.5, 100), st.just(tag), st.just(source))
    places = st.tuples(st.sampled_from(["all_reduce", "send"]), st.integers(2, 64), st.integers(1, 8))
    exchanges = draw(st.dictionaries(places, grids("exchange"), max_size=2))
    ratios = st.dictionaries(st.sampled_from(SUBJECTS), known, max_size=4)
    return Measured(
        matmul=some("matmul", dtypes, st.sampled_from(["nt", "nn", "tn"])),
        kernel=some("kernel", dtypes, names),
        attention=some("attention", dtypes, st.sampled_from(["forward", "backward"])),
        optimizer=some("optimizer", dtypes),
        exchanges=tuple(Exchange(*place, grid) for place, grid in exchanges.items()),
        operation_seconds=draw(st.none() | st.builds(Quantity, st.floats(1e-9, 1), st.just(tag), st.just(source))),
        beside=draw(st.none() | st.builds(Beside, st.integers(1, 64), known, known)),
        together=draw(st.none() | st.builds(Together, st.integers(2, 64), ratios)),
        framework=Framework(*(draw(st.none() | known) for _ in range(5))),
        streams=draw(st.booleans()),
    )


@settings(max_examples=50)
@given(measurements(), names, st.sampled_from(["2x8xh100-sxm", "dgx-a100-64"]))
def test_a_written_cluster_is_read_back_as_the_same(measured, name, base):
    cluster = replace(load(base), name=name, measured=measured)
    written = tomllib.loads(text(cluster))
    assert written["chip"] == cluster.chip.name  # a shipped chip is named, not spelt out
    back = from_table(written, "lab", where="lab.toml")
    assert back.measured == measured
    assert replace(back, assumptions=()) == replace(cluster, assumptions=())


def test_a_chip_of_one_s_own_is_written_whole():
    cluster = load("1x8xh100-sxm")
    mine = replace(cluster, chip=replace(cluster.chip, name='my "chip"'))
    back = from_table(tomllib.loads(text(mine)), "lab", where="lab.toml")
    assert back.chip == mine.chip


def test_every_subject_has_axes_and_keys():
    assert AXES.keys() == KEYS.keys()
