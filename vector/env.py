"""ShmVectorEnv: a Gymnasium vector environment whose environments run in worker processes, over shared memory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from penstock.arguments import integer, seconds, true_or_false
from penstock.envs.calls import EnvCall
from penstock.envs.examples import checked_spaces, example_of
from penstock.envs.factory import EnvFactory, build_example_env, close_example_env
from penstock.envs.seats import SeatTable
from penstock.envs.seeding import ColumnStreams, EpisodePlan, Purpose, fresh_seed, require_plan
from penstock.errors import ConfigError, SamplerStateError
from penstock.vector.exchange import Ids
from penstock.vector.step_program import ResetMessage, VectorProgram
from penstock.vector.vector_arguments import (
    EnvFns,
    ModeName,
    Options,
    SharedSpaces,
    as_batch_mode,
    as_factories,
    as_mode,
    as_one_dict,
    as_options,
    as_plan_seeds,
    as_plans,
    as_seeds,
    as_timeout,
    check_async_arguments,
    env_ids_within,
    read_seats,
    refuse_seats,
    refuse_unknown,
    split_mask,
)
from penstock.vector.vector_infos import Infos
from penstock.vector.vector_pool import State, VectorGuard, VectorPool
from penstock.workers import tracing
from penstock.workers.call_guard import GuardedCall
from penstock.workers.claims import CpuClaims
from penstock.workers.failures import Restart
from penstock.workers.launcher import naming_descriptor_limit
from penstock.workers.marking import marked
from penstock.workers.plan import Affinity, OnWorkerFailure, StartMethod

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

_T = TypeVar("_T")
Step = tuple[Any, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], _T]  # with infos of type T
_Batched = dict[str, Any]
Seeds = int | Sequence[int | None] | None


class ShmVectorEnv(VectorEnv[Any, Any, Any]):
    """`len(env_fns)` environments in worker processes, with Gymnasium's `VectorEnv` interface.

    Observations, rewards, flags and actions lie in shared memory. A step pickles only infos that are not empty, and
    parts of spaces without a fixed shape (Text, Sequence, Graph, OneOf, custom spaces). A final observation whose type
    the shared memory cannot keep is pickled too. A worker that raises, dies or hangs ends the call at once, with the
    samplers' errors.

    Args:
        env_fns: callables that return a `gymnasium.Env`, or environment ids, one for each environment. Lambdas and
            closures are fine. The first is called once more in the main process, to read the spaces. If they return a
            PettingZoo `ParallelEnv`, each agent is a sub-environment; then every different one is called once more.
            With `num_envs`: one callable or id that stands for batched environments.
        in_series: how many environments a process steps, one after the other; None is 1. With `n` environments there
            are `n / in_series` processes, rounded up. Their numbers of environments differ by at most one.
        n_workers: the number of processes; give this or `in_series`, not both. With `num_envs` and neither of them,
            there are as many as the CPUs can run.
        context: "forkserver", "spawn" or "fork". None is "forkserver", on macOS "spawn".
        autoreset_mode: what happens when an episode ends, a `gymnasium.vector.AutoresetMode` or its name. None is
            "NEXT_STEP"; with several agents it is "SAME_STEP", and nothing else is allowed. Batched environments
            have their own mode.
        num_envs: the number of rows of batched environments. Each worker calls `env_fns(num_envs=k)` for its k rows,
            which returns a `gymnasium.vector.VectorEnv`, and steps all of them by one call. An id stands for what
            `gymnasium.make_vec` builds from its `vector_entry_point`.
        rows_per_env: how many rows of a batched environment belong together; no worker gets a part of them. The
            example environment in the main process has so many.
        copy: return copies. Otherwise observations are views of the shared memory, which the next step overwrites.
        shared_memory, daemon, observation_mode: exist because `AsyncVectorEnv` has them. Only their defaults are
            allowed.
        spaces: `(observation_space, action_space)` of the environments. Then none is built in the main process to read
            them. `spec` and `render_mode` are None then, and `metadata` has little more than the autoreset mode.
        affinity, step_timeout, start_timeout, close_timeout, max_restarts, restart_window: as in the samplers; see
            `ParallelSampler`, and `affinity` of its `initialize`.
        on_worker_failure: "raise" breaks the vector environment when a worker raises, dies or hangs. "restart"
            replaces the worker. The next step of each of its environments is then `truncated`, with the last
            observation (under SAME_STEP: as `final_obs`) and `worker_restarted` in its info.
        check_finite: raise a `SpaceError` that names the field and the environment if a reward or a floating-point
            array of the observation has NaN or inf. Parts without a fixed shape are not checked. The results of that
            step are lost; the next call works.
        flatten_wrappers: step the wrappers that `gym.make` adds without their Python functions, with the same results.
            False: call the `step` of the outermost wrapper in any case.
        episode_plan: `episode_plan(i, episode, rng)` returns the options of the reset that begins this episode of
            environment i, automatic or not: a dict or None. Its seed depends on the seed of `reset`, i and `episode`,
            so that the episodes are those of a sampler with the same seed and plan. `reset(seed=)`, one integer, begins
            with episode 0 again; without a seed, the next episodes begin. Not for batched environments.

    If environments differ in speed, use `send` and `recv` instead of `step`: `send(actions, env_ids)` starts a step of
    some of them, and `recv(min_ready)` waits for the first that have finished.

    With batched environments, `reset` gives each row its seed. An environment that takes only one number gets the seed
    of its first row. `infos` are as the environment gives them. `env_ids` of `send` must have all rows of a worker or
    none. Options are one dict. Calls are for whole batched environments: `call` returns one result for each worker.

    With several agents, `num_envs` is the number of all agents, and `seats` lists environment and agent of each row.
    Seeds, `reset_mask`, `env_ids` and calls are for whole environments. `infos` always have `valid`, whether the action
    of this step was taken, `alive`, whether the next one will be, and `late_reward`, rewards for agents that had ended.

    Raises `ConfigError` for arguments that cannot work, and a `SamplerBrokenError` if a worker fails to start. Raises
    `SpaceError` if two keys of a Dict space have the same text, such as 1 and "1".
    """

    def __init__(
        self,
        env_fns: EnvFns,
        in_series: int | None = None,
        n_workers: int | None = None,
        context: StartMethod | None = None,
        autoreset_mode: ModeName | AutoresetMode | None = None,
        copy: bool = True,
        *,
        num_envs: int | None = None,
        rows_per_env: int = 1,
        shared_memory: bool = True,
        daemon: bool = True,
        observation_mode: Literal["same"] = "same",
        spaces: tuple[gym.Space[Any], gym.Space[Any]] | None = None,
        affinity: Affinity | Sequence[int | Sequence[int]] | None = None,
        step_timeout: float | None = None,
        start_timeout: float = 120.0,
        close_timeout: float = 10.0,
        on_worker_failure: OnWorkerFailure = "raise",
        max_restarts: int = 3,
        restart_window: float = 60.0,
        check_finite: bool = False,
        flatten_wrappers: bool = True,
        episode_plan: EpisodePlan | None = None,
        **unknown: NoReturn,  # type checkers refuse every unknown argument, since no value has this type
    ) -> None:
        self._guard = VectorGuard()
        refuse_unknown(ShmVectorEnv, unknown)
        check_async_arguments(shared_memory, daemon, observation_mode)
        factories, unit = as_factories(env_fns, num_envs, rows_per_env)
        self._is_batched, self._n_envs = unit > 0, int(num_envs or len(factories))
        self.copy = true_or_false("copy", copy)
        check_finite = true_or_false("check_finite", check_finite)
        options = as_options(
            context,
            step_timeout=step_timeout,
            start_timeout=start_timeout,
            close_timeout=close_timeout,
            on_worker_failure=on_worker_failure,
            max_restarts=max_restarts,
            restart_window=restart_window,
        )
        with marked:
            seats = self._read_spaces(factories, checked_spaces("spaces", spaces), autoreset_mode, unit)
        if seats is None:
            factories = tuple(replace(factory, as_seats=refuse_seats) for factory in factories)
        program = VectorProgram(
            build_seeds=ColumnStreams(fresh_seed(), range(self._n_envs)).env_seeds(Purpose.TRAIN),
            observation_space=self.single_observation_space,
            action_space=self.single_action_space,
            autoreset_mode=self.autoreset_mode,
            flatten_wrappers=true_or_false("flatten_wrappers", flatten_wrappers),
            may_be_replaced=options.max_restarts > 0,
            seats=seats,
            is_batched=self._is_batched,
            episode_plan=require_plan("episode_plan", episode_plan),
        )
        self.has_plan = episode_plan is not None
        if self.has_plan and self._is_batched:
            raise ConfigError("episode_plan is not for num_envs: a batched environment resets its rows itself")
        self._ended = np.zeros(self._n_envs, np.bool_)
        with GuardedCall(self._guard, "ShmVectorEnv", State.NEW), naming_descriptor_limit(), ExitStack() as resources:
            claims = CpuClaims()
            resources.callback(claims.close)
            plans = as_plans(self._n_envs, in_series, n_workers, affinity, claims, unit)
            worker_data = [factories if self._is_batched else [factories[i] for i in plan.columns] for plan in plans]
            # How many environments calls go to; each of several agents is one, and each batched one.
            self._n_called = len(plans) if self._is_batched else self._n_envs
            #: The environment of each row, by its index in the results of `call`.
            self.env_of_rows = [i for i, _ in self.seats or enumerate(range(self._n_envs))]
            if self._is_batched:
                self.env_of_rows = [plan.worker_rank for plan in plans for _ in plan.columns]
            self._workers = VectorPool(plans, program, worker_data, options, resources, check_finite=check_finite)
            self._exchange = self._workers.exchange
            self._guard.start(self, self._workers)

    def _read_spaces(
        self,
        factories: Sequence[EnvFactory],
        spaces: tuple[gym.Space[Any], gym.Space[Any]] | None,
        autoreset_mode: ModeName | AutoresetMode | None,
        n_rows: int,
    ) -> SeatTable | None:
        """Read spaces, metadata and spec from an example environment; with `n_rows`, from a batched one. Returns who
        sits where if it has several agents, else None."""
        env = build_example_env(factories[0].as_example(spaces), batched=n_rows)
        has_seats = isinstance(env, SharedSpaces)
        try:
            if n_rows:
                built_mode = env.metadata.get("autoreset_mode") if spaces is None else None
                self.autoreset_mode = as_batch_mode(autoreset_mode, built_mode)
                single_spaces = env.single_observation_space, env.single_action_space
                for name, space in zip(("observation", "action"), single_spaces, strict=True):
                    example_of(space, name)  # raises an error if it has parts without a fixed shape
            else:
                self.autoreset_mode = as_mode(autoreset_mode, has_seats=has_seats)
                single_spaces = env.observation_space, env.action_space
            self.single_observation_space, self.single_action_space = single_spaces
            self.metadata = {**env.metadata, "autoreset_mode": self.autoreset_mode}
            self.spec, self.render_mode = env.spec, env.render_mode
        finally:
            close_example_env(env)
        seats = read_seats(factories, env) if has_seats else None
        self.seats = None if seats is None else [(e, agent) for e, _, agent in seats.seats(0, range(self._n_envs))]
        self.num_envs = self._n_envs if self.seats is None else len(self.seats)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        return seats

    # ---- Gymnasium's interface -------------------------------------------------------------

    def reset(self, *, seed: Seeds = None, options: Options | list[Options] = None) -> tuple[Any, dict[str, Any]]:
        """Reset all environments in parallel; `options["reset_mask"]`, a bool array `[n]`, selects some.

        This first waits for steps that are still running. Results of environments that are reset are dropped.

        Args:
            seed: environment i gets `seed + i`, or the i-th of a list.
            options: given to every environment that is reset, without `reset_mask`; or a list with the options of each.
                A batched environment gets one dict, with its own part of `reset_mask`.

        Returns observations `[n, ...]` and batched infos.
        """
        observations, infos = self._reset_unbatched(seed, options)
        return observations, self._exchange.batched(infos)

    def _reset_listed(
        self, seed: Seeds, options: Options | list[Options], env_ids: Ids | None = None
    ) -> tuple[Any, Infos]:
        """As `reset`, with the infos unbatched: pairs (index, info) of the environments that had any. With `env_ids`,
        only these are reset."""
        observations, infos = self._reset_unbatched(seed, options, env_ids)
        return observations, self._exchange.listed(infos)

    def _reset_unbatched(
        self, seed: Seeds, options: Options | list[Options], env_ids: Ids | None = None
    ) -> tuple[Any, Infos]:
        with GuardedCall(self._guard, "reset", State.NEW, State.READY, State.STEPPING, State.RESETTING, State.SENT):
            prepared = self._prepared_reset(seed, options, env_ids)
            if self._guard.state is State.RESETTING:
                self._workers.wait_steps()
                self._guard.state = self._state_before_reset
            return self._workers.reset(*prepared, self._take_reset)

    def reset_async(self, seed: Seeds = None, options: Options | list[Options] = None) -> None:
        """Start a reset as `reset` does, and return; `reset_wait` returns its results. This first waits for running
        steps."""
        with GuardedCall(self._guard, "reset_async", State.NEW, State.READY, State.SENT):
            self._workers.begin_reset(*self._prepared_reset(seed, options))
            self._state_before_reset, self._guard.state = self._guard.state, State.RESETTING

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the reset that `reset_async` began; returns as `reset` does.

        Raises `WaitTimeoutError` after `timeout` seconds. The reset continues; `reset_wait` may be called again.
        """
        with GuardedCall(self._guard, "reset_wait", State.RESETTING):
            self._wait(timeout, "reset_wait")
            self._guard.state = self._state_before_reset
            observations, infos = self._take_reset()
        return observations, self._exchange.batched(infos)

    def _prepared_reset(
        self, seed: Seeds, options: Options | list[Options], env_ids: Ids | None = None
    ) -> tuple[bytes, list[int | None], Ids]:
        seeds = as_plan_seeds(seed, options, self._n_envs) if self.has_plan else as_seeds(seed, self._n_envs)
        which, env_options = split_mask(options, self._n_envs)
        which = which if env_ids is None else env_ids
        if self._is_batched:
            env_options = [as_one_dict(env_options)] * self._n_envs
            if len(busy := self._exchange.outstanding_of(self._exchange.together_with(which))):
                raise SamplerStateError(
                    f"reset: environments {busy.tolist()} have not been received yet, and one call steps them together "
                    f"with environments {which.tolist()}: receive them first"
                )
        message = ResetMessage(seeds, env_options).dumps()
        self._ended[which] = False  # now: an interrupted reset is completed by the workers
        self._reset_ids = which
        return message, seeds, which

    def _take_reset(self) -> tuple[Any, Infos]:
        try:
            infos = self._workers.take(self._reset_ids)
        finally:  # even if an info cannot be unpickled
            if self._guard.state is State.NEW or not len(self._exchange.outstanding):
                self._guard.state = State.READY
        return self._observations(), infos

    def step(self, actions: Any) -> Step[_Batched]:
        """Step all environments with `actions`, batched as `action_space` is.

        Returns observations `[n, ...]`, rewards, terminations and truncations `[n]`, and batched infos.
        """
        with GuardedCall(self._guard, "step", State.READY):
            self._begin_step(actions)
            self._workers.wait_steps()
            *results, infos = self._take_step()
        return (*results, self._exchange.batched(infos))

    def step_async(self, actions: Any) -> None:
        """Start a step of all environments and return; `step_wait` returns its results."""
        with GuardedCall(self._guard, "step_async", State.READY):
            self._begin_step(actions)

    def step_wait(self, timeout: float | None = None) -> Step[_Batched]:
        """Wait for the step that `step_async` began; returns as `step` does.

        Raises `WaitTimeoutError` after `timeout` seconds. The step continues; `step_wait` may be called again.
        """
        with GuardedCall(self._guard, "step_wait", State.STEPPING):
            self._wait(timeout, "step_wait")
            *results, infos = self._take_step()
        return (*results, self._exchange.batched(infos))

    def _begin_step(self, actions: object) -> None:
        if self.autoreset_mode is AutoresetMode.DISABLED:
            self._require_running(self._exchange.all)
        self._workers.step(actions)
        self._guard.state = State.STEPPING

    def _take_step(self) -> Step[Infos]:
        exchange = self._exchange
        reward, terminated, truncated = exchange.reward.copy(), exchange.terminated.copy(), exchange.truncated.copy()
        if self.autoreset_mode is AutoresetMode.DISABLED:
            np.logical_or(terminated, truncated, out=self._ended)
        self._guard.state = State.READY  # even if an info cannot be unpickled
        infos = self._workers.take(exchange.all)
        return self._observations(), reward, terminated, truncated, infos

    def _wait(self, timeout: float | None, name: str) -> None:
        if timeout is None:
            self._workers.wait_steps()
        else:
            self._workers.wait_at_most(as_timeout(timeout), name)

    def step_wait_listed(self, timeout: float | None = None) -> Step[Infos]:
        """As `step_wait`, with the infos unbatched: pairs (index, info) of the environments that had any, with
        `final_obs` and `final_info` where an episode ended and the environment was reset at once."""
        with GuardedCall(self._guard, "step_wait", State.STEPPING):
            self._wait(timeout, "step_wait")
            *results, infos = self._take_step()
            return (*results, self._exchange.listed(infos))

    def listed_states(self) -> list[dict[str, Any]]:
        """Of environments of several agents, `valid`, `alive` and `late_reward` of each row after the last step; of
        others nothing."""
        states = {name: values.tolist() for name, values in self._exchange.states().items() if name[0] != "_"}
        return [dict(zip(states, row, strict=True)) for row in zip(*states.values(), strict=True)]

    def to_sb3(self, reward_dtype: type[np.floating[Any]] = np.float32) -> Any:
        """The same environments as a Stable-Baselines3 `VecEnv`, `Sb3VecEnv`; needs `autoreset_mode="SAME_STEP"`.

        Raises `ConfigError` in another mode, and where Stable-Baselines3 is not installed.
        """
        self.check_fit_for_sb3()
        try:
            from penstock.vector.sb3 import Sb3VecEnv
        except ImportError as error:
            raise ConfigError(f"to_sb3 needs Stable-Baselines3: pip install '.[sb3]' ({error})") from error
        return Sb3VecEnv.around(self, reward_dtype)

    def to_tianshou(self) -> Any:
        """The same environments as a `TianshouVectorEnv`, for tianshou's `Collector`. Needs the mode "DISABLED".

        Raises `ConfigError` in another `autoreset_mode`, with `copy=False`, and for environments of several agents.
        """
        from penstock.vector.tianshou import TianshouVectorEnv

        return TianshouVectorEnv(self)

    def check_fit_for_sb3(self) -> None:
        """Raise `ConfigError` unless Stable-Baselines3 can work with these arguments."""
        if not self.copy:
            raise ConfigError("Stable-Baselines3 keeps observations while it steps: construct with copy=True")
        if self.autoreset_mode is not AutoresetMode.SAME_STEP:
            raise ConfigError(
                "Stable-Baselines3 expects environments to be reset in the step that ends an episode: construct with "
                'autoreset_mode="SAME_STEP"'
            )

    def allow_step_before_reset(self) -> None:
        """Leave it to the environments whether `reset` must come first, as Stable-Baselines3 does."""
        if self._guard.state is State.NEW and self.seats is None:
            self._guard.state = State.READY

    # ---- traces ----------------------------------------------------------------------------

    def trace(
        self, path: str | os.PathLike[str], *, profile: torch.profiler.profile | str | os.PathLike[str] | None = None
    ) -> Path:
        """As `Sampler.trace`: write what the workers have done in the last 512 steps, resets and calls."""
        return tracing.write(path, self._workers.recorded(), profile)

    def mark(self, name: str) -> AbstractContextManager[None]:
        """As `Sampler.mark`."""
        self._guard.check_alive("mark")
        return tracing.mark(self._workers.control, name)

    # ---- send and recv ---------------------------------------------------------------------

    def send(self, actions: Any, env_ids: Sequence[int] | Ids | None = None) -> None:
        """Start a step of the environments `env_ids` (None: all) with `actions` `[k, ...]`, and return.

        Raises `SamplerStateError` if one is still stepping, or if its last result has not been received.
        """
        with GuardedCall(self._guard, "send", State.READY, State.SENT):
            which = self._exchange.all if env_ids is None else env_ids_within(env_ids, self._n_envs)
            self._workers.finish_interrupted()
            if len(busy := self._exchange.outstanding_of(which)):
                raise SamplerStateError(
                    f"send: environments {sorted(busy.tolist())} have not been received yet: call recv"
                )
            if self._is_batched and len(missing := self._exchange.together_with(which)):
                raise ConfigError(
                    f"send: one call steps environments {missing.tolist()} together with others in env_ids: add them"
                )
            if self.autoreset_mode is AutoresetMode.DISABLED:
                self._require_running(which)
            self._workers.step(actions, which)
            self._guard.state = State.SENT

    def recv(
        self, min_ready: int | None = None, *, max_wait: float | None = None, timeout: float | None = None
    ) -> Step[_Batched]:
        """Wait until `min_ready` of the environments with sent actions have finished their step, and return the results
        of all that have finished. If fewer environments have actions, wait for all of them. With `max_wait`, wait at
        most so many seconds after the first result is seen. By default `min_ready` is 1; with `max_wait`, all.

        With `timeout`, raises `WaitTimeoutError` after so many seconds without the results; 0 only looks. The steps
        continue, and `recv` may be called again. It does not go together with `max_wait`.

        Returns observations `[k, ...]`, rewards, terminations and truncations `[k]`, and infos batched for the `k`,
        with their indices in `infos["env_id"]`.
        """
        which, rows, results, infos = self._recv(min_ready, max_wait, timeout)
        ids = {"env_id": which} if self.seats is None else {"env_id": which, "seat_id": rows}
        return (*results, {**self._exchange.batched(infos, rows), **ids})

    def recv_listed(self, min_ready: int) -> Step[Infos]:
        """As `recv`, with the infos unbatched: pairs (index among all, info) of the environments that had any."""
        _, _, results, infos = self._recv(min_ready)
        return (*results, self._exchange.listed(infos))

    def _recv(
        self, min_ready: int | None, max_wait: float | None = None, timeout: float | None = None
    ) -> tuple[Ids, Ids, Any, Infos]:
        """The environments, their rows, their results, and the infos that they have sent."""
        with GuardedCall(self._guard, "recv", State.SENT):
            exchange = self._exchange
            self._workers.finish_interrupted()  # it may take some of the results
            n = len(exchange.outstanding)
            if min_ready is None:
                min_ready = 1 if max_wait is None else n
            wanted = min(integer("min_ready", min_ready, 1), n)
            if timeout is not None:
                if max_wait is not None:
                    raise ConfigError("recv takes max_wait or timeout, not both: leave one out")
                self._workers.wait_at_most(as_timeout(timeout), "recv", wanted)
            else:
                self._workers.wait_ready(wanted, None if max_wait is None else seconds("max_wait", max_wait))
            which = exchange.ready
            rows = exchange.rows_of(which)
            reward, terminated, truncated = (
                values[rows] for values in (exchange.reward, exchange.terminated, exchange.truncated)
            )
            if self.seats is None:
                self._ended[which] = terminated | truncated
            if len(which) == len(exchange.outstanding):
                self._guard.state = State.READY  # even if an info cannot be unpickled
            infos = self._workers.take(which)
            return which, rows, (exchange.observations(rows), reward, terminated, truncated), infos

    def _require_running(self, which: Ids) -> None:
        if self._ended[which].any():
            raise SamplerStateError(
                f"the episodes of environments {which[self._ended[which]].tolist()} have ended, and autoreset_mode is "
                "DISABLED: call reset(options={'reset_mask': mask}) first"
            )

    # ---- calls of methods and attributes ---------------------------------------------------

    def render(self) -> tuple[Any, ...] | None:
        """The frames of all environments; with several agents, for each row that of its environment."""
        frames = self._frames()
        return frames if self.seats is None else tuple(frames[e] for e, _ in self.seats)

    def render_tiled(self) -> npt.NDArray[np.uint8]:
        """One picture `[height, width, 3]` with the frames of all environments in a grid."""
        return tile(self._frames())

    def _frames(self) -> tuple[Any, ...]:
        frames = self._call(EnvCall("call", "render"))
        return tuple(frame for env_frames in frames for frame in env_frames or ()) if self._is_batched else frames

    def call(self, name: str, *args: object, **kwargs: object) -> tuple[Any, ...]:
        """What `env.name(*args, **kwargs)` returns in each environment, or `env.name` if it is not a method.

        This first waits for running steps. If an environment raises, this raises `EnvCallError`, and the environments
        stay usable.
        """
        return self._call(EnvCall("call_or_get", name, args=args, kwargs=kwargs))

    def call_some(self, env_ids: Sequence[int], name: str, *args: object, **kwargs: object) -> tuple[Any, ...]:
        """As `call`, in the environments `env_ids` only. The results are in ascending order of the index."""
        only = frozenset(env_ids_within(env_ids, self._n_called).tolist())
        return self._call(EnvCall("call_or_get", name, args=args, kwargs=kwargs, only=only))

    def apply(self, function: Callable[[gym.Env[Any, Any]], Any]) -> tuple[Any, ...]:
        """What `function(env)` returns for each environment, in its worker."""
        if not callable(function):
            raise ConfigError(f"apply needs a function of an environment, got {function!r}")
        return self._call(EnvCall("apply", getattr(function, "__name__", "function"), args=(function,)))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """The attribute `name` of each environment."""
        return self._call(EnvCall("get_attr", name))

    def set_attr(self, name: str, values: Any) -> None:
        """Set the attribute `name` of each environment. `values` is a list or tuple of `n` values, or one value for
        all."""
        given = values if isinstance(values, list | tuple) else [values] * self._n_called
        if len(given) != self._n_called:
            raise ConfigError(f"set_attr needs one value, or {self._n_called} of them in a list, got {len(given)}")
        self._call(EnvCall("set_attr", name, values=given))

    def broadcast(self, parameters: Mapping[str, Any], env_ids: Sequence[int] | None = None) -> None:
        """Set attributes of all environments, or of `env_ids`, between two steps; for example for a curriculum.

        Returns when every environment has all of them. Raises `EnvCallError` if one raises.
        """
        if not isinstance(parameters, Mapping):
            raise ConfigError(f"broadcast needs a dict of attributes and values, got {parameters!r}")
        only = None if env_ids is None else frozenset(env_ids_within(env_ids, self._n_called).tolist())
        for name, value in parameters.items():
            self._call(EnvCall("set_attr", name, values=[value] * self._n_called, only=only))

    @property
    def np_random_seed(self) -> tuple[Any, ...]:  # type: ignore[override]
        """The seeds of the environments' random generators."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[Any, ...]:  # type: ignore[override]
        """Copies of the environments' random generators."""
        return self.get_attr("np_random")

    # ---- the workers -----------------------------------------------------------------------

    def _call(self, call: EnvCall) -> tuple[Any, ...]:
        with GuardedCall(self._guard, call.verb_in_errors, State.NEW, State.READY, State.SENT):
            return self._workers.call(call)

    def _observations(self) -> Any:
        return self._exchange.observations(copy=self.copy)

    @property
    def n_restarts(self) -> int:
        """How many workers have been replaced."""
        return self._workers.restarts.total

    @property
    def restarts(self) -> Sequence[Restart]:
        """The replacements of workers so far: when, what had happened, and which environment was stepping."""
        return self._workers.restarts.history

    def close_extras(self, **kwargs: object) -> None:
        """End the workers. It takes at most about 2.5 s, and longer only while environments close (`close_timeout`;
        Ctrl-C ends the wait). It raises no error. A worker that must be killed is named in a `RuntimeWarning`."""
        self._guard.close()

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the workers, by rank, without those that have ended."""
        return self._workers.pids

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def tile(frames: Sequence[Any]) -> npt.NDArray[np.uint8]:
    """One picture with all `frames`, each `[height, width, channels]`, in a grid that is filled row by row.

    The grid is as square as possible, and unused places are black. Raises `ConfigError` unless all frames are pictures
    of the same size.
    """
    pictures = [frame for frame in frames if isinstance(frame, np.ndarray) and frame.ndim == 3]
    if len(pictures) != len(frames) or len({picture.shape for picture in pictures}) != 1:
        raise ConfigError(
            "render_tiled needs one picture [height, width, channels] of the same size from each environment: build "
            'the environments with render_mode="rgb_array"'
        )
    n_columns = math.ceil(math.sqrt(len(pictures)))
    n_rows = math.ceil(len(pictures) / n_columns)
    height, width, channels = pictures[0].shape
    grid = np.zeros((n_rows * n_columns, height, width, channels), pictures[0].dtype)
    grid[: len(pictures)] = pictures
    grid = grid.reshape(n_rows, n_columns, height, width, channels).swapaxes(1, 2)
    tiled: npt.NDArray[np.uint8] = grid.reshape(n_rows * height, n_columns * width, channels)
    return tiled
