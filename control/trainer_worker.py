"""A worker that trains with the pieces of a sample stream, and publishes parameters."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from penstock.agents import Agent
from penstock.control.parameters import ParameterServer
from penstock.control.pieces import Batch, batch_of
from penstock.control.policy_worker import AgentPlan
from penstock.control.statuses import Status
from penstock.control.streams import SampleConsumer
from penstock.control.worker import PollResult, Worker
from penstock.errors import ConfigError, NoReplyError, brief

_WAIT_SECONDS = 0.05  # how long a poll waits for a piece
_FOREIGN = float("inf")  # the staleness of a piece that an earlier life of the trainer has acted


class Trainer(Protocol):
    """A class that you write. It is called with the initialized agent."""

    def step(self, batch: Batch) -> Mapping[str, float] | None:
        """Train on one batch: change the parameters of the agent. Returns figures, which the panel shows, or None."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What to save in addition to the agent, for example the optimizer's state."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` has returned."""
        ...


class TrainerWorker(Worker):
    """Calls the user's trainer with `batch` pieces at a time, and publishes the parameters after each step.

    Args:
        make_trainer: called with the agent; returns a `Trainer`.
        plan: how to make the agent.
        samples: name of the sample stream.
        parameters: name under which the parameters are published.
        batch: pieces per step.
        max_staleness: the trainer drops a piece, and counts it, if its parameters are more versions old than this, or
            if an earlier life of the trainer made them; None: it drops none. A piece then takes its place in the
            stream until it was trained on, so that actors do not sample too far ahead.
        checkpoint: a file. The trainer saves its state there every `save_every` steps and at the end. If the file
            exists, it starts from it.
    """

    def __init__(
        self,
        make_trainer: Callable[[Agent], Trainer],
        plan: AgentPlan,
        *,
        samples: str = "train",
        parameters: str = "policy",
        batch: int = 1,
        max_staleness: int | None = None,
        checkpoint: str | Path | None = None,
        save_every: int = 10,
    ) -> None:
        self._make_trainer, self._plan, self._stream, self._policy = make_trainer, plan, samples, parameters
        self._batch, self._max_staleness = batch, max_staleness
        self._checkpoint, self._save_every = None if checkpoint is None else Path(checkpoint), save_every
        self._consumer: SampleConsumer | None = None
        self._server: ParameterServer | None = None
        self._pieces: list[Any] = []
        self._version, self._n_stale, self._largest_staleness = 1, 0, 0.0
        self._results: dict[str, float] = {}

    def _configure(self) -> None:
        self._agent = self._plan.agent()
        self._trainer = self._make_trainer(self._agent)
        self._check_trainer()
        if self._checkpoint is not None and self._checkpoint.exists():
            self._load(self._checkpoint)
        self._server = ParameterServer(self.wire, self.names, self._policy)
        self._server.publish(self._version, self._agent.read_parameters())
        holds = self._max_staleness is not None
        self._consumer = SampleConsumer(self.wire, self.names, self._stream, self.name, holds=holds)

    def _check_trainer(self) -> None:
        """Raise `ConfigError` now for what would otherwise fail at the first step, or at the first checkpoint."""
        needed = ["step"] if self._checkpoint is None else ["step", "state_dict", "load_state_dict"]
        missing = [name for name in needed if not callable(getattr(self._trainer, name, None))]
        if missing:
            kind = type(self._trainer).__name__
            raise ConfigError(f"the trainer has no method {', '.join(missing)}: make_trainer has returned a {kind}")
        if self._checkpoint is not None and not self._checkpoint.absolute().parent.is_dir():
            raise ConfigError(f"the folder of checkpoint={str(self._checkpoint)!r} does not exist: make it first")

    def _poll(self) -> PollResult:
        assert self._consumer is not None
        assert self._server is not None
        self._server.serve()
        try:
            piece = self._consumer.get(_WAIT_SECONDS)
        except NoReplyError:
            # Nothing comes, and the batch is not full: the actors may wait for places in the stream (one was lost, or
            # there are too few, or other consumers have their pieces). Otherwise each side would wait for the other.
            self._consumer.release()
            return PollResult()
        self._pieces.append(piece)
        self._drop_stale()
        if len(self._pieces) < self._batch:
            return PollResult()
        staleness = [self._staleness(piece) for piece in self._pieces]
        self._largest_staleness = max([self._largest_staleness, *(n for n in staleness if n != _FOREIGN)])
        batch, self._pieces = batch_of(self._pieces), []
        self._results = _figures(self._trainer.step(batch))
        self._version += 1
        self._server.publish(self._version, self._agent.read_parameters())
        self._consumer.release()  # after `publish`: the next pieces are acted by the new parameters
        if self._checkpoint is not None and self._version % self._save_every == 0:
            self._save(self._checkpoint)
        return PollResult(batch.samples.env.reward.numel(), 1)

    def _staleness(self, piece: Mapping[str, Any]) -> float:
        """How many versions old its parameters are."""
        assert self._server is not None
        return self._version - piece["version"] if piece["lineage"] == self._server.lineage else _FOREIGN

    def _drop_stale(self) -> None:
        if self._max_staleness is not None:
            fresh = [piece for piece in self._pieces if 0 <= self._staleness(piece) <= self._max_staleness]
            self._n_stale += len(self._pieces) - len(fresh)
            self._pieces = fresh

    def _save(self, path: Path) -> None:
        import torch

        part = path.with_name(f".{path.name}.part")
        state = {"version": self._version, "agent": self._agent.state_dict(), "trainer": self._trainer.state_dict()}
        torch.save(state, part)
        os.replace(part, path)

    def _load(self, path: Path) -> None:
        import torch

        state = torch.load(path, weights_only=False)  # the user's own file
        self._version = int(state["version"])
        self._agent.load_state_dict(state["agent"])
        self._trainer.load_state_dict(state["trainer"])

    def _stats(self) -> Mapping[str, float]:
        own = {"version": self._version, "stale": self._n_stale, "largest_staleness": self._largest_staleness}
        return {**own, **self._results, **own}

    def _close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
        if self._server is not None:
            if self._checkpoint is not None and self.status is not Status.ERROR:
                self._save(self._checkpoint)
            self._server.close()


def _figures(returned: object) -> dict[str, float]:
    """What `step` has returned, as numbers."""
    if not isinstance(returned, Mapping | None):
        raise ConfigError(f"step of the trainer must return a dict of figures or None, got {brief(returned)}")
    figures = {}
    for name, value in (returned or {}).items():
        try:
            figures[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:  # torch raises RuntimeError for several numbers
            raise ConfigError(f"the trainer's figure {name!r} must be one number, got {brief(value)}") from error
    return figures
