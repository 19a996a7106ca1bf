"""What a model is, whatever the layout, read off its undivided Program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from nanum import engines
from nanum.account.traffic import flops
from nanum.blocks.layer import LayerKinds
from nanum.build import build
from nanum.division.parts import emit_bodies
from nanum.job import ALL, Job, Trained
from nanum.layout import Layout, Structure
from nanum.model import Experts, Layer, Model
from nanum.sharding import Shapes, Tensor


@dataclass(frozen=True)
class Reference:
    """What the model is, whatever the layout, read off its undivided Program."""

    parameters: int
    active_parameters: int  # that a token meets: of experts, those that it is sent to
    trained_parameters: int
    model_flops_per_sequence: float


@lru_cache(maxsize=256)
def reference(model: Model, seq_len: int, trained: Trained = ALL) -> Reference:
    """Parameters, those that are active and those that are trained, and the FLOPs of a sequence forward and backward:
    matmuls and causal attention, none recomputed. Adapters count as parameters.
    """
    job = Job(seq_len, 1, "fp32", trained=replace(trained, quantize="none"))
    engine = engines.load("torch")
    layout = Layout(structure=Structure(zero=0))
    bodies = emit_bodies(model, job, layout, engine)
    parts = bodies.parts

    def elements(shapes: Shapes, weights: Iterable[Tensor]) -> int:
        return sum(int(shapes.elements(w.dims, w.split)) for w in weights)

    each = parts.shapes.zip(parts.bodies).map(lambda both: elements(both[0], both[1].weights))
    shared = elements(parts.shapes.embedding, [parts.table]) if parts.bodies.head.shared else 0
    kinds = parts.layers
    layers = _over_layers(kinds, each.layers)
    moved = parts.shapes.zip(parts.bodies).map(lambda both: elements(both[0], both[1].weight_grads))
    trains = moved.embedding + _over_layers(kinds, moved.layers) + moved.head - shared * trained.ends
    further = model.layers[-1:] * model.mtp_layers
    total = each.embedding + layers + each.head + sum(map(_corrections, (*model.layers, *further)))
    step = build(model, job, layout, engine, 0, bodies)
    idle = [
        _idle(kind, elements(shapes, (w for w in body.weights if w.name.startswith("expert_"))))
        for kind, shapes, body in zip(kinds.kinds, parts.shapes.layers, parts.bodies.layers, strict=True)
    ]
    of_head = elements(parts.shapes.head, (w for w in parts.bodies.head.weights if w.name.startswith("expert_")))
    active = total - shared - _over_layers(kinds, idle) - _idle(model.layers[-1], of_head)
    return Reference(total - shared, active, trains, float(flops(step.program)))


def _over_layers(layers: LayerKinds, of_kinds: Sequence[int]) -> int:
    return sum(times * of_kinds[kind] for times, kinds in layers.runs for kind in kinds)


def _idle(kind: Layer, experts: int) -> int:
    """Of the parameters of a layer's `experts`, those that a token does not meet."""
    e = kind.mlp
    return experts // e.num_experts * (e.num_experts - e.num_experts_per_tok) if isinstance(e, Experts) else 0


def _corrections(layer: Layer) -> int:
    """What a router adds to its scores for the choice, which no gradient moves: files have it beside the weights."""
    e = layer.mlp
    return e.num_experts if isinstance(e, Experts) and e.correction_bias else 0


def parameters(model: Model) -> int:
    """Parameters of the model, tied ones once."""
    return reference(model, 1).parameters
