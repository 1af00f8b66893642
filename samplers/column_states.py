"""What a worker does to save its environments, agent and collector column by column, or to continue a saved run."""

from __future__ import annotations

import inspect
import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import cloudpickle
import numpy as np

from penstock.agents.agent import Agent
from penstock.buffers.object_pipe import MessageKind, ObjectMessage
from penstock.buffers.reports import dump_exception, in_one_line
from penstock.collectors.collector import Collector
from penstock.collectors.columns import EnvColumns
from penstock.collectors.env_builder import EnvBuilder
from penstock.collectors.eval_collector import BaseEvalCollector
from penstock.collectors.lock_step import LockStepCollector
from penstock.collectors.seat_evaluation import SeatEvalCollector
from penstock.collectors.tracking import snapshot
from penstock.envs.factory import EnvContext, EnvFactory
from penstock.envs.recorded_episode import follow
from penstock.envs.rows import action_splitter
from penstock.envs.seeding import ColumnStreams, Purpose, episode_seed
from penstock.envs.state import check_resumable, is_same, load_env, save_env
from penstock.errors import ConfigError, RepeatError, brief
from penstock.samplers.sampler_plan import SamplerPlan
from penstock.samplers.seating import Chooser
from penstock.workers.control import Phase

#: How an environment continues: "get_state", "pickle" and "repeat" are exact.
RESEEDED = "reseeded"
KINDS = "get_state", "pickle", "repeat", RESEEDED


class SavedColumn(TypedDict):
    """One column of a saved run, as text and bytes."""

    kind: str  #: "get_state", "pickle", "repeat" or "reseeded"
    why: str  #: why it is reseeded; empty otherwise
    #: Everything that the column needs to continue, pickled; None if it is reseeded. Not `b""`: torch.save writes empty
    #: bytes as a call, which torch.load refuses.
    data: bytes | None


@dataclass
class WorkerParts:
    """The parts of a worker's program that these messages use."""

    plan: SamplerPlan
    seed: int
    factories: Sequence[EnvFactory]
    builder: EnvBuilder
    collector: Collector | LockStepCollector
    eval_collector: BaseEvalCollector | SeatEvalCollector | None
    #: What the checks of the environments have found so far: pairs of a factory, and why its environments cannot be
    #: saved (empty: they can).
    proofs: list[tuple[EnvFactory, str]]

    def context(self, column: int) -> EnvContext:
        """What the environment of this column was built for."""
        streams = self.collector.streams
        return EnvContext(
            streams.env_ranks[column],
            self.plan.worker_rank,
            streams.env_seeds(Purpose.TRAIN)[column],
            Purpose.TRAIN,
        )


class StateMessage(ABC):
    """A message to all workers. Each answers with one result."""

    def perform(self, parts: WorkerParts) -> list[ObjectMessage]:
        """Call `answer`. If it raises, the exception is the result, and the worker continues."""
        parts.collector.progress.enter(Phase.CALLING)
        try:
            outcome = {"result": self.answer(parts)}
        except Exception as error:  # the user's code may raise anything
            outcome = {"error": dump_exception(error)}
        return [ObjectMessage(MessageKind.CALL_RESULT, 0, parts.plan.env_ranks[0], outcome)]

    @abstractmethod
    def answer(self, parts: WorkerParts) -> Any:
        """What the worker answers."""


@dataclass(frozen=True)
class ChooseMessage(StateMessage):
    """From the next game on, `chooser` says who plays which seat."""

    chooser: Chooser

    def answer(self, parts: WorkerParts) -> Any:
        """Nothing."""
        for collector in (parts.collector, parts.eval_collector):
            if collector is not None:
                collector.envs.chooser = self.chooser  # type: ignore[union-attr]


# ---- saving ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SaveMessage(StateMessage):
    """Save every column: returns a `SavedColumn` by env_rank, and `{env_rank: (evaluations, generation)}` of the
    evaluation environments."""

    saves_envs: bool
    untrusted: str  #: why all columns are reseeded: see `class_without_column_state`; empty if they need not be

    def answer(self, parts: WorkerParts) -> Any:
        """The columns by env_rank, and the counts of the evaluation environments."""
        env_ranks = parts.plan.env_ranks
        columns = {env_rank: self._save(parts, column) for column, env_rank in enumerate(env_ranks)}
        evaluator = parts.eval_collector
        counts = (0, 0) if evaluator is None else (evaluator._n_evaluations, evaluator.streams.generation)
        return columns, dict.fromkeys(parts.plan.eval_env_ranks, counts)

    def _save(self, parts: WorkerParts, column: int) -> SavedColumn:
        if self.untrusted or not self.saves_envs:
            return SavedColumn(kind=RESEEDED, why=self.untrusted or 'env_state="never"', data=None)
        collector = parts.collector
        assert isinstance(collector, Collector)
        envs = collector.envs
        episodes = None if collector._episodes is None else collector._episodes.column_state(column)
        kind, env, why = "", b"", _why_not_resumable(parts, column)
        if not why:
            try:
                kind, env = save_env(envs.envs[column])
            except ConfigError as error:
                why = str(error)
        if why:
            if episodes is None or episodes["n_missing"]:
                return SavedColumn(kind=RESEEDED, why=why, data=None)
            kind = "repeat"
        values = {
            "env": env,
            "observation": snapshot(envs.observations[column]),
            "episodes": episodes,
            "collector": collector.column_state(column),
            "agent": collector.agent.column_state(column),
        }
        try:
            data = cloudpickle.dumps(values)
            pickle.loads(data)
        except Exception as error:  # for example an attribute of a TrajInfo subclass
            return SavedColumn(kind=RESEEDED, why=f"its state cannot be pickled: {in_one_line(error)}", data=None)
        return SavedColumn(kind=kind, why="", data=data)


