"""nanum: this model, this job, this cluster; what should I divide, and what will have to be exchanged?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanum.prediction import predict
    from nanum.scaling import scale
    from nanum.search import plan

__all__ = ["plan", "predict", "scale"]


def __getattr__(name: str) -> Any:
    """Functions are loaded when they are first asked for: the command line's help needs none of them."""
    if name == "predict":
        from nanum.prediction import predict

        return predict
    if name == "plan":
        from nanum.search import plan

        return plan
    if name == "scale":
        from nanum.scaling import scale

        return scale
    raise AttributeError(f"module 'nanum' has no attribute {name!r}")
