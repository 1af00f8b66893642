"""What a worker of a vector environment runs: it steps and resets its environments and writes the results into rows."""

from __future__ import annotations

import enum
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from penstock.buffers.ordering import fence
from penstock.buffers.results import MessageKind, ObjectMessage
from penstock.collectors.env_builder import EnvBuilder
from penstock.envs.calls import EnvCall, perform, pickled
from penstock.envs.checks import StepValues, episode_flags, require_info, require_number, step_values_error
from penstock.envs.factory import EnvContext
from penstock.envs.into import cells_of, step_into_of, with_observation
from penstock.envs.rows import ColumnError, action_splitter, arrays_like, write_cell, write_row
from penstock.envs.seeding import Purpose
from penstock.envs.wrappers import flattened
from penstock.errors import ConfigError, SpaceError, brief
from penstock.vector.memory import VectorMemory, copy_rows
from penstock.vector.objects import ObjectParts, shared_part
from penstock.workers.control import Command
from penstock.workers.program import WorkerContext
from penstock.workers.progress import Phase, Progress

RESTARTED = "worker_restarted"  #: in the info of a step that a worker's replacement truncated

_Result = tuple[Any, float, bool, bool]


@dataclass(frozen=True)
class ResetMessage:
    """Reset the environments that have a request."""

    seeds: Sequence[int | None]  #: of all environments
    options: Sequence[dict[str, Any] | None]  #: of all environments; one dict or None for each

    def dumps(self) -> bytes:
        """The message, pickled. Raises `ConfigError` if that is impossible."""
        return pickled(self, "the options of reset")


class _Next(enum.Enum):
    """What an environment does at its next step request."""

    STEP = enum.auto()
    RESET = enum.auto()  #: its episode has ended (AutoresetMode.NEXT_STEP)
    TRUNCATE = enum.auto()  #: its worker was replaced: the episode ends where that worker left it


