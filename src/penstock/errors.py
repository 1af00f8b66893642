"""The exception tree: every error that penstock raises on purpose, and who is at fault.

PenstockError
├── ConfigError (ValueError)          the caller's arguments, or this machine's limits
├── SpaceError (ValueError)           a space, or data that does not fit its space
├── PortLeaseError (RuntimeError)     no port is left to lease, or the folder of lock files cannot be trusted
├── EnvCallError (RuntimeError)       a method or attribute of an environment, asked for by `sampler.call`
└── SamplerStateError (RuntimeError)  the order of the caller's calls
    ├── SamplerClosedError            ... a call after shutdown
    └── SamplerBrokenError            a worker; once broken, a sampler always gives the same error
        ├── WorkerError               an exception in the worker: environment, collector or agent
        ├── WorkerDiedError           the worker process ended without an exception
        ├── WorkerTimeoutError        a worker made no progress for longer than its limit
        └── TrajectoryCountError      penstock itself: trajectories were lost or doubled on their way
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = [
    "ConfigError",
    "EnvCallError",
    "PenstockError",
    "PortLeaseError",
    "SamplerBrokenError",
    "SamplerClosedError",
    "SamplerStateError",
    "SpaceError",
    "TrajectoryCountError",
    "WorkerDiedError",
    "WorkerError",
    "WorkerTimeoutError",
]

_BRIEF = 200  # characters of a value that an error quotes


def brief(value: Any) -> str:
    """`value` for an error message: on one line, not too long, dtype and shape of an array included."""
    text = " ".join(repr(value).split())
    if len(text) > _BRIEF:
        text = f"{text[: _BRIEF - 5]} ..."
    return f"{text} ({value.dtype}, shape {value.shape})" if isinstance(value, np.ndarray) else text


class PenstockError(Exception):
    """Base of every error that penstock raises on purpose."""


class ConfigError(PenstockError, ValueError):
    """An argument is wrong, or this machine cannot give what the arguments ask for."""


class SpaceError(PenstockError, ValueError):
    """A space cannot be recorded, or data does not fit what was declared for it.

    `initialize` raises it itself; in a batch it is the `__cause__` of the `WorkerError`, which quotes it.
    """


class EnvCallError(PenstockError, RuntimeError):
    """An environment raised in `sampler.call`, `get_attr` or `set_attr`, or returned what cannot be handed over.

    `__cause__` is its exception. The sampler goes on working.
    """


class PortLeaseError(PenstockError, RuntimeError):
    """No port is left to lease, the message lists who has them; or the folder of lock files cannot be trusted."""


class SamplerStateError(PenstockError, RuntimeError):
    """A call came out of order; the message says which call was expected."""


class SamplerClosedError(SamplerStateError):
    """A call came after `shutdown()`."""


class SamplerBrokenError(SamplerStateError):
    """A worker failed. The sampler is broken for good and gives this same error on every call."""


class WorkerError(SamplerBrokenError):
    """An environment, collector or agent raised inside a worker; `__cause__` carries its traceback."""


class WorkerDiedError(SamplerBrokenError):
    """A worker process ended without raising: killed, out of memory, a segmentation fault, or an exit."""


class WorkerTimeoutError(SamplerBrokenError):
    """A worker made no progress for longer than `step_timeout` or `start_timeout` allows."""


class TrajectoryCountError(SamplerBrokenError):
    """A worker delivered another number of trajectories than it promised; a defect of penstock."""
