"""A worker of a vector environment: steps and resets its share when asked, and writes what comes of it into rows."""

from __future__ import annotations

import enum
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from penstock.collectors.env_builder import EnvBuilder
from penstock.envs.calls import EnvCall, perform, pickled
from penstock.envs.checks import episode_flags, require_info, require_number, step_values_error
from penstock.envs.factory import EnvContext, EnvFactory
from penstock.envs.rows import ColumnError, action_splitter, arrays_like, row_writer
from penstock.envs.seeding import Purpose
from penstock.errors import SpaceError, brief
from penstock.vector.memory import VectorMemory, taken
from penstock.workers.control import Phase, Progress
from penstock.workers.plan import WorkerPlan
from penstock.workers.work import Station

__all__ = ["RESTARTED", "ResetOrder", "VectorJob"]

RESTARTED = "worker_restarted"  #: in the info of a step that a worker's replacement cut short

_Result = tuple[Any, float, bool, bool]


@dataclass(frozen=True)
class ResetOrder:
    """Reset the environments of which it has been requested."""

    seeds: Sequence[int | None]  #: of all environments
    options: dict[str, Any] | None

    def dumps(self) -> bytes:
        """Pickled. Raises `ConfigError` if that is impossible."""
        return pickled(self, "the options of reset")


@dataclass(frozen=True)
class VectorJob:
    """What the workers of a vector environment are to do."""

    env_factories: Sequence[EnvFactory]  #: `[n]`, all environments
    build_seeds: Sequence[int]  #: `[n]`, for factories that ask for an `EnvContext`
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    autoreset_mode: AutoresetMode

    def arguments(self) -> Mapping[str, Any]:
        """What it is made of, by the names that the user knows it by."""
        return {"env_fns": self.env_factories, "autoreset_mode": self.autoreset_mode}

    def common(self) -> VectorJob:
        """All but the factories."""
        return replace(self, env_factories=())

    def share_of(self, plan: WorkerPlan) -> Sequence[EnvFactory]:
        """The factories of `plan`'s environments."""
        return [self.env_factories[i] for i in plan.columns]

    def with_share(self, share: Sequence[EnvFactory]) -> VectorJob:
        """The same job with these factories."""
        return replace(self, env_factories=share)

    def start_work(self, station: Station) -> VectorWork:
        """In a worker process: build its environments."""
        return VectorWork(self, station)


class _Next(enum.Enum):
    """What an environment does when it is next asked to step."""

    STEP = enum.auto()
    RESET = enum.auto()  #: its episode has ended (AutoresetMode.NEXT_STEP)
    CUT = enum.auto()  #: it has taken a dead worker's place: its episode ends where that one left it


