"""Where a sampler is in its life."""

from __future__ import annotations

import enum

from penstock.workers.call_guard import Lifetime

__all__ = ["LIFETIME", "SamplerState"]


class SamplerState(enum.Enum):
    """Where a sampler is in its life. The value names the call that is expected next."""

    CREATED = "initialize"
    READY = "start_samples, obtain_samples, evaluate_agent, or a call on the environments"
    SAMPLING = "wait_samples, which gives the batch that has been started"
    BROKEN = "shutdown"
    CLOSED = "none"


LIFETIME = Lifetime(
    first=SamplerState.CREATED,
    broken=SamplerState.BROKEN,
    closed=SamplerState.CLOSED,
    noun="sampler",
    end="shutdown",
)