@dataclass
class VectorProgram:
    """The `WorkerProgram` of vector environments. A worker's share is the list of its environments' factories."""

    build_seeds: Sequence[int]  #: `[n]`, for factories that want an `EnvContext`
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    autoreset_mode: AutoresetMode
    flatten_wrappers: bool
    may_be_replaced: bool  #: whether a worker that dies is replaced

    share_name = "env_fns"

    def pickled_parts(self) -> dict[str, Any]:
        """The data that is an argument of the user, by the name of the argument."""
        return {"autoreset_mode": self.autoreset_mode}

    def build(self, context: WorkerContext) -> None:
        """Build this worker's environments."""
        memory: VectorMemory = context.memory
        plan, self._progress = context.plan, context.progress
        self._context, self._plan, self._mailbox = context, plan, memory.mailbox
        self._builder = EnvBuilder(self._progress, self.observation_space, self.action_space)
        self._envs = [
            self._builder.build(factory, EnvContext(i, plan.worker_rank, self.build_seeds[i], Purpose.TRAIN))
            for factory, i in zip(context.share, plan.columns, strict=True)
        ]
        if len({id(env.unwrapped) for env in self._envs}) < len(self._envs):
            raise ConfigError(
                f"two of the env_fns of env_rank {plan.env_ranks.start} to {plan.env_ranks.stop - 1} return the same "
                "environment: each must build its own"
            )
        self._split = action_splitter(shared_part(self.action_space))
        self._objects = memory.objects
        self._observation_parts = ObjectParts(self.observation_space)
        self._action_parts = ObjectParts(self.action_space)
        rows, space = memory.rows.arrays, shared_part(self.observation_space)
        self._rows = own = rows[plan.columns.start : plan.columns.stop]
        self._one_by_one = memoryview(rows.one_by_one)
        self._action = own.action
        self._reward, self._terminated, self._truncated = own.reward, own.terminated, own.truncated
        # Items of memoryviews are Python integers and cost a third of numpy's.
        self._requested, self._replied = memoryview(own.requested), memoryview(own.replied)
        self._info_seq = memoryview(own.info_seq)
        self._observation = arrays_like(space, own.observation[np.newaxis])
        self._final = arrays_like(space, own.final_observation[np.newaxis])
        self._last = arrays_like(space, own.observation)
        self._bind_methods()
        is_replacement = plan.generation > 0
        self._next = [_Next.TRUNCATE if is_replacement else _Next.STEP] * len(self._envs)
        self._unseeded = set(range(len(self._envs))) if is_replacement else set()
        self._infos: dict[int, dict[str, Any]] = {}  # pickled infos of the current requests

    def _bind_methods(self) -> None:
        """The functions that step and reset each environment."""
        flat = [(flattened(env) if self.flatten_wrappers else None) or (env.step, env.reset) for env in self._envs]
        self._steps: list[Any] = [step for step, _ in flat]
        self._resets = [reset for _, reset in flat]
        # Parts without a fixed shape have no place to step into. A worker that may be replaced does not write there
        # during a step: if it dies in it, the place must still have the last observation.
        if self._observation_parts or self.may_be_replaced:
            return
        cells = cells_of(self._observation, 0, len(self._envs))
        for i, (env, env_rank) in enumerate(zip(self._envs, self._plan.env_ranks, strict=True)):
            if (step_into := step_into_of(env, env_rank)) is not None:
                self._steps[i] = partial(_step_into, step_into, cells[i], env_rank)

    def idle(self) -> None:
        """There is nothing to do without a request."""

    def run(self, command: Command) -> None:
        """Step the environments that have a request, or do what the message in the mailbox says."""
        if command.has_message:
            message = pickle.loads(self._mailbox.read())
            if isinstance(message, ResetMessage):
                self._reset(message)
            else:
                self._call(message)
            return
        requested = self._with_request()
        self._progress.enter(Phase.STEPPING)
        if len(requested) == len(self._envs) and not self._one_by_one[0]:
            self._step_all()
            return
        assert self._context.gate is not None
        for i in requested:
            self._step_one(i)
            self._context.gate.wake_main()

    def close(self) -> None:
        """Close every environment; the first exception is raised when all have been closed."""
        self._builder.close()

    # ---- stepping --------------------------------------------------------------------------

    def _with_request(self) -> list[int]:
        requested, replied = self._requested, self._replied
        return [i for i in range(len(requested)) if requested[i] != replied[i]]

    def _step_all(self) -> None:
        everyone = range(len(self._envs))
        actions = self._split(self._action)
        if self._action_parts:
            actions = self._with_objects(everyone, actions)
        observations, self._reward[:] = self._advance(everyone, actions)
        if self._observation_parts:
            observations = [self._send_objects(i, observation) for i, observation in enumerate(observations)]
        try:
            write_row(self._observation, 0, observations)
        except ColumnError as error:
            raise self._blame(error.column, error) from error.__cause__
        self._reply(everyone)

    def _step_one(self, i: int) -> None:
        own = range(i, i + 1)
        actions = self._split(self._action[i : i + 1])
        if self._action_parts:
            actions = self._with_objects(own, actions)
        observations, self._reward[i : i + 1] = self._advance(own, actions)
        self._write_observation(i, observations[0])
        self._reply([i])

    def _advance(self, which: range, actions: Sequence[Any]) -> tuple[list[Any], list[float]]:
        """Step the environments `which`, or do what the autoreset mode says instead. Writes the flags; returns
        observations and rewards."""
        words, env_rank_word, first = self._progress.words, Progress.ENV_RANK, self._plan.env_ranks.start
        steps, following, step = self._steps, self._next, _Next.STEP
        observations, rewards = [], []
        self._terminated[which.start : which.stop] = self._truncated[which.start : which.stop] = False
        try:
            for i, action in zip(which, actions, strict=True):
                words[env_rank_word] = first + i
                if following[i] is step:
                    observation, reward, terminated, truncated, info = steps[i](action)
                    is_ordinary = terminated is False and truncated is False and reward.__class__ is float
                    if not is_ordinary or info or info.__class__ is not dict:
                        result = self._checked(i, observation, reward, terminated, truncated, info)
                        observation, reward, self._terminated[i], self._truncated[i] = result
                else:
                    observation, reward, self._terminated[i], self._truncated[i] = self._start_episode(i)
                observations.append(observation)
                rewards.append(reward)
        except (TypeError, ValueError) as error:
            if (own := step_values_error(error, first + i)) is not None:
                raise own from error
            raise
        return observations, rewards

    def _checked(self, i: int, observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> _Result:
        """Check the result of a step that is not ordinary; end the episode if it says so, and record its info."""
        env_rank = self._plan.env_ranks[i]
        terminated, truncated = episode_flags(terminated, truncated, env_rank)
        reward = require_number(reward, env_rank)
        require_info(info, env_rank)
        if terminated or truncated:
            observation, info = self._end_episode(i, observation, info)
        self._record_info(i, "info", info)
        return observation, reward, terminated, truncated

    def _record_info(self, i: int, kind: str, info: Any) -> None:
        """Pickle `info` for the main process now: environments may use the same dict again."""
        if info:
            self._infos.setdefault(i, {})[kind] = _pickled_info(info, self._plan.env_ranks[i])

    def _end_episode(self, i: int, observation: Any, info: Any) -> tuple[Any, Any]:
        """An episode has ended with `observation` and `info`; returns the observation and info of the step."""
        if self.autoreset_mode is AutoresetMode.NEXT_STEP:
            self._next[i] = _Next.RESET
        if self.autoreset_mode is not AutoresetMode.SAME_STEP:
            return observation, info
        self._write_final(i, observation)
        self._record_info(i, "final_info", info)
        return self._reset_one(i, None, None)

    def _start_episode(self, i: int) -> _Result:
        """The step after an episode's end, or after a replacement."""
        if self._next[i] is _Next.RESET:
            observation, info = self._reset_one(i, None, None)
            self._record_info(i, "info", info)
            return observation, 0.0, False, False
        self._next[i] = _Next.STEP
        observation, info = self._end_episode(i, self._last_observation(i), {RESTARTED: True})
        self._record_info(i, "info", info)
        return observation, 0.0, False, True

    def _reply(self, which: Sequence[int]) -> None:
        if self._infos:
            requested, columns = self._requested, self._plan.columns
            self._context.put(
                [ObjectMessage(MessageKind.INFO, requested[i], columns[i], self._infos[i]) for i in sorted(self._infos)]
            )
            for i in self._infos:
                self._info_seq[i] = requested[i]
            self._infos.clear()
        fence()
        for i in which:
            self._replied[i] = self._requested[i]  # last: it announces the rest

    def _write_observation(self, i: int, observation: Any) -> None:
        if self._observation_parts:
            observation = self._send_objects(i, observation)
        self._write(self._observation, i, observation)

    def _write_final(self, i: int, observation: Any) -> None:
        """The last observation of an episode. It is pickled only if the arrays cannot keep its types."""
        arrays_only, objects = self._observation_parts.take_out(observation)
        self._write(self._final, i, arrays_only, "the final observation")
        if objects or not _keeps_types(self._final, observation):
            self._record_info(i, "final_obs", {"final_obs": observation})

    def _last_observation(self, i: int) -> Any:
        """The observation that the worker before this one left."""
        observation = copy_rows(self._last, i)
        if not self._observation_parts:
            return observation
        assert self._objects is not None
        objects = self._objects.read_observation(self._plan.columns[i], self._requested[i] - 1)
        return self._observation_parts.put_in(observation, objects or self._observation_parts.defaults())

    def _send_objects(self, i: int, observation: Any) -> Any:
        """Send the parts of an observation that have no fixed shape; returns it with placeholders."""
        assert self._objects is not None
        rest, objects = self._observation_parts.take_out(observation)
        try:
            self._objects.write_observation(self._plan.columns[i], self._requested[i], objects)
        except Exception as error:  # pickling runs the user's code, which may raise anything
            self._progress.at_env(self._plan.env_ranks[i])
            raise SpaceError(
                f"the observation of env_rank {self._plan.env_ranks[i]} cannot be sent to the main process: {error}"
            ) from error
        return rest

    def _with_objects(self, which: range, actions: Sequence[Any]) -> list[Any]:
        """The actions, with their parts that have no fixed shape."""
        assert self._objects is not None
        parts, read, columns = self._action_parts, self._objects.read_action, self._plan.columns
        return [parts.put_in(action, read(columns[i])) for i, action in zip(which, actions, strict=True)]

    def _write(self, arrays: Any, i: int, value: Any, name: str = "observation") -> None:
        try:
            write_cell(arrays, 0, i, value, name)
        except ColumnError as error:
            raise self._blame(i, error) from error.__cause__

    def _blame(self, i: int, error: ColumnError) -> SpaceError:
        env_rank = self._plan.env_ranks[i]
        self._progress.at_env(env_rank)
        return error.with_env_rank(env_rank)

    # ---- resetting and calling -------------------------------------------------------------

    def _reset(self, message: ResetMessage) -> None:
        for i in self._with_request():
            self._progress.words[Progress.ENV_RANK] = self._plan.env_ranks[i]
            column = self._plan.columns[i]
            observation, info = self._reset_one(i, message.seeds[column], message.options[column])
            self._progress.words[Progress.PHASE] = Progress.IS_RESETTING  # errors in what follows belong to the reset
            self._reward[i], self._terminated[i], self._truncated[i] = 0.0, False, False
            self._record_info(i, "info", info)
            self._write_observation(i, observation)
            self._reply([i])

    def _reset_one(self, i: int, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, Any]:
        self._next[i] = _Next.STEP
        env_rank = self._plan.env_ranks[i]
        if i in self._unseeded:
            self._unseeded.remove(i)
            seed = self._replacement_seed(i) if seed is None else seed
        began = self._progress.enter(Phase.RESETTING)
        returned = self._resets[i](seed=seed, options=options)
        self._progress.add_resetting_since(began)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise SpaceError(
                f"env.reset of env_rank {env_rank} must return a tuple (observation, info), got {brief(returned)}"
            )
        require_info(returned[1], env_rank, "reset")
        self._progress.enter(Phase.STEPPING)
        return returned

    def _replacement_seed(self, i: int) -> int | None:
        """The seed of the first reset after a replacement: another than before, but reproducible."""
        seed = int(self._rows.seed[i])
        return None if seed < 0 else int(np.random.SeedSequence([seed, self._plan.generation]).generate_state(1)[0])

    def _call(self, call: EnvCall) -> None:
        self._progress.enter(Phase.CALLING)
        results = perform(call, self._envs, self._plan.columns, self._plan.env_ranks)
        self._context.put(results)
        self._progress.n_results = len(results)


def _step_into(step_into: Callable[..., Any], cell: Any, env_rank: int, action: Any) -> StepValues:
    """`env.step(action)`, by `env.step_into`: the observation is written into `cell`, the place where it is sent."""
    return with_observation(cell, step_into(cell, action), env_rank)


def _keeps_types(arrays: Any, value: Any) -> bool:
    """Whether `value` has the same types after it is written into a cell of `arrays` `[1, n, ...]` and read again."""
    if isinstance(arrays, dict):
        return type(value) is dict and all(_keeps_types(part, value[key]) for key, part in arrays.items())
    if isinstance(arrays, tuple):
        return type(value) is tuple and all(map(_keeps_types, arrays, value))
    if arrays.ndim == 2:
        return type(value) is arrays.dtype.type
    return type(value) is np.ndarray and value.dtype == arrays.dtype


def _pickled_info(info: Mapping[str, Any], env_rank: int) -> bytes:
    """Raises `SpaceError` naming the entry that cannot be pickled."""
    try:
        return pickle.dumps(dict(info), pickle.HIGHEST_PROTOCOL)
    except Exception:  # a class or function of the user's script, which goes by value
        for key, value in info.items():
            try:
                cloudpickle.dumps(value)
            except Exception as error:
                raise SpaceError(
                    f"info[{key!r}] of env_rank {env_rank} cannot be pickled for the main process: {error}. Leave it "
                    "out, or turn it into numbers, text or arrays"
                ) from error
        return bytes(cloudpickle.dumps(dict(info)))
