"""Parameter counts read off the Program, beside the published ones."""

from __future__ import annotations

import pytest

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
