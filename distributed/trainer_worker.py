"""A worker that trains with the pieces of a sample stream, and publishes parameters."""

from __future__ import annotations

import io
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock.agents.agent import packed, unpacked
from penstock.arguments import must_be
from penstock.buffers.reports import in_one_line
from penstock.buffers.samples import parts_of
from penstock.distributed.names import natural
from penstock.distributed.parameters import PARAMETERS, ParameterServer, by_policy, read_parameters
from penstock.distributed.pieces import Batch, batch_of, layout_of_piece
from penstock.distributed.policy_worker import AgentPlan
from penstock.distributed.role import PollResult, Worker
from penstock.distributed.statuses import FINAL, Status
from penstock.distributed.streams import SampleConsumer
from penstock.errors import ConfigError, NoReplyError, brief

if TYPE_CHECKING:
    from penstock.distributed.trainer_group import TrainerGroup

_log = logging.getLogger("penstock")

_WAIT_SECONDS = 0.05  # how long a poll waits for a piece
_GROUP_SECONDS = 1800.0  # how long a rank waits in a step for the others, longer than for its panel
_FOREIGN = float("inf")  # the staleness of a piece from before the trainer was restarted


class Trainer(Protocol):
    """A class that you write. It is called with the initialized agent, or dict of agents."""

    def step(self, batch: Batch) -> Mapping[str, float] | None:
        """Train on one batch: change the parameters of the agent. Returns figures, which the panel shows, or None."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What to save in addition to the agent, for example the optimizer's state."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` has returned."""
        ...


@dataclass(frozen=True)
class Training:
    """`count` trainers, each of which takes `batch` pieces of the sample stream `stream` per step.

    With `max_staleness`, a trainer drops a piece, and counts it, in two cases: its parameters are more than
    `max_staleness` versions old, or they come from before the trainer was restarted. A piece then takes its place in
    the stream until it was trained on, so that actors do not sample too far ahead.

    `checkpoint` is a file. The trainer saves its state there every `save_every` steps and at the end. If the file
    exists, it starts from it: it must be your own, and no code in it is run. So `state_dict` may return numbers, text,
    lists, tuples, dicts, tensors and arrays of numbers. Each save checks this, and says what to convert. With
    `trust_checkpoint`, anything that can be pickled is saved, and the file may belong to anybody: whoever can write it
    can run code in the trainer. `resources` is what Ray reserves for each trainer, such as `{"GPU": 1}`.

    Several trainers are the ranks of one group of `torch.distributed`, with this `backend`, which exists before
    `make_trainer` is called with the agent. The gradients of `agent.model` are averaged over all ranks at each call of
    `backward`, so all ranks keep the same parameters, and each must call `backward` equally often. If one of them
    fails, all begin again from the checkpoint.

    When a trainer has not heard of the name table for 30 s, it saves its state into `checkpoint`. On Ray or on another
    machine than the panel's, it then waits until the panel goes on, and ends after `panel_timeout` seconds of silence.
    Those in which its machine is suspended count too.
    """

    make_trainer: Callable[[Any], Trainer]
    stream: str = "train"
    batch: int = 1
    max_staleness: int | None = None
    checkpoint: str | Path | None = None
    save_every: int = 10
    resources: Mapping[str, float] | None = None
    count: int = 1
    backend: str = "gloo"
    panel_timeout: float = 3600.0
    trust_checkpoint: bool = False


