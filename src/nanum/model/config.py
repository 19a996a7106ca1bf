"""From the keys of a Hugging Face `config.json` to a `Model`: one mapping, for shipped presets and users' files alike.

Keys that are absent, or null, take the defaults of their model type: those of the `transformers` configuration classes.
"""

from __future__ import annotations

from dataclasses import replace

from nanum.errors import Refused
from nanum.model import Experts, Model
from nanum.model.families import TEXT_PARTS, family, text_part
from nanum.model.keys import Config


def from_config(config: Config, name: str, *, where: str = "config.json", source: str = "") -> Model:
    """`config`, as read from a user's `config.json`, as a `Model` called `name`.

    Raises `Refused` with every reason, each led by `where`: an unknown model type or key; a size that is missing, not a
    whole number or out of range; sizes that do not fit each other; what is not modelled (quantized weights).
    """
    from nanum.model import schema  # which a preset need not wait for

    reasons = schema.reasons(config)
    if not reasons:
        model = trusted(config, name, source or where)
        reasons = _unfit(model)
    if reasons:
        raise Refused(f"{where}: {reason}" for reason in reasons)
    return model


def trusted(config: Config, name: str, source: str) -> Model:
    """As `from_config`, for a config that is known to be good."""
    part = text_part(config)
    own = family(part["model_type"])
    model = own.model(own.values(part), name, source)
    left_out = [what for key, what in own.left_out.items() if part.get(key)]
    if config.get("model_type") in TEXT_PARTS:
        left_out.append("what is not text: a tower of images")
    return replace(model, left_out=tuple(left_out)) if left_out else model


def _unfit(model: Model) -> list[str]:
    experts = {layer.mlp for layer in model.kinds if isinstance(layer.mlp, Experts)}
    return [
        f"num_experts_per_tok={each.num_experts_per_tok} exceeds the {each.num_experts} experts of a layer"
        for each in experts
        if each.num_experts_per_tok > each.num_experts
    ]
