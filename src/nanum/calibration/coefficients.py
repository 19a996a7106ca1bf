"""The coefficients that a step moves, in words for people."""

from __future__ import annotations

from dataclasses import fields

from nanum.account.coefficients import Fitted

WHAT = {
    "matmul": "matmuls' rate in a step over alone",
    "matmul_untabled": "typical over best matmul, of chips without a table",
    "matmul_fp8": "fp8 matmuls' rate over bf16's, each over its best",
    "attention": "attention's rate in a step over alone",
    "memory": "memory bandwidth in a step over its peak",
    "host_seconds": "launch of a kernel by the host",
    "expert_seconds": "an operation on experts' slots, by the host",
    "intra_node": "rate of exchanges in a node, in a step over alone",
    "inter_node": "rate of exchanges between nodes, in a step over alone",
    "beside": "what compute loses beside an exchange",
}
assert WHAT.keys() == {f.name for f in fields(Fitted)}