class VectorWork:
    """A worker's share of the environments."""

    def __init__(self, job: VectorJob, station: Station) -> None:
        memory: VectorMemory = station.memory
        plan = station.plan
        self._station, self._plan, self._control, self._mailbox = station, plan, memory.control, memory.mailbox
        self._progress = memory.control.progress(plan.worker_rank)
        self._built = EnvBuilder(self._progress, job.observation_space, job.action_space)
        self._envs = [
            self._built.build(factory, EnvContext(i, plan.worker_rank, job.build_seeds[i], Purpose.TRAIN))
            for factory, i in zip(job.env_factories, plan.columns, strict=True)
        ]
        self._steps: list[Any] = [env.step for env in self._envs]
        self._mode = job.autoreset_mode
        self._split = action_splitter(job.action_space)
        rows = memory.rows.arrays
        self._rows = own = rows[plan.columns.start : plan.columns.stop]
        self._one_by_one = memoryview(rows.one_by_one)
        self._action = own.action
        self._reward, self._terminated, self._truncated = own.reward, own.terminated, own.truncated
        # Items of memoryviews are Python integers, and cost a third of numpy's.
        self._requested, self._answered = memoryview(own.requested), memoryview(own.answered)
        self._told = memoryview(own.told)
        self._writer = row_writer(job.observation_space)
        self._final_writer = row_writer(job.observation_space, "the final observation")
        self._whole = self._writer.prepare(own.observation)
        self._single = [self._writer.prepare(own.observation[i : i + 1]) for i in range(len(self._envs))]
        self._last = arrays_like(job.observation_space, own.observation)
        is_replacement = plan.generation > 0
        self._next = [_Next.CUT if is_replacement else _Next.STEP] * len(self._envs)
        self._unseeded = set(range(len(self._envs))) if is_replacement else set()
        self._infos: dict[int, dict[str, Any]] = {}  # pickled, of the requests that are being answered

    # ---- what the crew asks for --------------------------------------------------------------

    def prepare(self) -> None:
        """Nothing goes on while nobody asks."""

    def run(self) -> None:
        """Answer what has been requested, or do what lies in the mailbox."""
        self._progress.begin()
        if self._control.do_call:
            order = pickle.loads(self._mailbox.read())
            if isinstance(order, ResetOrder):
                self._reset(order)
            else:
                self._call(order)
            return
        wanted = self._wanted()
        self._progress.enter(Phase.STEPPING)
        if len(wanted) == len(self._envs) and not self._one_by_one[0]:
            self._step_all()
        else:
            for i in wanted:
                self._step_one(i)
                self._station.gate.signal()

    def close(self) -> None:
        """Close every environment; the first exception is raised when all have had their turn."""
        self._built.close()

    # ---- stepping ----------------------------------------------------------------------------

    def _wanted(self) -> list[int]:
        requested, answered = self._requested, self._answered
        return [i for i in range(len(requested)) if requested[i] != answered[i]]

    def _step_all(self) -> None:
        everyone = range(len(self._envs))
        observations, self._reward[:] = self._advance(everyone, self._split(self._action))
        self._write(self._writer, self._whole, observations, 0)
        self._answer(everyone)

    def _step_one(self, i: int) -> None:
        observations, self._reward[i : i + 1] = self._advance(range(i, i + 1), self._split(self._action[i : i + 1]))
        self._write(self._writer, self._single[i], observations, i)
        self._answer([i])

    def _advance(self, which: range, actions: Sequence[Any]) -> tuple[list[Any], list[float]]:
        """Step the environments `which`, or do whatever their mode says instead: observations and rewards. Flags are
        written."""
        words, at, first = self._progress.words, Progress.ENV_RANK, self._plan.env_ranks.start
        steps, following, step = self._steps, self._next, _Next.STEP
        terminated, truncated = self._terminated, self._truncated
        observations, rewards = [], []
        terminated[which.start : which.stop] = truncated[which.start : which.stop] = False
        try:
            for i, action in zip(which, actions, strict=True):
                words[at] = first + i
                if following[i] is step:
                    observation, reward, over, cut, info = steps[i](action)
                    is_plain = over is False and cut is False and reward.__class__ is float
                    if not is_plain or info or info.__class__ is not dict:
                        observation, reward, over, cut = self._tell(i, observation, reward, over, cut, info)
                        terminated[i], truncated[i] = over, cut
                else:
                    observation, reward, terminated[i], truncated[i] = self._begin_anew(i)
                observations.append(observation)
                rewards.append(reward)
        except (TypeError, ValueError) as error:
            if (own := step_values_error(error, first + i)) is not None:
                raise own from error
            raise
        return observations, rewards

    def _tell(self, i: int, observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> _Result:
        """What a step has returned that is not of the commonest kind: checked, and with what follows from it."""
        env_rank = self._plan.env_ranks[i]
        terminated, truncated = episode_flags(terminated, truncated, env_rank)
        reward = require_number(reward, env_rank)
        require_info(info, env_rank)
        if terminated or truncated:
            observation, info = self._end(i, observation, info)
        self._keep(i, "info", info)
        return observation, reward, terminated, truncated

    def _keep(self, i: int, kind: str, info: Any) -> None:
        """Have the main process told of `info`, as it is now: environments may use one dict again and again."""
        if info:
            self._infos.setdefault(i, {})[kind] = _pickled_info(info, self._plan.env_ranks[i])

    def _end(self, i: int, observation: Any, info: Any) -> tuple[Any, Any]:
        """An episode has ended with `observation` and `info`; returns those that are to be told."""
        if self._mode is AutoresetMode.NEXT_STEP:
            self._next[i] = _Next.RESET
        if self._mode is not AutoresetMode.SAME_STEP:
            return observation, info
        final = self._rows.final_observation[i : i + 1]
        self._write(self._final_writer, self._final_writer.prepare(final), [observation], i)
        self._keep(i, "final_info", info)
        return self._reset_one(i, None, None)

    def _begin_anew(self, i: int) -> _Result:
        if self._next[i] is _Next.RESET:
            observation, info = self._reset_one(i, None, None)
            self._keep(i, "info", info)
            return observation, 0.0, False, False
        # The episode is cut where the dead worker has left it.
        self._next[i] = _Next.STEP
        observation, info = self._end(i, taken(self._last, i), {RESTARTED: True})
        self._keep(i, "info", info)
        return observation, 0.0, False, True

    def _answer(self, which: Sequence[int]) -> None:
        if self._infos:
            frames = [(self._requested[i], self._plan.columns[i], info) for i, info in sorted(self._infos.items())]
            self._station.frames.put(frames)
            for i in self._infos:
                self._told[i] = self._requested[i]
            self._infos.clear()
        for i in which:
            self._answered[i] = self._requested[i]

    def _write(self, writer: Any, prepared: Any, values: Sequence[Any], first: int) -> None:
        try:
            writer.write(prepared, values)
        except ColumnError as error:
            env_rank = self._plan.env_ranks[first + error.column]
            self._progress.at_env(env_rank)
            raise error.naming(env_rank) from error.__cause__

    # ---- resetting and calling -----------------------------------------------------------------

    def _reset(self, order: ResetOrder) -> None:
        for i in self._wanted():
            self._progress.words[Progress.ENV_RANK] = self._plan.env_ranks[i]
            observation, info = self._reset_one(i, order.seeds[self._plan.columns[i]], order.options)
            self._reward[i], self._terminated[i], self._truncated[i] = 0.0, False, False
            self._keep(i, "info", info)
            self._write(self._writer, self._single[i], [observation], i)
            self._answer([i])

    def _reset_one(self, i: int, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, Any]:
        self._next[i] = _Next.STEP
        env_rank = self._plan.env_ranks[i]
        if i in self._unseeded:
            self._unseeded.remove(i)
            seed = self._replacement_seed(i) if seed is None else seed
        began = self._progress.enter(Phase.RESETTING)
        returned = self._envs[i].reset(seed=seed, options=options)
        self._progress.add_resetting_since(began)
        self._progress.enter(Phase.STEPPING)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise SpaceError(
                f"env.reset of env_rank {env_rank} must return a tuple (observation, info), got {brief(returned)}"
            )
        require_info(returned[1], env_rank, "reset")
        return returned

    def _replacement_seed(self, i: int) -> int | None:
        """Of the first reset of an environment in a dead one's place: not that one's seed, but as reproducible."""
        seed = int(self._rows.seed[i])
        return None if seed < 0 else int(np.random.SeedSequence([seed, self._plan.generation]).generate_state(1)[0])

    def _call(self, call: EnvCall) -> None:
        self._progress.enter(Phase.CALLING)
        frames = perform(call, self._envs, self._plan.columns, self._plan.env_ranks)
        self._station.frames.put(frames)
        self._progress.trajectories = len(frames)


def _pickled_info(info: Mapping[str, Any], env_rank: int) -> bytes:
    """Raises `SpaceError` naming the entry that cannot be pickled."""
    try:
        return pickle.dumps(dict(info), pickle.HIGHEST_PROTOCOL)
    except Exception:  # a class or function defined in the user's script goes by value; the rest is named
        for key, value in info.items():
            try:
                cloudpickle.dumps(value)
            except Exception as error:
                raise SpaceError(
                    f"info[{key!r}] of env_rank {env_rank} cannot be pickled for the main process: {error}. Leave it "
                    "out, or turn it into numbers, text or arrays"
                ) from error
        return bytes(cloudpickle.dumps(dict(info)))