class TrainerWorker(Worker):
    """Calls the user's trainer with `batch` pieces at a time, and publishes the parameters after each step.

    `configure` has the argument `generation`: how often the group was started again.

    Args:
        training: the trainer, its stream, and what it saves.
        plan: how to make the agent.
        rank: of several trainers. Rank 0 publishes the parameters and saves.
    """

    def __init__(self, training: Training, plan: AgentPlan, *, rank: int = 0) -> None:
        self._training, self._plan, self._rank = training, plan, rank
        self._checkpoint = None if training.checkpoint is None else Path(training.checkpoint)
        self._lineage = 0
        self._group: TrainerGroup | None = None
        self._consumer: SampleConsumer | None = None
        self._server: ParameterServer | None = None
        self._pieces: list[Any] = []
        self._version, self._n_stale, self._largest_staleness = 1, 0, 0.0
        self._saved = 0  # the version in the checkpoint
        self._layout: tuple[str, dict[str, str]] | None = None  # an actor, and the layout of its pieces
        self._n_unfit = 0
        self._results: dict[str, float] = {}

    def _configure(self, generation: int = 0) -> None:
        self._agent = self._plan.agent()
        if (size := self._training.count) > 1:
            from penstock.distributed.trainer_group import TrainerGroup  # only here, since it imports torch

            key, backend = f"trainers/{generation}", self._training.backend
            patience = self._training.panel_timeout + _GROUP_SECONDS
            self._group = TrainerGroup(self.wire, self.names, key, self._rank, size, backend, self._agent, patience)
        self._trainer = self._training.make_trainer(self._agent)
        self._check_trainer()
        if self._checkpoint is not None and self._checkpoint.exists():
            self._load(self._checkpoint)
        if self._rank == 0:
            self._server = ParameterServer(self.wire, self.names, PARAMETERS)
            self._lineage = self._server.lineage
            self._server.publish(self._version, read_parameters(self._agent))
        if self._group is not None:  # nobody saves before all have loaded
            self._lineage = self._group.lineage_of_rank_0(self._lineage)
        holds = self._training.max_staleness is not None
        self._consumer = SampleConsumer(
            self.wire, self.names, self._training.stream, self.name, holds=holds, check=self._why_unfit
        )

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
        if self._group is not None and self._rank == 0 and self._misses_panel(0.5):
            return PollResult()  # a step waits for the other ranks, which may get no pieces: then it could not save
        try:
            piece = self._consumer.get(_WAIT_SECONDS)
        except NoReplyError:
            # Nothing comes, and the batch is not full: the actors may wait for places in the stream (one was lost, or
            # there are too few, or other consumers have their pieces). Otherwise each side would wait for the other.
            self._consumer.release()
            return PollResult()
        self._pieces.append(piece)
        self._drop_stale()
        if len(self._pieces) < self._training.batch:
            return PollResult()
        staleness = [self._staleness(piece) for piece in self._pieces]
        self._largest_staleness = max([self._largest_staleness, *(n for n in staleness if n != _FOREIGN)])
        batch, self._pieces = batch_of(self._pieces), []
        try:
            self._results = _figures(self._trainer.step(batch))
        except RuntimeError:
            if self._group is not None and self.status in FINAL:  # all must end, and another rank was faster
                return PollResult()
            raise
        self._version += 1
        if self._server is not None:
            self._server.publish(self._version, read_parameters(self._agent))
        self._consumer.release()  # after `publish`: the next pieces are acted by the new parameters
        if self._checkpoint is not None and self._version % self._training.save_every == 0 and self._rank == 0:
            self._save(self._checkpoint)
        return PollResult(sum(part.env.reward.numel() for part in parts_of(batch.samples)), 1)

    def _why_unfit(self, piece: Any) -> str:
        """Why a piece cannot be joined with the others, or "". They must be like those of the actor with the lowest
        number: it is the one of the run itself, if another machine has other code."""
        try:
            layout, actor = layout_of_piece(piece), piece["actor"]
        except Exception as error:  # whoever has the keys may send anything
            self._n_unfit += 1
            return f"this is no piece of samples: {in_one_line(error)}"
        first, wanted = self._layout or (actor, layout)
        if layout == wanted or natural(actor) < natural(first):
            if layout != wanted:
                self._n_unfit += len(self._pieces)
                self._pieces = []
            self._layout = min(first, actor, key=natural), layout
            return ""
        self._n_unfit += 1
        path = min(path for path in {*layout, *wanted} if layout.get(path) != wanted.get(path))
        text = (
            f"a piece of {actor} does not fit those of {first}: {path} is {layout.get(path, 'missing')}, and "
            f"theirs {wanted.get(path, 'missing')}. All machines must have the same code"
        )
        _log.warning("trainer %s: %s", self.name, text)
        return text

    def _staleness(self, piece: Mapping[str, Any]) -> float:
        """How many versions old its parameters are."""
        return self._version - piece["version"] if piece["lineage"] == self._lineage else _FOREIGN

    def _drop_stale(self) -> None:
        if (most := self._training.max_staleness) is not None:
            fresh = [piece for piece in self._pieces if 0 <= self._staleness(piece) <= most]
            self._n_stale += len(self._pieces) - len(fresh)
            self._pieces = fresh

    def _save(self, path: Path) -> None:
        """Write the file anew: if the process is killed meanwhile, the old one stays."""
        import torch

        part = path.with_name(f".{path.name}.part")
        states = {name: agent.state_dict() for name, agent in by_policy(self._agent).items()}
        state = {"version": self._version, "agent": states.get("", states), "trainer": self._trainer.state_dict()}
        try:
            part.unlink(missing_ok=True)
            try:
                with open(part, "xb") as file:  # a new file, never one to which somebody has put a link there
                    torch.save(packed(state), file)
                    file.flush()
                    os.fsync(file.fileno())  # otherwise the name could reach the disk before the bytes
                if not self._training.trust_checkpoint:
                    _check_saved(part, packed(state))
                os.replace(part, path)
                self._saved = self._version
            finally:
                part.unlink(missing_ok=True)
        except (OSError, RuntimeError) as error:
            cause = error if isinstance(error, OSError) else error.__context__  # torch raises its own error after it
            if not isinstance(cause, OSError):
                raise
            raise ConfigError(f"checkpoint={str(path)!r} cannot be written: {cause.strerror}") from error

    def _load(self, path: Path) -> None:
        import torch

        agents, trusts = by_policy(self._agent), self._training.trust_checkpoint
        try:
            with open(path, "rb") as file:
                # Otherwise whoever makes the file first would choose what the trainer begins with.
                if not trusts and (owner := os.fstat(file.fileno()).st_uid) != os.getuid():
                    raise ConfigError(
                        f"it belongs to user {owner}, and must be your own: delete it, or chown it, or use "
                        "Training(trust_checkpoint=True), which runs the code in it"
                    )
                state = unpacked(torch.load(file, weights_only=not trusts))
            if "" not in agents and state["agent"].keys() != agents.keys():
                raise ConfigError(
                    f"it is of the policies {list(state['agent'])}, and make_agent returns {list(agents)}"
                )
            for name, agent in agents.items():
                agent.load_state_dict(state["agent"][name] if name else state["agent"])
            self._trainer.load_state_dict(state["trainer"])
            self._version = self._saved = int(state["version"])
        except Exception as error:  # a file of another agent may raise anything
            raise ConfigError(f"checkpoint={str(path)!r} cannot be loaded: {in_one_line(error)}") from error

    def _stats(self) -> Mapping[str, float]:
        counts: dict[str, float] = {"largest_staleness": self._largest_staleness}
        counts |= {"version": self._version, "saved": self._saved, "stale": self._n_stale, "unfit": self._n_unfit}
        return {**counts, **self._results, **counts}

    def _on_silence(self) -> float:
        if self._server is not None and self._checkpoint is not None:
            try:
                self._save(self._checkpoint)
            except Exception:  # it would lose what it has learned
                _log.exception("trainer %s cannot save itself while its panel is silent", self.name)
        return self._training.panel_timeout

    def _close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
        if self._server is not None:
            if self._checkpoint is not None and self.status is not Status.ERROR:
                self._save(self._checkpoint)
            self._server.close()
        if self._group is not None:
            self._group.close()


