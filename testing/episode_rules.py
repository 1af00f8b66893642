"""The rules of an evaluation collector and of a trajectory info, and the kits that apply them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from penstock.agents import RandomAgent
from penstock.buffers import Samples
from penstock.collectors import BaseEvalCollector, TrajInfo
from penstock.envs import EnvFn
from penstock.samplers import ParallelSampler, Sampler, SerialSampler
from penstock.testing.reusing import reusing
from penstock.testing.rules import Violation, apply, first_difference
from penstock.testing.traces import Event, LoggedAgent, Probing, bounded
from penstock.testing.wrapping import COLUMN

__all__ = ["EVAL_RULES", "TRAJ_INFO_RULES", "check_eval_collector", "check_traj_info"]

_EVALUATIONS = (5, 8, 9)  # itr of each


# ---- evaluation ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation:
    """One evaluation: what was handed over, and what environments and agent were called with."""

    itr: int
    infos: Sequence[tuple[int, float]]  #: Length and Return
    events: Sequence[Event]
    samples: Samples  #: of the training batch that followed

    def ended(self) -> list[tuple[int, int, int, float]]:
        """The episodes that ended: step, column, length, return; ordered as they are handed over."""
        found, running, made = [], dict[int, tuple[int, float]](), dict[int, int]()
        for event in self.events:
            b = event.column
            if event.kind == "env.reset":
                running[b] = 0, 0.0
            elif event.kind == "env.step":
                _, _, reward, terminated, truncated = event.data
                length, return_ = running.get(b, (0, 0.0))
                running[b] = length + 1, return_ + float(reward)
                if (terminated or truncated) and b >= 0:  # below zero are the training environments
                    found.append((made.get(b, 0), b, *running[b]))
                made[b] = made.get(b, 0) + 1
        return sorted(found)


@dataclass(frozen=True)
class EvalSubject:
    """The evaluation collector to be checked, and its runs."""

    eval_collector_cls: type[BaseEvalCollector]
    env_fn: EnvFn
    env_kwargs: Mapping[str, Any] | None
    n_envs: int
    max_T: int
    n_workers: Sequence[int]
    seed: int
    start_method: str

    def run(self, cls: type[Sampler], evaluate: bool = True, **arguments: Any) -> list[Evaluation]:
        """Some evaluations, each with a training batch behind it; logged in a `SerialSampler`."""
        log: list[Event] | None = [] if cls is SerialSampler else None
        agent = Probing(RandomAgent())
        found = []
        with cls(
            bounded(self.env_fn, self.env_kwargs, log),
            env_kwargs=[{COLUMN: -1 - b} for b in range(self.n_envs)],
            eval_env_kwargs=[{COLUMN: b} for b in range(self.n_envs)],
            batch_T=4,
            batch_B=self.n_envs,
            eval_n_envs=self.n_envs,
            eval_max_steps=self.n_envs * self.max_T,
            eval_collector_cls=self.eval_collector_cls,
            start_method=self.start_method,
            **arguments,
        ) as sampler:
            sampler.initialize(agent if log is None else LoggedAgent(agent, log), seed=self.seed)
            for itr in _EVALUATIONS:
                (log if log is not None else []).clear()
                infos = sampler.evaluate_agent(itr) if evaluate else []
                events = list(log or ())
                sampler.obtain_samples(itr)
                figures = [(info.Length, info.Return) for info in infos]
                found.append(Evaluation(itr, figures, events, sampler.samples_np.copy()))
        return found

    @cached_property
    def logged(self) -> list[Evaluation]:
        """The run in this process."""
        return self.run(SerialSampler)


def an_evaluation_begins_anew(subject: EvalSubject) -> None:
    """Every evaluation calls agent.eval_mode(itr) and resets every environment before anything is stepped."""
    for evaluation in subject.logged:
        stepped = next((i for i, e in enumerate(evaluation.events) if e.kind.endswith(".step")), None)
        before = evaluation.events[:stepped]
        reset = {event.column for event in before if event.kind == "env.reset"}
        modes = [event.data for event in before if event.kind == "agent.eval_mode"]
        if set(modes) != {evaluation.itr} or not reset.issuperset(range(subject.n_envs)):
            raise Violation(
                f"before the first step of the evaluation itr={evaluation.itr}, eval_mode was called with {modes} "
                f"and of {subject.n_envs} environments {sorted(reset)} were reset",
                "call self.begin_evaluation(itr) first",
            )


def an_evaluation_is_no_longer_than_it_may_be(subject: EvalSubject) -> None:
    """No environment makes more than max_T steps in an evaluation."""
    for evaluation in subject.logged:
        for b in range(subject.n_envs):
            n = sum(event.kind == "env.step" and event.column == b for event in evaluation.events)
            if n > subject.max_T:
                raise Violation(
                    f"{n} steps of environment {b} in the evaluation itr={evaluation.itr}, with max_T={subject.max_T}",
                    "go over range(self.max_T) at most",
                )


def an_evaluation_hands_over_what_ended(subject: EvalSubject) -> None:
    """Every TrajInfo is an episode that ended in this evaluation, whole and once, ordered by t, then env_rank."""
    for evaluation in subject.logged:
        ended = iter(evaluation.ended())
        for i, (length, return_) in enumerate(evaluation.infos):
            # Each must be found behind the one before: some may be left out, none may be made up.
            if not any(length == e[2] and np.isclose(return_, e[3], rtol=1e-4, atol=1e-5) for e in ended):
                raise Violation(
                    f"trajectory {i} of the evaluation itr={evaluation.itr} has Length={length}, Return={return_}; "
                    f"the episodes that ended are (t, env_rank, Length, Return): {evaluation.ended()}",
                    "give rewards and dones of each row to self.tracker.end_rows once, with the row's t, and the "
                    "tracker's hook to self.envs.step",
                )


def one_seed_gives_one_evaluation(subject: EvalSubject) -> None:
    """Two runs with the same seed give the same trajectories, and so does any number of workers."""
    others: list[tuple[str, list[Evaluation]]] = [("in two runs with one seed", subject.run(SerialSampler))]
    others += [(f"in {n} workers", subject.run(ParallelSampler, n_workers=n)) for n in subject.n_workers]
    for when, other in others:
        for one, two in zip(subject.logged, other, strict=True):
            if one.infos != two.infos:
                raise Violation(
                    f"{one.infos} and {two.infos} {when}, itr={one.itr}",
                    "draw what is random from self.streams, and let nothing hang on how many columns a worker has",
                )


def an_evaluation_leaves_training_alone(subject: EvalSubject) -> None:
    """The training batches are the same, whether there are evaluations between them or not."""
    without = subject.run(SerialSampler, evaluate=False)
    for one, two in zip(subject.logged, without, strict=True):
        pairs = [(name, field, two.samples.env[name]) for name, field in one.samples.env.items()]
        pairs.append(("action", one.samples.agent.action, two.samples.agent.action))
        difference = first_difference(pairs)
        if difference is not None:
            raise Violation(
                f"{difference} in the batch itr={one.itr}, with and without an evaluation before it",
                "keep to self.envs and self.agent, which are the evaluation's own",
            )


EVAL_RULES = (
    an_evaluation_begins_anew,
    an_evaluation_is_no_longer_than_it_may_be,
    an_evaluation_hands_over_what_ended,
    one_seed_gives_one_evaluation,
    an_evaluation_leaves_training_alone,
)


def check_eval_collector(
    eval_collector_cls: type[BaseEvalCollector],
    env_fn: EnvFn,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    n_envs: int = 4,
    max_T: int = 40,
    n_workers: Sequence[int] = (2,),
    seed: int = 0,
    start_method: str = "forkserver",
) -> None:
    """Hold an evaluation collector against every rule; returns if it keeps them all.

    A random agent acts, for `max_T` steps at most in each of `n_envs` environments, which end as those of
    `check_collector` do. Which episodes are handed over is the collector's choice. Raises
    `ConformanceError` for the first rule that is broken.
    """
    subject = EvalSubject(eval_collector_cls, env_fn, env_kwargs, n_envs, max_T, n_workers, seed, start_method)
    for rule in EVAL_RULES:
        apply(rule, eval_collector_cls.__name__, subject)


# ---- trajectory infos ----------------------------------------------------------------------


@dataclass(frozen=True)
class TrajInfoSubject:
    """The TrajInfo subclass to be checked, and its runs."""

    traj_info_cls: type[TrajInfo]
    env_fn: EnvFn
    env_kwargs: Mapping[str, Any] | None
    traj_info_kwargs: Mapping[str, Any] | None
    seed: int
    start_method: str

    def run(
        self, cls: type[Sampler], traj_info_cls: type[TrajInfo], *, reused: bool = False, **arguments: Any
    ) -> list[TrajInfo]:
        """The trajectories of some batches; `reused`: in environments that write into the same memory again."""
        infos: list[TrajInfo] = []
        kwargs = None if traj_info_cls is TrajInfo else self.traj_info_kwargs
        env_fn = bounded(self.env_fn, self.env_kwargs)
        with cls(
            reusing(env_fn) if reused else env_fn,
            env_kwargs=[{COLUMN: b} for b in range(4)],
            batch_T=16,
            batch_B=4,
            traj_info_cls=traj_info_cls,
            max_decorrelation_steps=10,
            start_method=self.start_method,
            **arguments,
        ) as sampler:
            sampler.initialize(Probing(RandomAgent()), seed=self.seed, traj_info_kwargs=kwargs)
            for itr in range(2):
                infos += sampler.obtain_samples(itr)[1]
        return infos


def a_trajectory_counts_as_the_stock_one_does(subject: TrajInfoSubject) -> None:
    """Length, Return and NonzeroRewards are those of the stock TrajInfo."""
    infos, stock = (subject.run(SerialSampler, cls) for cls in (subject.traj_info_cls, TrajInfo))
    for i, (info, wanted) in enumerate(zip(infos, stock, strict=True)):
        for name in ("Length", "Return", "NonzeroRewards"):
            found, right = getattr(info, name), getattr(wanted, name)
            if not np.isclose(found, right, rtol=1e-4, atol=1e-5):
                raise Violation(f"{name} is {found} in trajectory {i}; it should be {right}", "call super().step(...)")


def a_trajectory_keeps_nothing_that_changes(subject: TrajInfoSubject) -> None:
    """A trajectory info is the same where the environment writes its next observation and info over the last."""
    plain = subject.run(SerialSampler, subject.traj_info_cls)
    reused = subject.run(SerialSampler, subject.traj_info_cls, reused=True)
    remedy = "copy what you keep of env_info; observation, action and agent_info are copies already"
    for i, (one, two) in enumerate(zip(plain, reused, strict=True)):
        for name, value in vars(one).items():
            other = vars(two).get(name)
            if not _alike(value, other):
                seen = f"{name} of trajectory {i} is {value!r}, and {other!r} where memory is written again"
                raise Violation(seen, remedy)


def a_trajectory_travels(subject: TrajInfoSubject) -> None:
    """A trajectory info from a worker process has the attributes that it has in this process."""
    here = subject.run(SerialSampler, subject.traj_info_cls)
    there = subject.run(ParallelSampler, subject.traj_info_cls, n_workers=2)
    remedy = "keep plain numbers and arrays that hang on the trajectory alone; leave out what does not pickle"
    for i, (one, two) in enumerate(zip(here, there, strict=True)):
        for name, value in vars(one).items():
            other = vars(two).get(name)
            if not _alike(value, other):
                raise Violation(f"{name} of trajectory {i} is {value!r} here and {other!r} from a worker", remedy)


def _alike(left: Any, right: Any) -> bool:
    try:
        return bool(np.all(np.asarray(left == right))) or pickle.dumps(left) == pickle.dumps(right)
    except Exception:  # what cannot be compared cannot be said to differ
        return type(left) is type(right)


TRAJ_INFO_RULES = (
    a_trajectory_counts_as_the_stock_one_does,
    a_trajectory_keeps_nothing_that_changes,
    a_trajectory_travels,
)


def check_traj_info(
    traj_info_cls: type[TrajInfo],
    env_fn: EnvFn,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    traj_info_kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
    start_method: str = "forkserver",
) -> None:
    """Hold a `TrajInfo` subclass against every rule; returns if it keeps them all.

    Raises `ConformanceError` for the first rule that is broken, and what the sampler raises where
    trajectories cannot be handed over at all.
    """
    subject = TrajInfoSubject(traj_info_cls, env_fn, env_kwargs, traj_info_kwargs, seed, start_method)
    for rule in TRAJ_INFO_RULES:
        apply(rule, traj_info_cls.__name__, subject)
