"""Parameter counts read off the Program, beside the published ones."""

from __future__ import annotations

import pytest

from nanum import engines
from nanum.account.memory import peak
from nanum.account.traffic import flops
from nanum.build import build
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import load, presets
from nanum.prediction.reference import parameters, reference

PRESETS = presets.presets()


@pytest.mark.parametrize("preset", [p for p in PRESETS if p.verified == "exact"], ids=lambda p: p.name)
def test_to_the_unit(preset: presets.Preset) -> None:
    assert parameters(preset.model()) == preset.parameters


@pytest.mark.parametrize("preset", [p for p in PRESETS if p.verified == "approx"], ids=lambda p: p.name)
def test_by_a_papers_dimensions(preset: presets.Preset) -> None:
    """No checkpoint was published: what a preset states is the count by the dimensions of the paper's table."""
    assert parameters(preset.model()) == pytest.approx(preset.parameters, rel=1e-5)


@pytest.mark.parametrize("preset", [p for p in PRESETS if p.active_parameters], ids=lambda p: p.name)
def test_those_that_a_token_meets(preset: presets.Preset) -> None:
    assert reference(preset.model(), 1).active_parameters == preset.active_parameters


def test_of_dense_models_a_token_meets_all() -> None:
    found = reference(load("llama-3.1-8b"), 1)
    assert found.active_parameters == found.parameters


@pytest.mark.parametrize("name", ["torchtitan", "megatron"])
def test_every_preset_has_a_step(name: str) -> None:
    """Forward, backward and the optimizer of a whole model on eight ranks: what is held in between is more than what
    stays, and FLOPs are about six a parameter that a token meets (fewer where a table is only looked up).
    """
    engine = engines.load(name)
    layout = Layout(dp_shard=8, structure=Structure(zero=3 if name == "torchtitan" else 1))
    for preset in PRESETS:
        model = preset.model()
        job = Job(128, 8)
        step = build(model, job, layout, engine, 0)
        most = peak(step.program)
        assert int(most.peak) > int(most.net) > 0, preset.name
        tables = model.vocab_size * (model.embedding_size or model.hidden_size)
        met = reference(model, 1).active_parameters - (0 if model.tie_word_embeddings else tables)
        assert 0.9 < float(flops(step.program)) / (6 * 128 * met) < 1.6, preset.name
