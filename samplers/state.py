"""The states of a sampler."""

from __future__ import annotations

import enum

from penstock.workers.call_guard import StateTable


class SamplerState(enum.Enum):
    """The state of a sampler. The value names the calls that are expected next."""

    CREATED = "initialize"
    READY = "start_samples, obtain_samples, evaluate_agent, or a call on the environments"
    SAMPLING = "wait_samples, which returns the batch that has been started"
    BROKEN = "shutdown"
    CLOSED = "none"


STATE_TABLE = StateTable(
    first=SamplerState.CREATED,
    broken=SamplerState.BROKEN,
    closed=SamplerState.CLOSED,
    noun="sampler",
    close_call="shutdown",
)
