"""The states of a sampler."""

from __future__ import annotations

import enum


class SamplerState(enum.Enum):
    """The state of a sampler. The value names the calls that are expected next."""

    CREATED = "initialize"
    READY = "start_samples, obtain_samples, evaluate_agent, or a call on the environments"
    SAMPLING = "wait_samples, which returns the batch that has been started"
    RUNNING = "obtain_samples, poll_samples, evaluate_agent, a call on the environments, hold, or pause"
    STREAMING = "the next piece of stream, or the end of its loop"
    PAUSED = "resume, evaluate_agent, or a call on the environments"
    BROKEN = "shutdown"
    CLOSED = "none"
