"""What flags say of experts: how they are divided, and how tokens come to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanum.job import Routing

if TYPE_CHECKING:
    from nanum.cli.reader import Reader
    from nanum.engines.engine import Engine


def sizes(reader: Reader, tp: int, engine: Engine | None) -> dict[str, int]:
    """How experts are divided: as all else is, unless they are spread or the user says otherwise."""
    ep = reader.whole("ep", 1)
    default = (engine.default_etp(tp) if engine is not None else 1) if ep > 1 else tp
    etp = reader.whole("etp", default)
    if ep > 1 and not reader.said("etp"):
        reader.defaults.append(f"etp {etp}")
    return {"ep": ep, "etp": etp}


def imbalance(reader: Reader) -> float:
    """The fullest rank's slots over its even share; 1 where nothing is said."""
    return reader.ratio("expert_imbalance", 1, "must be a number of at least 1") or 1.0


def routing(reader: Reader) -> Routing:
    """How tokens come to experts."""
    capacity = reader.ratio("expert_capacity", 1e-6, "must be a number over 0")
    padded = reader.switch("pad_experts", False)
    groups, group_topk = (reader.whole(name, 0) for name in ("router_groups", "router_group_topk"))
    if reader.said("router_groups") != reader.said("router_group_topk"):
        reader.reasons.append("--router-groups and --router-group-topk go together: of how many, and how many")
    elif reader.said("router_groups") and groups < 1 and not reader.unread:
        reader.reasons.append(f"--router-groups {groups}: must be at least 1")
    if padded and not reader.said("expert_capacity"):
        reader.reasons.append("--pad-experts pads to a capacity: add --expert-capacity")
    return Routing(capacity, padded and capacity is not None, groups, group_topk)
