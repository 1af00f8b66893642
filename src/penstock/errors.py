"""The exception tree: every error that penstock raises on purpose.

PenstockError
├── ConfigError (ValueError)          An argument is wrong, or this machine's limits are too low.
├── SpaceError (ValueError)           A space cannot be recorded, or data does not fit its space.
├── PortLeaseError (RuntimeError)     No port can be leased, or a lease is used after its release.
├── GameError (RuntimeError)          A game or environment in a process of its own did not start, ended, or did not reply.
├── EnvCallError (RuntimeError)       An environment raised in `sampler.call`, `get_attr`, `set_attr`, or in its own process.
├── RepeatError (RuntimeError)        An environment does not repeat its recorded episode.
├── ClusterError (RuntimeError)       Something went wrong between the workers of a distributed experiment.
│   ├── PeerLostError                 The other side of a wire has ended, or was silent for too long.
│   ├── NoReplyError (TimeoutError)   The other side did not answer in time.
│   ├── RequestError                  The other side refused a request, or its handler raised.
│   └── NameTableError                A name is taken, or is not in the name table.
├── StaleSamplesError (RuntimeError)  With `debug=True`: the memory of this batch was given back for a later batch.
└── SamplerStateError (RuntimeError)  A call came out of order.
    ├── SamplerClosedError            A call came after `shutdown`.
    └── SamplerBrokenError            A worker failed. The sampler raises the same error on every later call.
        ├── WorkerError               An environment, collector or agent raised an exception in the worker.
        ├── WorkerDiedError           The worker process ended without an exception.
        ├── WorkerTimeoutError        The worker made no progress for longer than its limit.
        ├── NodeLostError             A shard of a cluster was lost: its process or its machine has gone.
        └── TrajectoryCountError      Trajectories were lost or duplicated: a defect of penstock.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = [
    "ClusterError",
    "ConfigError",
    "EnvCallError",
    "GameError",
    "NameTableError",
    "NoReplyError",
    "NodeLostError",
    "PeerLostError",
    "PenstockError",
    "PortLeaseError",
    "RepeatError",
    "RequestError",
    "SamplerBrokenError",
    "SamplerClosedError",
    "SamplerStateError",
    "SpaceError",
    "StaleSamplesError",
    "TrajectoryCountError",
    "WorkerDiedError",
    "WorkerError",
    "WorkerTimeoutError",
]

_BRIEF = 200  # characters of a value that an error quotes


def brief(value: object) -> str:
    """`value` for an error message: one line of limited length, with dtype and shape if it is an array."""
    text = " ".join(repr(value).split())
    if len(text) > _BRIEF:
        text = f"{text[: _BRIEF - 5]} ..."
    return f"{text} ({value.dtype}, shape {value.shape})" if isinstance(value, np.ndarray) else text


class PenstockError(Exception):
    """Base of every error that penstock raises on purpose."""


class ConfigError(PenstockError, ValueError):
    """An argument is wrong, or this machine has too little memory, processes or descriptors for the arguments."""


class SpaceError(PenstockError, ValueError):
    """A space cannot be recorded, or data does not fit its space.

    `initialize` raises it directly. In a batch it is the `__cause__` of a `WorkerError` that quotes it.
    """


class EnvCallError(PenstockError, RuntimeError):
    """An environment raised in `sampler.call`, `get_attr` or `set_attr`, or its result cannot be pickled. `__cause__` is
    the exception. The sampler stays usable.

    Or an environment in a process of its own raised: the message has its traceback. The `EnvProcess` stays usable.
    """


class PortLeaseError(PenstockError, RuntimeError):
    """No port is left to lease, or this system cannot reserve one, or a lease was released before its `with` block. The
    message lists the owners of the ports, or says why."""


class GameError(PenstockError, RuntimeError):
    """A game, or an environment, in a process of its own did not start, ended, or did not reply in time. The message has the command, the
    port, how the game ended, and the last lines of its output.

    With `on_worker_failure="restart"`, a worker that fails with it is replaced, unlike with other errors of penstock.
    """


class RepeatError(PenstockError, RuntimeError):
    """An environment does not repeat its recorded episode. The message names the first step that differs."""


class ClusterError(PenstockError, RuntimeError):
    """Something went wrong between the workers of a distributed experiment."""


class PeerLostError(ClusterError):
    """The other side of a wire has ended, or was silent for too long. It may have done what it was asked, or not."""


class NoReplyError(ClusterError, TimeoutError):
    """The other side did not answer before the deadline. It may still do what it was asked."""


class RequestError(ClusterError):
    """The other side refused a request, or its handler raised. The message quotes the error of the other side."""


class NameTableError(ClusterError):
    """Another process has this name, or the name is not in the name table."""


class StaleSamplesError(PenstockError, RuntimeError):
    """Only with `debug=True`: samples were used after their memory was given back for a later batch. The message names
    both batches, and the line that began the later one. Use the samples before that line, or a `copy()` of them."""


class SamplerStateError(PenstockError, RuntimeError):
    """A call came out of order. The message names the call that was expected."""


class SamplerClosedError(SamplerStateError):
    """A call came after `shutdown()`, or `shutdown()` interrupted it."""


class SamplerBrokenError(SamplerStateError):
    """A worker failed. The sampler stays broken and raises this same error on every call.

    `episode` is the `RecordedEpisode` of the environment that failed, if the sampler has `seed_episodes=True` and a
    training environment was being stepped or reset; otherwise None. `env_rank` is the environment that the worker was
    building, resetting or stepping, or None.
    """

    episode: Any = None
    env_rank: int | None = None


class WorkerError(SamplerBrokenError):
    """An environment, collector or agent raised inside a worker. `__cause__` is that exception, or its traceback."""


class WorkerDiedError(SamplerBrokenError):
    """A worker process ended without an exception: it was killed, ran out of memory, crashed, or exited."""


class WorkerTimeoutError(SamplerBrokenError):
    """A worker made no progress for longer than `step_timeout` or `start_timeout` allows."""


class NodeLostError(SamplerBrokenError):
    """A shard of a `RaySampler` was lost: its process was killed, its machine or the network to it has failed. The
    message names the node, the shard and its env_ranks."""


class TrajectoryCountError(SamplerBrokenError):
    """A worker sent more or fewer trajectories than it counted. This is a defect of penstock."""
