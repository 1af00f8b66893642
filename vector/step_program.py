"""What a worker of a vector environment runs: it steps and resets its environments and writes the results into rows."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from penstock.buffers.object_pipe import MessageKind, ObjectMessage
from penstock.buffers.ordering import fence
from penstock.buffers.reports import in_one_line
from penstock.columns.builder import EnvBuilder
from penstock.columns.interface import Returned
from penstock.columns.stepping import WATCH_UNUSUAL, step_ordinary
from penstock.envs.calls import EnvCall, perform, pickled
from penstock.envs.checks import StepValues, checked_reset, checked_step, reset_with
from penstock.envs.direct_steps import cells_of, flat_step_of, step_into_of, with_observation
from penstock.envs.factory import EnvContext, EnvFactory
from penstock.envs.rows import ColumnError, action_splitter, arrays_like, write_cell, write_row
from penstock.envs.seeding import Purpose, seed_generators
from penstock.errors import ConfigError, SpaceError
from penstock.vector.objects import ObjectParts, shared_part
from penstock.vector.step_memory import VectorMemory, copy_rows
from penstock.workers.control import Command, Phase, Progress
from penstock.workers.program import WorkerContext

RESTARTED = "worker_restarted"  #: in the info of a step that a worker's replacement truncated


@dataclass(frozen=True)
class ResetMessage:
    """Reset the environments that have a request."""

    seeds: Sequence[int | None]  #: of all environments
    options: Sequence[dict[str, Any] | None]  #: of all environments; one dict or None for each

    def dumps(self) -> bytes:
        """The message, pickled. Raises `ConfigError` if that is impossible."""
        return pickled(self, "the options of reset")


@dataclass
class VectorProgram:
    """The `WorkerProgram` of vector environments. The data of a worker is the list of its environments' factories."""

    build_seeds: Sequence[int]  #: `[n]`, for factories that want an `EnvContext`
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    autoreset_mode: AutoresetMode
    flatten_wrappers: bool
    may_be_replaced: bool  #: whether a worker that dies is replaced

    data_name = "env_fns"

    def pickled_parts(self) -> dict[str, Any]:
        """The data that is an argument of the user, by the name of the argument."""
        return {"autoreset_mode": self.autoreset_mode}

    def build(self, context: WorkerContext) -> None:
        """Build this worker's environments."""
        memory: VectorMemory = context.memory
        plan, self._progress = context.plan, context.progress
        self._context, self._plan, self._mailbox = context, plan, memory.mailbox
        known = int(memory.rows.arrays.seed[plan.columns.start])  # of the last reset, before a replacement
        seeds = known if known >= 0 else self.build_seeds[0], plan.worker_rank, plan.generation
        self._builder = EnvBuilder(self._progress, self.observation_space, self.action_space, seeds)
        self._envs = self._build_envs(context.data)
        rows = memory.rows.arrays
        self._rows = own = rows[plan.columns.start : plan.columns.stop]
        self._one_by_one = memoryview(rows.one_by_one)
        # Items of memoryviews are Python integers and cost a third of numpy's.
        self._requested, self._replied = memoryview(own.requested), memoryview(own.replied)
        self._info_seq = memoryview(own.info_seq)
        self._infos: dict[int, dict[str, Any]] = {}  # pickled infos of the current requests
        # Of a worker before this one, which has failed: environments that were not reset since.
        self._unseeded = set(range(len(plan.columns))) if plan.generation > 0 else set[int]()
        self._bind(memory)

    def _build_envs(self, factories: Sequence[EnvFactory]) -> list[Any]:
        plan = self._plan
        envs = [
            self._builder.build(factory, EnvContext(i, plan.worker_rank, self.build_seeds[i], Purpose.TRAIN))
            for factory, i in zip(factories, plan.columns, strict=True)
        ]
        if len({id(env.unwrapped) for env in envs}) < len(envs):
            raise ConfigError(
                f"two of the env_fns of env_rank {plan.env_ranks.start} to {plan.env_ranks.stop - 1} return the same "
                "environment: each must build its own"
            )
        return envs

    def _bind(self, memory: VectorMemory) -> None:
        """What the steps of single environments need."""
        own, space = self._rows, self.observation_space
        self._split = action_splitter(shared_part(self.action_space))
        self._objects = memory.objects
        self._observation_parts = ObjectParts(self.observation_space)
        self._action_parts = ObjectParts(self.action_space)
        self._action = own.action
        self._reward, self._terminated, self._truncated = own.reward, own.terminated, own.truncated
        self._observation = arrays_like(space, own.observation[np.newaxis])
        self._final = arrays_like(space, own.final_observation[np.newaxis])
        self._last = arrays_like(space, own.observation)
        # One entry for each environment: the result of its last step.
        self._observations: list[Any] = [None] * len(self._envs)
        self._rewards = [0.0] * len(self._envs)
        self._bind_methods()
        self._returned = Returned(sum(step_into is None for *_, step_into in self._own))
        if self._unseeded:  # each episode ends where the worker before this one left it
            self._bound[:] = [(i, env_rank, partial(self._truncate, i), None) for i, env_rank, _, _ in self._own]

    def _bind_methods(self) -> None:
        """The functions that step each environment."""
        step_of = flat_step_of if self.flatten_wrappers else attrgetter("step")
        # Parts without a fixed shape have no place to step into. A worker that may be replaced does not write there
        # during a step: if it dies in it, the place must still have the last observation.
        is_in_place = not (self._observation_parts or self.may_be_replaced)
        self._cells = cells_of(self._observation, 0, len(self._envs)) if is_in_place else None
        self._own: list[Any] = [
            (i, env_rank, step_of(env), step_into_of(env, env_rank) if is_in_place else None)
            for i, (env, env_rank) in enumerate(zip(self._envs, self._plan.env_ranks, strict=True))
        ]
        #: What the next step of each environment calls, as `step_ordinary` takes it: usually its own functions.
        self._bound = list(self._own)

    def idle(self) -> None:
        """There is nothing to do without a request."""

    def run(self, command: Command) -> None:
        """Step the environments that have a request, or do what the message in the mailbox says."""
        if command.has_message:
            message = pickle.loads(self._mailbox.read())
            if isinstance(message, ResetMessage):
                seeds = [message.seeds[self._plan.columns[i]] for i in self._with_request()]
                if given := [seed for seed in seeds if seed is not None]:
                    seed_generators(given[0], self._plan.worker_rank)
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
        self._advance(everyone, self._action)
        if self._returned.copies:
            self._returned.end_row()
        self._reward[:], observations = self._rewards, self._observations
        if self._observation_parts:
            observations = [self._send_objects(i, observation) for i, observation in enumerate(observations)]
        try:
            write_row(self._observation, 0, observations)
        except ColumnError as error:
            raise self._blame(error.column, error) from error.__cause__
        self._reply()

    def _step_one(self, i: int) -> None:
        self._advance(range(i, i + 1), self._action[i : i + 1])
        self._reward[i] = self._rewards[i]
        self._write_observation(i, self._observations[i])
        self._reply(i)

    def _advance(self, which: range, action_rows: object) -> None:
        """Step the environments `which`, or do what the autoreset mode says instead. Writes the flags."""
        actions = self._split(action_rows)
        if self._action_parts:
            actions = self._with_objects(which, actions)
        observations, rewards, cells, first = self._observations, self._rewards, self._cells, 0
        bound = self._bound if len(which) == len(self._bound) else self._bound[which.start : which.stop]
        if self._returned.copies and len(which) > 1:  # one alone is written at once
            bound = self._returned.steps(bound)
        self._terminated[which.start : which.stop] = self._truncated[which.start : which.stop] = False
        # step_ordinary returns at each step that needs a check, ends an episode or has an info.
        while stop := step_ordinary(
            self._progress.loop_words, bound, actions, cells, first, WATCH_UNUSUAL, observations, rewards, None
        ):
            first, result = stop
            i, env_rank, _, step_into = bound[first]
            if cells is not None and step_into is not None:
                result = with_observation(cells[i], result, env_rank)
            observation, reward, terminated, truncated, info = checked_step(result, env_rank)
            if terminated or truncated:
                self._terminated[i], self._truncated[i] = terminated, truncated
                observation, info = self._end_episode(i, observation, info)
            self._record_info(i, "info", info)
            observations[i], rewards[i] = observation, reward
            first += 1

    def _record_info(self, i: int, kind: str, info: Any) -> None:
        """Pickle `info` for the main process now: environments may use the same dict again."""
        if info:
            self._infos.setdefault(i, {})[kind] = _pickled_info(info, self._plan.env_ranks[i])

    def _end_episode(self, i: int, observation: object, info: object) -> tuple[Any, Any]:
        """An episode has ended with `observation` and `info`; returns the observation and info of the step."""
        self._bound[i] = self._own[i]
        if self.autoreset_mode is AutoresetMode.NEXT_STEP:
            self._bound[i] = i, self._plan.env_ranks[i], partial(self._autoreset, i), None
        if self.autoreset_mode is not AutoresetMode.SAME_STEP:
            return observation, info
        self._write_final(i, observation)
        self._record_info(i, "final_info", info)
        return self._reset_one(i, None, None)

    def _autoreset(self, i: int, action: object) -> StepValues:
        """The step after the end of an episode."""
        observation, info = self._reset_one(i, None, None)
        self._record_info(i, "info", info)
        return observation, 0.0, False, False, {}

    def _truncate(self, i: int, action: object) -> StepValues:
        """The first step after a replacement."""
        return self._last_observation(i), 0.0, False, True, {RESTARTED: True}

    def _reply(self, only: int | None = None) -> None:
        """Announce the results of all environments, or of one."""
        if self._infos:
            requested, columns = self._requested, self._plan.columns
            self._context.put(
                [ObjectMessage(MessageKind.INFO, requested[i], columns[i], self._infos[i]) for i in sorted(self._infos)]
            )
            for i in self._infos:
                self._info_seq[i] = requested[i]
            self._infos.clear()
        fence()
        cells = slice(None) if only is None else slice(only, only + 1)
        self._replied[cells] = self._requested[cells]  # last: it announces the rest

    def _write_observation(self, i: int, observation: object) -> None:
        if self._observation_parts:
            observation = self._send_objects(i, observation)
        self._write(self._observation, i, observation)

    def _write_final(self, i: int, observation: object) -> None:
        """The last observation of an episode. It is pickled only if the arrays cannot keep its types."""
        arrays_only, objects = self._observation_parts.take_out(observation)
        self._write(self._final, i, arrays_only, "the final observation")
        if objects or not keeps_types(self._final, observation):
            self._record_info(i, "final_obs", {"final_obs": observation})

    def _last_observation(self, i: int) -> Any:
        """The observation that the worker before this one left."""
        observation = copy_rows(self._last, i)
        if not self._observation_parts:
            return observation
        assert self._objects is not None
        objects = self._objects.read_observation(self._plan.columns[i], self._requested[i] - 1)
        return self._observation_parts.put_in(observation, objects or self._observation_parts.defaults())

    def _send_objects(self, i: int, observation: object) -> Any:
        """Send the parts of an observation that have no fixed shape; returns it with placeholders."""
        assert self._objects is not None
        rest, objects = self._observation_parts.take_out(observation)
        try:
            self._objects.write_observation(self._plan.columns[i], self._requested[i], objects)
        except Exception as error:  # pickling runs the user's code, which may raise anything
            self._progress.at_env(self._plan.env_ranks[i])
            raise SpaceError(
                f"the observation of env_rank {self._plan.env_ranks[i]} cannot be sent to the main process: "
                f"{in_one_line(error)}"
            ) from error
        return rest

    def _with_objects(self, which: range, actions: Sequence[Any]) -> list[Any]:
        """The actions, with their parts that have no fixed shape."""
        assert self._objects is not None
        parts, read, columns = self._action_parts, self._objects.read_action, self._plan.columns
        return [parts.put_in(action, read(columns[i])) for i, action in zip(which, actions, strict=True)]

    def _write(self, arrays: object, i: int, value: object, name: str = "observation") -> None:
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
            self._reply(i)

    def _reset_one(self, i: int, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, Any]:
        self._bound[i] = self._own[i]
        env_rank = self._plan.env_ranks[i]
        seed = self._seed_of(i, seed)
        began = self._progress.enter(Phase.RESETTING)
        returned = reset_with(self._envs[i], seed, options)
        self._progress.add_resetting_since(began)
        observation, info = checked_reset(returned, env_rank)
        self._progress.enter(Phase.STEPPING)
        return self._returned.own(i, observation, is_reset=True), info

    def _seed_of(self, i: int, given: int | None) -> int | None:
        """The seed of this reset. After a replacement, the first has another than before, but a reproducible one."""
        if i in self._unseeded:
            self._unseeded.remove(i)
            if given is None and (seed := int(self._rows.seed[i])) >= 0:
                return int(np.random.SeedSequence([seed, self._plan.generation]).generate_state(1)[0])
        return given

    def _call(self, call: EnvCall, envs: Sequence[Any] | None = None) -> None:
        self._perform(call, envs or self._envs, self._plan.columns, self._plan.env_ranks)

    def _perform(self, call: EnvCall, envs: Sequence[Any], columns: range, env_ranks: range) -> None:
        self._progress.enter(Phase.CALLING)
        results = perform(call, envs, columns, env_ranks)
        self._context.put(results)
        self._progress.n_results = len(results)


def keeps_types(arrays: Any, value: object) -> bool:
    """Whether `value` has the same types after it is written into a cell of `arrays` `[1, n, ...]` and read again."""
    if isinstance(arrays, dict):
        return type(value) is dict and all(keeps_types(part, value[key]) for key, part in arrays.items())
    if isinstance(arrays, tuple):
        return type(value) is tuple and all(map(keeps_types, arrays, value))
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
                    f"info[{key!r}] of env_rank {env_rank} cannot be pickled for the main process: "
                    f"{in_one_line(error)}. Leave it out, or turn it into numbers, text or arrays"
                ) from error
        return bytes(cloudpickle.dumps(dict(info)))
