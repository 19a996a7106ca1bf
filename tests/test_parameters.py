"""Parameter counts read off the Program, beside the published ones."""

from __future__ import annotations

import pytest

from nanum.model import presets
from nanum.prediction import parameters

PRESETS = presets.presets()


@pytest.mark.parametrize("preset", [p for p in PRESETS if p.verified == "exact"], ids=lambda p: p.name)
def test_to_the_unit(preset: presets.Preset) -> None:
    assert parameters(preset.model()) == preset.parameters


@pytest.mark.parametrize("preset", [p for p in PRESETS if p.verified == "approx"], ids=lambda p: p.name)
def test_by_a_papers_dimensions(preset: presets.Preset) -> None:
    """No checkpoint was published: what a preset states is the count by the dimensions of the paper's table."""
    assert parameters(preset.model()) == pytest.approx(preset.parameters, rel=1e-5)
