"""Which layers a pipeline's stages have, where it is said of its ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanum import cluster, engines
from nanum.account.traffic import traffic
from nanum.build import build
from nanum.engines.evened import saying_ends, to_be_evened
from nanum.job import Job, Trained
from nanum.layout import Layout, Structure
from nanum.model import Attention, Mlp, Model
from nanum.prediction import reasons

MODEL = Model("m", 64, 128, 8, 64, Attention(4, 4, 16), Mlp(128, True, "silu"), "rms_norm", "rotary", False)
CHIPS = cluster.load("1x8xh100-sxm")
NAMES = ("embedding_weight", "head_weight", "first_stage_layers", "last_stage_layers")


def structure(chunks: int = 1, **given: Any) -> Structure:
    schedule = {"schedule": "interleaved", "virtual_stages": chunks} if chunks > 1 else {}
    return Structure(**{"zero": 1, "pipelined": True, "reshard": True} | schedule | given)


def stages(engine: str, layers: int, pp: int, how: Structure) -> list[int]:
    several = pp * how.virtual_stages
    model = replace(MODEL, num_hidden_layers=layers)
    return [int(engines.load(engine).layers(model, several, stage, how)) for stage in range(several)]


def why(engine: str, layers: int, pp: int, how: Structure) -> list[str]:
    job = Job(16, 8 * pp)
    chips = replace(CHIPS, gpus_per_node=pp)
    model = replace(MODEL, num_hidden_layers=layers)
    return reasons(model, job, chips, Layout(pp=pp, structure=how), engines.load(engine))


# Megatron-LM d98e8a6, tests/unit_tests/transformer/test_transformer_block.py: `test_layer_builder` says which of these
# are refused; the layers of the others are counted by hand.
BUILT = [
    (60, 5, 1, (0, 0, 0, 4), [14] * 4 + [4]),
    (60, 8, 1, (0, 0, 6, 6), [6] + [8] * 6 + [6]),
    (64, 4, 1, (0, 0, 0, 0), [16] * 4),
    (64, 4, 8, (0, 0, 0, 0), [2] * 32),
    (60, 6, 1, (0, 0, 5, 0), [5] + [11] * 5),
    (63, 4, 1, (1, 0, 0, 0), [15, 16, 16, 16]),
    (63, 4, 1, (0, 1, 0, 0), [16, 16, 16, 15]),
    (62, 4, 1, (1, 1, 0, 0), [15, 16, 16, 15]),
    (62, 4, 2, (1, 1, 0, 0), [7] + [8] * 6 + [7]),
    (126, 16, 8, (1, 1, 0, 0), [0] + [1] * 126 + [0]),  # Llama 3.1 405B (arXiv 2407.21783, section 3.3.2)
    (127, 16, 8, (0, 1, 0, 0), [1] * 127 + [0]),
    (12, 2, 2, (0, 0, 4, 8), [2, 4, 2, 4]),  # transformer_config.py: all stages of a rank have as many
]
REFUSED = [
    (101, 8, 1, (0, 0, 13, 13), "first_stage_layers=13 and last_stage_layers=13 of num_hidden_layers=101 do not"),
    (65, 4, 1, (0, 0, 0, 0), "num_hidden_layers=65 (megatron): --first-stage-layers 16 --last-stage-layers 15 leave"),
    (5, 4, 1, (0, 0, 0, 0), "pp=4 does not divide num_hidden_layers=5 (megatron): --first-stage-layers, --last"),
    (65, 4, 1, (1, 1, 0, 0), "pp=4 does not divide num_hidden_layers=65 and the 2 that its ends weigh"),
    (61, 4, 1, (0, 0, 12, 0), "first_stage_layers=12 and last_stage_layers=0 of num_hidden_layers=61 do not"),
    (2, 4, 1, (0, 0, 0, 0), "pp=4 exceeds num_hidden_layers=2"),
    (60, 6, 1, (1, 0, 5, 5), "either the layers of a stage are said, or what the ends weigh"),
    (50, 2, 7, (0, 0, 0, 0), "pp·virtual_stages = 2·7 does not divide num_hidden_layers=50"),
    (4, 4, 4, (0, 0, 0, 0), "pp·virtual_stages = 4·4 exceeds num_hidden_layers=4"),
    (14, 4, 4, (0, 1, 0, 0), "pp·virtual_stages = 4·4 exceeds num_hidden_layers=14 and the 1 that its ends weigh"),
    (12, 2, 2, (0, 0, 5, 7), "each rank's over its stages (megatron)"),
    (62, 4, 1, (0, 2, 0, 0), "megatron counts an end as one layer or none"),
    (8, 2, 1, (0, 0, 3, 4), "leave 1 for 0 other ranks"),
    (8, 3, 1, (0, 0, 4, 4), "leave 0 for 1 other ranks"),
]


def placed(chunks: int, said: tuple[int, ...]) -> Structure:
    named = dict(zip(NAMES, said, strict=True))
    return structure(chunks, **{k: v for k, v in named.items() if v or (k.endswith("weight") and any(said[:2]))})


@pytest.mark.parametrize(("layers", "pp", "chunks", "said", "found"), BUILT)
def test_what_megatron_builds(layers: int, pp: int, chunks: int, said: tuple[int, ...], found: list[int]) -> None:
    assert sum(found) == layers
    assert stages("megatron", layers, pp, placed(chunks, said)) == found
    assert why("megatron", layers, pp, placed(chunks, said)) == []


@pytest.mark.parametrize(("layers", "pp", "chunks", "said", "reason"), REFUSED)
def test_what_megatron_refuses(layers: int, pp: int, chunks: int, said: tuple[int, ...], reason: str) -> None:
    assert any(reason in each for each in why("megatron", layers, pp, placed(chunks, said)))


@pytest.mark.parametrize(
    ("layers", "pp", "given", "found"),
    [
        (32, 4, {}, [8, 9, 8, 7]),
        (32, 4, {"embedding_weight": 0, "head_weight": 0}, [8] * 4),
        (32, 4, {"embedding_weight": 2, "head_weight": 2}, [7, 9, 9, 7]),  # pipeline_parallel.py, its example's weights
        (32, 4, {"head_weight": 3}, [8, 9, 9, 6]),
        (4, 6, {}, [0, 1, 1, 1, 1, 0]),  # pipeline_parallel.py: as many stages as effective layers
    ],
)
def test_what_torchtitan_cuts(layers: int, pp: int, given: dict[str, int], found: list[int]) -> None:
    """pipeline_parallel_first_stage_less_layers and _last_stage_less_layers, 1 each where nothing is said."""
    how = structure(zero=3, reshard=False, **given)
    assert stages("torchtitan", layers, pp, how) == found
    assert why("torchtitan", layers, pp, how) == []


@pytest.mark.parametrize(
    ("engine", "given", "reason"),
    [
        ("torchtitan", {"first_stage_layers": 3}, "--first-stage-layers 3 is not in torchtitan"),
        ("torchtitan", {"schedule": "interleaved", "virtual_stages": 6}, "= 2·6 exceeds num_hidden_layers=8 and the 2"),
        ("torchtitan", {"embedding_weight": 30}, "embedding_weight=30 and head_weight=1: an end weighs more"),
        ("deepspeed", {"head_weight": 1}, "--head-weight 1 is not in deepspeed"),
        ("nanotron", {"last_stage_layers": 1}, "--last-stage-layers 1 is not in nanotron"),
        (
            "torch",
            {"first_stage_layers": 3, "schedule": "zbv", "virtual_stages": 2},
            "its ranks have stages from both ends",
        ),
        ("megatron", {"first_stage_layers": -1}, "must be a whole number of layers"),
    ],
)
def test_refused(engine: str, given: dict[str, Any], reason: str) -> None:
    assert any(reason in each for each in why(engine, 8, 2, structure(**given)))


def test_ends_need_a_pipeline() -> None:
    assert any("needs pp > 1" in each for each in why("megatron", 8, 1, structure(pipelined=False, head_weight=1)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_layer_is_on_one_stage(data: st.DataObject) -> None:
    """Whatever is said that an engine takes; many pipelines at once as each alone."""
    engine = data.draw(st.sampled_from(("megatron", "torchtitan", "torch")))
    chunks = data.draw(st.sampled_from((1, 2)))
    sizes = st.integers(0, 4)
    said = (0, 0, data.draw(sizes), data.draw(sizes)) if data.draw(st.booleans()) else (data.draw(sizes), 1, 0, 0)
    how = replace(placed(chunks, said), zero=1 if engine == "megatron" else 3, reshard=engine == "megatron")
    layers = data.draw(st.integers(2, 24))
    taken = [pp for pp in range(2, 8) if not why(engine, layers, pp, how)]
    model, loaded = replace(MODEL, num_hidden_layers=layers), engines.load(engine)
    for pp in taken:
        found = stages(engine, layers, pp, how)
        assert sum(found) == layers
        assert min(found) >= 0
        many = np.arange(pp * chunks)
        assert np.array_equal(loaded.layers(model, 0 * many + pp * chunks, many, how), found)


@pytest.mark.parametrize("layers", [1, 5, 28, 61, 62, 64, 80])
def test_ends_make_up_for_layers_that_do_not_divide(layers: int) -> None:
    """As many pipelines as there are: no stage has more than its share, rounded up, and Megatron takes what is said."""
    many = np.arange(1, layers + 1)
    evened = to_be_evened(layers, many)
    for pp, taken in zip(map(int, many), evened, strict=True):
        share, others = -(-layers // pp), max(pp - 2, 0)
        could = any(layers - others * share - last in range(1, share + 1) for last in range(1, share + 1))
        assert taken == (layers % pp != 0 and could)
        if not taken:
            continue
        one = saying_ends(Layout(pp=pp, structure=structure(evens_ends=True)), layers)
        assert why("megatron", layers, pp, one.structure) == []
        found = stages("megatron", layers, pp, one.structure)
        assert (sum(found), max(found)) == (layers, share)
        assert found[0] >= found[-1] >= 1
        assert found == stages("megatron", layers, pp, structure(evens_ends=True))


def test_a_step_has_the_layers_that_are_said() -> None:
    how = structure(first_stage_layers=2)
    for stage, layers in enumerate((2, 6)):
        step = build(MODEL, Job(16, 4), Layout(pp=2, structure=how), engines.load("megatron"), stage)
        assert sum(int(group) for group in step.holds[:3]) == layers


def test_a_frozen_end_is_no_stage_of_its_own() -> None:
    """With as many stages as layers and ends, embedding and head are alone: there is nothing to train on theirs."""
    model, chips = replace(MODEL, num_hidden_layers=4), replace(CHIPS, gpus_per_node=6)
    layout = Layout(pp=6, structure=structure(zero=3, reshard=False))
    for trained, refused in (("all", False), ("layers", True)):
        job = Job(16, 48, trained=Trained(weights=trained))  # type: ignore[arg-type]
        found = reasons(model, job, chips, layout, engines.load("torchtitan"))
        assert any("leaves the embedding alone on a stage" in each for each in found) == refused


@pytest.mark.parametrize(("pp", "layers"), [(6, 4), (3, 4)])
def test_an_end_that_is_a_stage_of_its_own_gathers_at_once_too(pp: int, layers: int) -> None:
    """Megatron's ranks gather what they updated, whether a stage has a layer or an end of the model alone."""
    how = structure(embedding_weight=1, head_weight=1)
    model, engine = replace(MODEL, num_hidden_layers=layers), engines.load("megatron")
    layout = Layout(dp_shard=2, pp=pp, structure=how)
    for stage in range(pp):
        rows = traffic(build(model, Job(16, 8 * pp), layout, engine, stage).program)
        gathers = {k: t for k, t in rows.items() if k.kind == "all_gather"}
        assert [t.calls for t in gathers.values()] == [1]
        assert all(t.payload_bytes > 0 for t in gathers.values())
