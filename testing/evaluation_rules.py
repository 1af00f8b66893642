"""The rules of an evaluation collector, and those of a `TrajInfo` subclass."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from penstock.agents import RandomAgent
from penstock.buffers import Samples
from penstock.collectors import EvalCollector, TrajInfo
from penstock.samplers import ParallelSampler, Sampler, SerialSampler
from penstock.testing.environments import COLUMN, Event, Log, Setup
from penstock.testing.rules import Violation, first_difference
from penstock.testing.traces import LoggedAgent, ProbeAgent

_EVALUATIONS = (5, 8, 9)  # the itr of each evaluation


@dataclass(frozen=True)
class Evaluation:
    """One evaluation: its results, and the calls of its environments and its agent."""

    itr: int
    infos: Sequence[tuple[int, float, int | None]]  #: Length, Return, env_rank
    events: Sequence[Event]
    samples: Samples  #: of the training batch that followed


@dataclass(frozen=True)
class EvaluationSetup(Setup):
    """The evaluation collector to check, and what it runs with; there are `batch_B` evaluation environments."""

    eval_collector_cls: type[EvalCollector]
    max_T: int
    n_workers: Sequence[int]

    def run(self, cls: type[Sampler], evaluate: bool = True, **arguments: Any) -> list[Evaluation]:
        """Some evaluations, each followed by a training batch. A `SerialSampler` logs the calls."""
        log = Log() if cls is SerialSampler else None
        agent = ProbeAgent(RandomAgent())
        evaluations = []
        with self.sampler(
            cls,
            log,
            first_column=-self.batch_B,
            eval_env_kwargs=[{COLUMN: b} for b in range(self.batch_B)],
            eval_n_envs=self.batch_B,
            eval_max_steps=self.batch_B * self.max_T,
            eval_collector_cls=self.eval_collector_cls,
            **arguments,
        ) as sampler:
            sampler.initialize(agent if log is None else LoggedAgent(agent, log), seed=self.seed)
            for itr in _EVALUATIONS:
                if log is not None:
                    log.clear()
                infos = sampler.evaluate_agent(itr) if evaluate else []
                # The training environments have negative numbers.
                events = [event for event in log or () if not (event.kind.startswith("env.") and event.who < 0)]
                sampler.obtain_samples(itr)
                figures = [(info.Length, info.Return, info.env_rank) for info in infos]
                evaluations.append(Evaluation(itr, figures, events, sampler.samples_np.copy()))
        return evaluations

    @cached_property
    def logged(self) -> list[Evaluation]:
        """The run in this process."""
        return self.run(SerialSampler)


def an_evaluation_starts_with_resets(setup: EvaluationSetup) -> None:
    """Every evaluation calls agent.eval_mode(itr) and resets every environment before the first step."""
    for evaluation in setup.logged:
        first_step = next((i for i, e in enumerate(evaluation.events) if e.kind.endswith(".step")), None)
        before = evaluation.events[:first_step]
        reset = {event.who for event in before if event.kind == "env.reset"}
        modes = [event.data for event in before if event.kind == "agent.eval_mode"]
        if set(modes) != {evaluation.itr} or not reset.issuperset(range(setup.batch_B)):
            raise Violation(
                f"before the first step of the evaluation itr={evaluation.itr}, eval_mode was called with {modes}, "
                f"and of {setup.batch_B} environments {sorted(reset)} were reset",
                "call super().begin_evaluation() first, and self.begin_batch(itr) before self.act",
            )


def an_evaluation_makes_at_most_max_T_steps(setup: EvaluationSetup) -> None:
    """No environment makes more than max_T steps in an evaluation."""
    for evaluation in setup.logged:
        for b in range(setup.batch_B):
            n = sum(event.kind == "env.step" and event.who == b for event in evaluation.events)
            if n > setup.max_T:
                seen = f"{n} steps of environment {b} in the evaluation itr={evaluation.itr}, with max_T={setup.max_T}"
                raise Violation(seen, "make at most self.limits.max_T steps")


def an_evaluation_returns_episodes_that_ended(setup: EvaluationSetup) -> None:
    """Every TrajInfo is one whole episode that ended in this evaluation; those of an environment are in order."""
    for evaluation in setup.logged:
        ended = sorted(_ended(evaluation.events))
        episodes = {b: iter([e for e in ended if e[1] == b]) for b in range(setup.batch_B)}
        for i, (length, return_, b) in enumerate(evaluation.infos):
            # `any` continues behind the last match, so the order counts. The collector may leave episodes out.
            of_env = episodes.get(b or 0, ())
            if not any(length == e[2] and np.isclose(return_, e[3], rtol=1e-4, atol=1e-5) for e in of_env):
                raise Violation(
                    f"trajectory {i} of the evaluation itr={evaluation.itr} has Length={length}, Return={return_}; "
                    f"the episodes that ended are (t, env_rank, Length, Return): {ended}",
                    "call self.act(t) and self.step_envs(t) once for each row, and self.end_rows(n) after n rows",
                )


def _ended(events: Sequence[Event]) -> Iterator[tuple[int, int, int, float]]:
    """The episodes that ended: (t, env_rank, Length, Return)."""
    t, rewards = -1, dict[int, list[float]]()
    for event in events:
        if event.kind == "agent.step":
            t += 1
        elif event.kind == "env.reset":
            rewards[event.who] = []
        elif event.kind == "env.step":
            earned, (_, reward, is_over) = rewards[event.who], event.data
            earned.append(float(reward))
            if is_over:
                yield t, event.who, len(earned), sum(earned)


def one_seed_gives_one_evaluation(setup: EvaluationSetup) -> None:
    """Two runs with the same seed give the same trajectories, with any number of workers."""
    others: list[tuple[str, list[Evaluation]]] = [("in two runs with one seed", setup.run(SerialSampler))]
    others += [(f"in {n} workers", setup.run(ParallelSampler, n_workers=n)) for n in setup.n_workers]
    for when, other in others:
        for one, two in zip(setup.logged, other, strict=True):
            if one.infos != two.infos:
                raise Violation(
                    f"{one.infos} and {two.infos} {when}, itr={one.itr}",
                    "draw random numbers from self.streams, and do not use the worker's number of columns",
                )


def an_evaluation_does_not_change_training(setup: EvaluationSetup) -> None:
    """The training batches are the same with and without evaluations between them."""
    without = setup.run(SerialSampler, evaluate=False)
    for one, two in zip(setup.logged, without, strict=True):
        pairs = [(name, field, two.samples.env[name]) for name, field in one.samples.env.items()]
        pairs.append(("action", one.samples.agent.action, two.samples.agent.action))
        difference = first_difference(pairs)
        if difference is not None:
            raise Violation(
                f"{difference} in the batch itr={one.itr}, with and without an evaluation before it",
                "use only self.columns and self.agent, which belong to the evaluation alone",
            )


EVALUATION_RULES: tuple[Callable[[EvaluationSetup], None], ...] = (
    an_evaluation_starts_with_resets,
    an_evaluation_makes_at_most_max_T_steps,
    an_evaluation_returns_episodes_that_ended,
    one_seed_gives_one_evaluation,
    an_evaluation_does_not_change_training,
)


@dataclass(frozen=True)
class TrajInfoSetup(Setup):
    """The `TrajInfo` subclass to check, and what it runs with."""

    traj_info_cls: type[TrajInfo]
    traj_info_kwargs: Mapping[str, Any] | None

    def run(self, cls: type[Sampler], traj_info_cls: type[TrajInfo] | None = None, **arguments: Any) -> list[TrajInfo]:
        """The trajectories of two batches."""
        infos: list[TrajInfo] = []
        with self.sampler(cls, traj_info_cls=traj_info_cls or self.traj_info_cls, **arguments) as sampler:
            kwargs = self.traj_info_kwargs if traj_info_cls is None else None
            sampler.initialize(ProbeAgent(RandomAgent()), seed=self.seed, traj_info_kwargs=kwargs)
            for itr in range(2):
                infos += sampler.obtain_samples(itr)[1]
        return infos

    def require_same(self, others: list[TrajInfo], where: str, remedy: str) -> None:
        """Raise `Violation` unless `others` have the attributes of the trajectories of a run in this process."""
        for i, (one, two) in enumerate(zip(self.run(SerialSampler), others, strict=True)):
            for name, value in vars(one).items():
                other = vars(two).get(name)
                if not _equal(value, other):
                    raise Violation(f"{name} of trajectory {i} is {value!r}, and {other!r} {where}", remedy)


def _equal(left: object, right: object) -> bool:
    try:
        return bool(np.all(np.asarray(left == right))) or pickle.dumps(left) == pickle.dumps(right)
    except Exception:  # values that cannot be compared count as equal if they have the same type
        return type(left) is type(right)


def a_traj_info_counts_like_its_base_class(setup: TrajInfoSetup) -> None:
    """Length, Return and NonzeroRewards are what `TrajInfo` itself counts."""
    for i, (info, wanted) in enumerate(zip(setup.run(SerialSampler), setup.run(SerialSampler, TrajInfo), strict=True)):
        for name in ("Length", "Return", "NonzeroRewards"):
            value, right = getattr(info, name), getattr(wanted, name)
            if not np.isclose(value, right, rtol=1e-4, atol=1e-5):
                raise Violation(f"{name} is {value} in trajectory {i}; it should be {right}", "call super().step(...)")


def a_traj_info_copies_what_it_keeps(setup: TrajInfoSetup) -> None:
    """A trajectory info does not change when the environment overwrites its last observation and info."""
    remedy = "copy what you keep of env_info; observation, action and agent_info are copies already"
    setup.require_same(setup.run(SerialSampler, reused=True), "in an environment that overwrites its memory", remedy)


def a_traj_info_is_the_same_from_a_worker(setup: TrajInfoSetup) -> None:
    """A trajectory info from a worker process has the same attributes as in this process."""
    remedy = "keep plain numbers and arrays that depend only on the trajectory; leave out what cannot be pickled"
    setup.require_same(setup.run(ParallelSampler, n_workers=2), "from a worker", remedy)


TRAJ_INFO_RULES: tuple[Callable[[TrajInfoSetup], None], ...] = (
    a_traj_info_counts_like_its_base_class,
    a_traj_info_copies_what_it_keeps,
    a_traj_info_is_the_same_from_a_worker,
)
