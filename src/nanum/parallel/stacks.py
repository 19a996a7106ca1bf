"""What the layers of an encoder and a decoder hold beside the stream: biases of scores, what the encoder made, and the
gradients of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanum.blocks.body import Body
from nanum.blocks.stacks import Stack
from nanum.parallel.chain import Beside, Each, Stage
from nanum.program import Held, Node, Repeat


@dataclass(frozen=True, eq=False)
class Between:
    """The part between the stacks. `table_bytes` are of its gradient of the table, where there is one already that it
    is added to.
    """

    stacks: tuple[Stack, ...]
    body: Body
    table_bytes: Any


def beside_layers(bodies: Each[Body], between: Between, stage: Stage) -> Mapping[int, Beside]:
    """Of each kind of layer. What no backward reads (that of eager kernels reads no bias) goes when its stack has run
    forward.
    """
    decoder = between.stacks[-1]
    joint = between.body

    def held(name: str, size: Any) -> tuple[Node, ...]:
        return (Held("activations", stage.take(size), name),)

    def let_go(size: Any) -> tuple[Node, ...]:
        return (Held("activations", -stage.take(size)),)

    found = {
        kind: Beside(
            made=held("bias of scores", body.lends_bytes),
            backward=let_go(body.back_in_bytes),
            left=held("gradients of what layers share", body.back_out_bytes),
        )
        for kind, body in enumerate(bodies.layers)
    }

    def kept(name: str, kinds: range) -> bool:
        return any(name in bodies.layers[kind].keeps for kind in kinds)

    begins = 0
    for stack in between.stacks:
        gone = let_go(bodies.layers[stack.first].lends_bytes)
        if kept("bias", range(begins, stack.last + 1)):
            found[stack.first] = found[stack.first].plus(backward=gone)
        else:
            found[stack.last] = found[stack.last].plus(made=gone)
        begins = stack.last + 1
    memory = let_go(joint.lends_bytes)
    if kept("memory", range(decoder.first, decoder.last + 1)):
        found[decoder.first] = found[decoder.first].plus(left=memory)
    else:
        found[decoder.last] = found[decoder.last].plus(made=memory)
    table = Held("grads", -stage.take(between.table_bytes))

    def back(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        return (*let_go(joint.back_in_bytes), Repeat(1, nodes, stage.at), table)

    found[decoder.first] = found[decoder.first].plus(
        forward=(Repeat(1, joint.forward, stage.at), *held("what the encoder made", joint.lends_bytes)),
        end=back(joint.backward),
        end_adding=back(joint.adding),
    )
    return found