def _why_not_resumable(parts: WorkerParts, column: int) -> str:
    """Why the environment of this column cannot be saved; empty if a check has shown that it can. Columns with the same
    factory share one check."""
    factory = parts.factories[column]
    for other, why in parts.proofs:
        if other.fn is factory.fn and other.kwargs is factory.kwargs:
            return why
    progress, why = parts.collector.progress, ""
    try:
        check_resumable(factory, parts.context(column), on_step=lambda: progress.enter(Phase.CALLING))
    except ConfigError as error:
        why = str(error)
    except Exception as error:  # the user's environment may raise anything
        why = f"the check of its state raised {in_one_line(error)}"
    parts.proofs.append((factory, why))
    return why


def class_without_column_state(*classes: type) -> str:
    """Why one of these agents and collectors may have a state that its `column_state` does not save; empty if none
    has."""
    for each in classes:
        for cls in each.__mro__:
            if cls.__module__.split(".")[0] == "penstock" or "column_state" in vars(cls):
                break
            if any(inspect.isroutine(value) and not name.startswith("__") for name, value in vars(cls).items()):
                return f"{cls.__name__} does not define column_state and load_column_state"
    return ""


# ---- loading -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadMessage(StateMessage):
    """Continue saved columns; the others start again. Returns `{env_rank: why}` for those that start again."""

    columns: Mapping[int, SavedColumn]  #: by env_rank
    evaluations: tuple[int, int]  #: how many there have been, and the generation of their streams
    generation: int  #: of the streams of columns that start again

    def answer(self, parts: WorkerParts) -> Any:
        """By env_rank, why the column starts again."""
        collector, refused = parts.collector, dict[int, str]()
        parts.builder.seed_generators(self.generation)  # not the numbers of the saved run again
        streams = ColumnStreams(parts.seed, parts.plan.env_ranks, self.generation)
        for column, env_rank in enumerate(streams.env_ranks):
            saved = self.columns[env_rank]
            why = saved["why"] if saved["kind"] == RESEEDED else _load(parts, column, saved)
            if why:
                refused[env_rank] = why
        if isinstance(collector, LockStepCollector):
            collector.restart(streams)
        elif refused:
            indices = [rank - streams.env_ranks[0] for rank in refused]
            collector.restart_columns(indices, streams)
            restart_agent(collector.agent, indices, streams)
        if parts.eval_collector is not None:
            evaluator = parts.eval_collector
            evaluator._n_evaluations, generation = self.evaluations
            evaluator.streams = replace(evaluator.streams, generation=generation)
        return refused


def restart_agent(agent: Agent, columns: Sequence[int], streams: ColumnStreams) -> None:
    """Give these columns new random streams, and reset their state."""
    rngs = streams.rngs(Purpose.ACTION)
    if len(columns) == len(rngs):
        agent.seed_columns(rngs)
        agent.reset()
        return
    agent.reseed_columns(np.asarray(columns, np.intp), [rngs[column] for column in columns])
    for column in columns:
        agent.reset_one(column)


def _load(parts: WorkerParts, column: int, saved: SavedColumn) -> str:
    """Continue this column. Returns why that is impossible if a repeated episode differs; otherwise an empty text."""
    assert saved["data"] is not None
    collector, state = parts.collector, pickle.loads(saved["data"])
    assert isinstance(collector, Collector)
    envs, episodes = collector.envs, state["episodes"]
    assert isinstance(envs, EnvColumns)
    old = envs.envs[column]
    if saved["kind"] == "repeat":
        env_rank, numbers = envs.env_ranks[column], (episodes["episode"], episodes["generation"])
        seed, new = episode_seed(parts.seed, env_rank, *numbers), old
        actions = action_splitter(old.action_space)(episodes["actions"])
        try:
            last = follow(old, seed, actions, episodes["rewards"], f"the episode of env_rank {env_rank}")
        except RepeatError as error:
            return str(error)
        if not is_same(last, state["observation"]):
            return f"its last observation differs after its episode was repeated: {brief(last)}"
    else:
        new = load_env(old, saved["kind"], state["env"])
    if new is not old:
        parts.builder.replace(old, new)
    envs.replace_env(column, new, state["observation"])
    collector.load_column_state(column, state["collector"])
    collector.agent.load_column_state(column, state["agent"])
    if collector._episodes is not None and episodes is not None:
        collector._episodes.load_column_state(column, episodes)
    return ""
