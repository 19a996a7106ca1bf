"""What a pipeline rank holds at its largest moment: of tensors, reserved by PyTorch, and of the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nanum.account import device
from nanum.account.memory import Moment, peak
from nanum.account.traffic import Groups
from nanum.parallel.chunks import RankStep
from nanum.parallel.pipeline import Step


@dataclass(frozen=True)
class StageMemory:
    """One pipeline rank's largest moment on its first device; a rank of several stages is one here."""

    stage: int
    moment: Moment
    pooled_bytes: int  # the most of each stream's pool, which share nothing: at least what is held at any moment
    groups: Groups
    mesh: Mapping[str, int]
    host_bytes: int = 0  # the most that is held for this device of its host's memory
    cuda: bool = True  # else the device is its own host, and has tensors alone: no reserve, no context, no NCCL

    @property
    def reserved_bytes(self) -> int:
        return self.reserved_bytes_at("value")

    def reserved_bytes_at(self, level: device.Level) -> int:
        return int(device.reserved_bytes(self.pooled_bytes, level)) if self.cuda else self.pooled_bytes

    @property
    def communicator_bytes(self) -> int:
        return int(device.communicator_bytes(self.groups, self.mesh)) if self.cuda else 0

    @property
    def context_bytes(self) -> int:
        return self.context_bytes_at("value")

    def context_bytes_at(self, level: device.Level) -> int:
        return int(device.context_bytes(self.groups, self.mesh, level)) if self.cuda else 0

    @property
    def terms(self) -> list[device.Term]:
        """What is added to tensors."""
        return device.terms(self.groups, self.mesh) if self.cuda else []

    @property
    def device_bytes(self) -> int:
        return self.device_bytes_at("value")

    def device_bytes_at(self, level: device.Level) -> int:
        """What is expected, or the least or the most that would have been seen."""
        return self.reserved_bytes_at(level) + self.context_bytes_at(level)


def pooled_bytes(step: Step | RankStep) -> int:
    """What the allocator needs where tensors of other streams are in pools of their own."""
    return int(np.max(peak(step.program, apart=False).peak + step.apart_bytes))
