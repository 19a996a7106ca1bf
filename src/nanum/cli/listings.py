"""What can be named: the documents of `nanum models` and `nanum clusters`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanum.model import Model
    from nanum.model.presets import Preset


def models_document() -> dict[str, Any]:
    """Every model preset, with its published parameter count and its main dimensions."""
    from nanum.model.presets import presets

    rows = []
    for preset in presets():
        model = preset.model()
        rows.append(
            {
                "name": preset.name,
                "aliases": list(preset.aliases),
                "family": preset.family,
                "parameters": preset.parameters,
                "active_parameters": _active_parameters(preset, model),
                "verified": preset.verified,
                "num_hidden_layers": model.num_hidden_layers,
                "hidden_size": model.hidden_size,
                "vocab_size": model.vocab_size,
                "max_position_embeddings": model.max_position_embeddings,
                "source": preset.source,
                "notes": preset.notes,
            }
        )
    return {"models": rows}


def _active_parameters(preset: Preset, model: Model) -> int:
    """As published or, of experts of which nobody says it, as counted."""
    from nanum.model import Experts

    if preset.active_parameters is not None:
        return preset.active_parameters
    if not any(isinstance(layer.mlp, Experts) for layer in model.layers):
        return preset.parameters
    from nanum.prediction.reference import reference  # all that predicts: of the tiny models alone

    return reference(model, 1).active_parameters


def clusters_document() -> dict[str, Any]:
    """Every cluster preset, and every chip that NODESxGPUSxCHIP may name; numbers carry their sources."""
    from nanum.cluster.presets import chips, presets

    clusters = [asdict(cluster) | {"gpus": cluster.gpus, "chip": cluster.chip.name} for cluster in presets()]
    for cluster in clusters:
        del cluster["measured"]  # of which presets have none
    return {"clusters": clusters, "chips": [asdict(chip) for chip in chips()]}
