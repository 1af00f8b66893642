"""ShmVectorEnv: Gymnasium's vector environment, with the environments in worker processes and shared memory between."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from penstock.envs.calls import EnvCall
from penstock.envs.factory import EnvFactory, build_example_env, close_example_env
from penstock.envs.seeding import ColumnStreams, Purpose, fresh_seed
from penstock.errors import ConfigError, SamplerBrokenError, SamplerStateError
from penstock.vector.arguments import (
    as_factories,
    as_mode,
    as_plans,
    as_rules,
    as_seeds,
    env_ids_within,
    split_mask,
)
from penstock.vector.exchange import Ids, batch_infos
from penstock.vector.memory import VectorMemory, taken
from penstock.vector.pool import VectorCrew
from penstock.vector.program import ResetOrder, VectorJob
from penstock.vector.tiling import tile
from penstock.workers.arguments import integer
from penstock.workers.call_guard import Calls, Lifetime
from penstock.workers.interrupts import interrupts
from penstock.workers.plan import Affinity

__all__ = ["ShmVectorEnv"]

_Self = TypeVar("_Self", bound="ShmVectorEnv")
_Step = tuple[Any, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[str, Any]]

_Infos = list[tuple[int, dict[str, Any]]]
_Listed = tuple[Any, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], _Infos]


class _State(enum.Enum):
    """Where a vector environment is in its life. The value names the calls that are expected next."""

    NEW = "reset"
    READY = "step, step_async, send or reset"
    STEPPING = "step_wait"
    SENT = "recv, send or reset"
    BROKEN = "close"
    CLOSED = "none"


_LIFETIME = Lifetime(
    first=_State.NEW, broken=_State.BROKEN, closed=_State.CLOSED, noun="vector environment", end="close"
)
_ANY = (_State.NEW, _State.READY, _State.STEPPING, _State.SENT)
_BETWEEN_STEPS = (_State.NEW, _State.READY, _State.SENT)


class ShmVectorEnv(VectorEnv[Any, Any, Any]):
    """`len(env_fns)` environments in worker processes, behind Gymnasium's own `VectorEnv` interface.

    Observations, rewards, flags and actions lie in shared memory: a step pickles nothing. Infos travel only when there
    are any. A worker that raises, dies or hangs ends the call at once with the samplers' errors.

    Args:
        env_fns: callables that return a `gymnasium.Env`, one for each environment. Lambdas and closures are fine. The
            first is called once more in the main process, to read the spaces.
        in_series: how many environments a process steps one after the other. With `n` environments there are
            `n / in_series` processes, rounded up, whose shares differ by one at most.
        n_workers: the number of processes instead.
        context: "forkserver", "spawn" or "fork".
        autoreset_mode: what a step does about an episode's end, a `gymnasium.vector.AutoresetMode` or its name.
        copy: return copies. Otherwise observations are views of the shared memory, which the next step overwrites.
        affinity: CPUs for each worker, or an `Affinity`. None pins worker i to the i-th CPU of this process's mask if
            there are CPUs enough, and leaves them where the system puts them otherwise.
        step_timeout: seconds that a worker may go without progress before `WorkerTimeoutError`; None waits for ever, as
            long as the worker lives.
        start_timeout: the same, while environments are built.
        on_worker_failure: "raise" breaks the vector environment when a worker raises, dies or hangs. "restart"
            replaces the worker: for each of its environments the next step is `truncated`, with the observation that
            was last seen (under SAME_STEP: as `final_obs`) and `worker_restarted` in its info.
        max_restarts: replacements within `restart_window` seconds at most; one more raises, with the history.
        restart_window: seconds.

    Environments of uneven speed are stepped first-ready: `send(actions, env_ids)` asks some of them to step, and
    `recv(min_ready)` waits for the first that have.

    Raises `ConfigError` for arguments that cannot work, `SpaceError` for a space whose elements have no fixed shape,
    and a `SamplerBrokenError` if a worker fails to start.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env[Any, Any]]],
        in_series: int = 1,
        n_workers: int | None = None,
        context: str = "forkserver",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        copy: bool = True,
        *,
        affinity: Affinity | Sequence[int | Sequence[int]] | None = None,
        step_timeout: float | None = None,
        start_timeout: float = 120.0,
        on_worker_failure: str = "raise",
        max_restarts: int = 3,
        restart_window: float = 60.0,
    ) -> None:
        self._calls = Calls(_LIFETIME, of_this_process=True)
        factories = as_factories(env_fns)
        if not isinstance(copy, bool | np.bool_):
            raise ConfigError(f"copy must be True or False, got {copy!r}")
        self.num_envs, self.copy = len(factories), bool(copy)
        rules = as_rules(context, step_timeout, start_timeout, on_worker_failure, max_restarts, restart_window)
        plans = as_plans(self.num_envs, in_series, n_workers, affinity)
        self.autoreset_mode = as_mode(autoreset_mode)
        self._describe(factories[0])
        job = VectorJob(
            factories,
            ColumnStreams(fresh_seed(), range(self.num_envs)).env_seeds(Purpose.TRAIN),
            self.single_observation_space,
            self.single_action_space,
            self.autoreset_mode,
        )
        self._ended = np.zeros(self.num_envs, np.bool_)
        memory = VectorMemory.allocate(job.observation_space, job.action_space, self.num_envs, len(plans))
        with self._expecting("ShmVectorEnv", _State.NEW):
            self._crew = VectorCrew(plans, job, memory, rules)
            self._exchange = self._crew.exchange

    @contextmanager
    def _expecting(self, name: str, *states: _State) -> Iterator[None]:
        try:
            with self._calls.expecting(name, *states):
                yield
        except SamplerBrokenError as error:
            self._calls.break_with(error)
            raise

    def _describe(self, factory: EnvFactory) -> None:
        env = build_example_env(factory)
        try:
            self.metadata = {**env.metadata, "autoreset_mode": self.autoreset_mode}
            self.spec, self.render_mode = env.spec, env.render_mode
            self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        finally:
            close_example_env(env)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    # ---- Gymnasium's interface -------------------------------------------------------------

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, in parallel, or those of `options["reset_mask"]`, a bool array `[n]`.

        Steps that are outstanding are finished first; of environments that are reset, their results are dropped.

        Args:
            seed: environment i gets `seed + i`, or the i-th of a list.
            options: given to every environment.

        Returns observations `[n, ...]` and batched infos.
        """
        observations, infos = self.reset_listed(seed=seed, options=options)
        return observations, batch_infos(infos, self.num_envs)

    def reset_listed(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, _Infos]:
        """As `reset`, with infos as the environments gave them: pairs (index, info) of those that had any."""
        with self._expecting("reset", *_ANY):
            seeds = as_seeds(seed, self.num_envs)
            which, options = split_mask(options, self.num_envs)
            message = ResetOrder(seeds, options).dumps()
            self._ended[which] = False  # whatever becomes of the waiting
            self._crew.reset(message, seeds, which)
            infos = self._crew.take(which)
            if self._calls.state is _State.NEW or not len(self._exchange.outstanding):
                self._calls.state = _State.READY
            return self._observations(), infos

    def step(self, actions: Any) -> _Step:
        """Step all environments with `actions`, batched as `action_space` is.

        Returns observations `[n, ...]`, rewards, terminations and truncations `[n]`, and batched infos.
        """
        with self._expecting("step", _State.READY):
            self._begin_step(actions)
            return self._end_step()

    def step_async(self, actions: Any) -> None:
        """Have all environments step, and return; `step_wait` gives what comes of it."""
        with self._expecting("step_async", _State.READY):
            self._begin_step(actions)

    def step_wait(self) -> _Step:
        """Wait for the step that `step_async` began; returns as `step` does."""
        with self._expecting("step_wait", _State.STEPPING):
            return self._end_step()

    def _begin_step(self, actions: Any) -> None:
        if self.autoreset_mode is AutoresetMode.DISABLED:
            self._require_running(self._exchange.all)
        self._crew.step(actions)
        self._calls.state = _State.STEPPING

    def _end_step(self) -> _Step:
        *results, infos = self._take_step()
        return (*results, batch_infos(infos, self.num_envs))

    def _take_step(self) -> _Listed:
        self._crew.wait()
        exchange = self._exchange
        reward, terminated, truncated = exchange.reward.copy(), exchange.terminated.copy(), exchange.truncated.copy()
        np.logical_or(terminated, truncated, out=self._ended)
        self._calls.state = _State.READY  # whatever the infos are like
        infos = self._crew.take(exchange.all)
        return self._observations(), reward, terminated, truncated, infos

    def step_wait_listed(self) -> _Listed:
        """As `step_wait`, with infos as the environments gave them: pairs (index, info) of those that had any, with
        `final_obs` and `final_info` where an episode ended and the environment was reset at once."""
        with self._expecting("step_wait_listed", _State.STEPPING):
            return self._take_step()

    def to_sb3(self) -> Any:
        """The same environments as a Stable-Baselines3 `VecEnv`; needs `autoreset_mode="SAME_STEP"`.

        Raises `ConfigError` in another mode, and where Stable-Baselines3 is not installed.
        """
        if not self.copy:
            raise ConfigError("Stable-Baselines3 keeps observations while it steps: construct with copy=True")
        if self.autoreset_mode is not AutoresetMode.SAME_STEP:
            raise ConfigError(
                "Stable-Baselines3 expects environments to be reset in the step that ends an episode: construct with "
                'autoreset_mode="SAME_STEP"'
            )
        try:
            from penstock.vector.sb3 import Sb3VecEnv
        except ImportError as error:
            raise ConfigError(f"to_sb3 needs Stable-Baselines3: pip install 'penstock[sb3]' ({error})") from error
        return Sb3VecEnv(self)

    def render(self) -> tuple[Any, ...] | None:
        """The frames of all environments."""
        return self._call(EnvCall("call", "render"))

    def render_tiled(self) -> npt.NDArray[np.uint8]:
        """The frames of all environments `[height, width, 3]` in one picture, row by row."""
        return tile(self._call(EnvCall("call", "render")))

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """What `env.name(*args, **kwargs)` returns in each environment, or `env.name` where it is no method.

        Steps that are outstanding are finished first. An exception is an `EnvCallError`; the environments live on.
        """
        return self._call(EnvCall("call_or_get", name, args=args, kwargs=kwargs))

    def call_some(self, env_ids: Sequence[int], name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """As `call`, in the environments `env_ids` alone, in ascending order."""
        only = frozenset(env_ids_within(env_ids, self.num_envs).tolist())
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
        """Set the attribute `name` of each environment, from a list or tuple of `n` values or to the same value."""
        each = values if isinstance(values, list | tuple) else [values] * self.num_envs
        if len(each) != self.num_envs:
            raise ConfigError(f"set_attr needs one value, or {self.num_envs} of them in a list, got {len(each)}")
        self._call(EnvCall("set_attr", name, values=each))

    def broadcast(self, parameters: Mapping[str, Any], env_ids: Sequence[int] | None = None) -> None:
        """Set attributes of all environments, or of those in `env_ids`: between steps, for curricula.

        Returns when every environment has all of them. Raises `EnvCallError` for one that refuses.
        """
        if not isinstance(parameters, Mapping):
            raise ConfigError(f"broadcast needs a dict of attributes and values, got {parameters!r}")
        only = None if env_ids is None else frozenset(env_ids_within(env_ids, self.num_envs).tolist())
        for name, value in parameters.items():
            self._call(EnvCall("set_attr", name, values=[value] * self.num_envs, only=only))

    @property
    def np_random_seed(self) -> tuple[Any, ...]:  # type: ignore[override]
        """The seeds of the environments' random generators."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[Any, ...]:  # type: ignore[override]
        """Copies of the environments' random generators."""
        return self.get_attr("np_random")

    # ---- first-ready stepping --------------------------------------------------------------

    def send(self, actions: Any, env_ids: Sequence[int] | None = None) -> None:
        """Have the environments `env_ids` (None: all) step with `actions` `[k, ...]`, and return.

        Raises `SamplerStateError` for one that is still stepping, or whose last result has not been received.
        """
        with self._expecting("send", _State.READY, _State.SENT):
            which = self._exchange.all if env_ids is None else env_ids_within(env_ids, self.num_envs)
            self._crew.end_order()
            if len(busy := np.intersect1d(which, self._exchange.outstanding)):
                raise SamplerStateError(f"send: environments {busy.tolist()} have not been received yet: call recv")
            if self.autoreset_mode is AutoresetMode.DISABLED:
                self._require_running(which)
            self._crew.step_some(actions, which)
            self._calls.state = _State.SENT

    def recv(self, min_ready: int = 1) -> _Step:
        """Wait until `min_ready` of the environments that were sent actions have stepped (or all of them, should they
        be fewer), and return all that have.

        Returns observations `[k, ...]`, rewards, terminations and truncations `[k]`, and infos batched for the `k`,
        with their indices in `infos["env_id"]`. Nothing that is ready is left out, so nobody waits for long.
        """
        with self._expecting("recv", _State.SENT):
            exchange = self._exchange
            wanted = min(integer("min_ready", min_ready, 1), len(exchange.outstanding))
            self._crew.wait(until=lambda: len(exchange.ready) >= wanted)
            which = exchange.ready
            reward, terminated, truncated = (
                row[which] for row in (exchange.reward, exchange.terminated, exchange.truncated)
            )
            self._ended[which] = terminated | truncated
            if len(which) == len(exchange.outstanding):
                self._calls.state = _State.READY  # whatever the infos are like
            positions = {i: k for k, i in enumerate(which.tolist())}
            infos = [(positions[i], info) for i, info in self._crew.take(which)]
            batched = batch_infos(infos, len(which))
            return taken(exchange.observation, which), reward, terminated, truncated, {**batched, "env_id": which}

    def _require_running(self, which: Ids) -> None:
        if self._ended[which].any():
            raise SamplerStateError(
                f"the episodes of environments {which[self._ended[which]].tolist()} have ended, and autoreset_mode is "
                "DISABLED: call reset(options={'reset_mask': mask}) first"
            )

    # ---- the end ---------------------------------------------------------------------------

    def _call(self, call: EnvCall) -> tuple[Any, ...]:
        with self._expecting(call.shown, *_BETWEEN_STEPS):
            return self._crew.call(call)

    def _observations(self) -> Any:
        view = self._exchange.observation
        return taken(view, slice(None)) if self.copy else view

    @property
    def n_restarts(self) -> int:
        """How many workers have been replaced."""
        return self._crew.n_restarts

    def close_extras(self, **kwargs: Any) -> None:
        """End the workers. Never raises; bounded; a worker that must be killed is named in a `RuntimeWarning`."""
        with interrupts.held():
            self._calls.close()
            if "_crew" in vars(self) and not self._calls.is_foreign:
                self._crew.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