def _check_saved(part: Path, state: Mapping[str, Any]) -> None:
    """Raise `ConfigError` now for what could otherwise not be loaded when it is needed."""
    import torch

    try:
        torch.load(part, weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        unreadable = next((text for key in ("trainer", "agent") for text in _unreadable(state[key], "")), "")
        raise ConfigError(
            "state_dict of the trainer must return numbers, text, lists, tuples, dicts, tensors and arrays of "
            f"numbers, since no code in a checkpoint is run. Convert {unreadable or 'its keys'}, or use "
            "Training(trust_checkpoint=True) if nobody else can write this file"
        ) from error


def _unreadable(value: object, path: str) -> Iterator[str]:
    """The parts of a state that torch cannot read without running code."""
    import torch

    if type(value) in (dict, list, tuple):
        parts: Any = value.items() if isinstance(value, dict) else enumerate(value)  # type: ignore[arg-type]
        for key, part in parts:
            yield from _unreadable(part, f"{path}[{key!r}]")
        return
    torch.save(value, file := io.BytesIO())
    try:
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except pickle.UnpicklingError:
        yield f"state_dict(){path}, a {type(value).__name__}"


def _figures(returned: Any) -> dict[str, float]:
    """What `step` has returned, as numbers."""
    fits = isinstance(returned, Mapping | None)
    must_be("what step of the trainer returns", returned, fits, "a dict of figures or None")
    figures = {}
    for name, value in (returned or {}).items():
        try:
            figures[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:  # torch raises RuntimeError for several numbers
            raise ConfigError(f"the trainer's figure {name!r} must be one number, got {brief(value)}") from error
    return figures
