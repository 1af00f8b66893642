"""Faulty things: environments, agents, collectors and trajectory infos that carry a fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from penstock.agents import Agent, AgentStep
from penstock.collectors import BaseEvalCollector, Collector, TrajInfo
from penstock.envs import EnvFn
from penstock.errors import ConfigError
from penstock.testing.delegation import DelegatingAgent
from penstock.testing.faults import Fault, Trigger
from penstock.testing.wrapping import wrapping

__all__ = [
    "FaultyAgent",
    "FaultyEnv",
    "faulty_collector",
    "faulty_env",
    "faulty_eval_collector",
    "faulty_traj_info",
]

_C = TypeVar("_C")

_ENV_PLACES = ("init", "reset", "step", "close")
_AGENT_PLACES = ("step", "value", "reset_one", "sample_mode")
_COLLECTOR_PLACES = ("start_envs", "collect_batch", "reset_if_needed", "end_batch")
_TRAJ_INFO_PLACES = ("terminate", "handing over")
_REACHED_ONCE = ("init", "start_envs")


def _check(where: str, places: Sequence[str], fault: Fault) -> None:
    if where not in places:
        raise ConfigError(f"where must be one of {', '.join(map(repr, places))}, got {where!r}")
    if where in _REACHED_ONCE and fault.at != 1:
        raise ConfigError(f"{where!r} is reached once, so a fault there needs at=1, got at={fault.at}")


# ---- environments --------------------------------------------------------------------------


class FaultyEnv(gym.Wrapper[Any, Any, Any, Any]):
    """`env` with a fault in "init" (of the wrapper, with `env` built), "reset", "step" or "close"."""

    def __init__(self, env: gym.Env[Any, Any], fault: Fault, where: str = "step") -> None:
        super().__init__(env)
        _check(where, _ENV_PLACES, fault)
        self._where, self._trigger = where, Trigger(fault)
        try:
            self._reach("init")
        except BaseException:
            env.close()  # nobody else knows of it
            raise

    def _reach(self, where: str) -> None:
        if where == self._where:
            self._trigger.call()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._reach("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._reach("step")
        return super().step(action)

    def close(self) -> None:
        self._reach("close")
        super().close()


def faulty_env(env_fn: EnvFn, fault: Fault, where: str = "step") -> Callable[..., gym.Env[Any, Any]]:
    """An `env_fn` whose environments are `FaultyEnv`s around those of `env_fn`, an id or a callable.

    One of many is faulty with `env_fn=[fn, fn, faulty_env(fn, fault)]`. The main process builds and
    closes the first one too, to read the spaces: with "init" or "close", `spare_pid=os.getpid()` saves it.
    """
    _check(where, _ENV_PLACES, fault)
    return wrapping(env_fn, lambda env, column: FaultyEnv(env, fault, where))


# ---- agents --------------------------------------------------------------------------------


class FaultyAgent(DelegatingAgent):
    """`agent` with a fault in its "step", "value", "reset_one" or "sample_mode".

    Only the copies that sample or evaluate in a worker fail, each counting its own calls; not the trial
    step in `initialize`.
    """

    def __init__(self, agent: Agent, fault: Fault, where: str = "step") -> None:
        super().__init__(agent)
        _check(where, _AGENT_PLACES, fault)
        self._where, self._trigger = where, Trigger(fault)

    def _reach(self, where: str) -> None:
        if where == self._where and self.in_worker:
            self._trigger.call()

    def __getstate__(self) -> dict[str, Any]:
        """Each copy counts its own calls."""
        return {**super().__getstate__(), "_trigger": Trigger(self._trigger.fault)}

    def step(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> AgentStep:
        self._reach("step")
        return super().step(observation, prev_action, prev_reward)

    def value(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> Any:
        self._reach("value")
        return super().value(observation, prev_action, prev_reward)

    def reset_one(self, column: int) -> None:
        self._reach("reset_one")
        super().reset_one(column)

    def sample_mode(self, itr: int) -> None:
        self._reach("sample_mode")
        super().sample_mode(itr)


# ---- collectors ----------------------------------------------------------------------------


def faulty_collector(base: type[Collector], fault: Fault, where: str = "collect_batch") -> type[Collector]:
    """A subclass of `base` with a fault at the beginning of one of its methods.

    `where` is "start_envs", "collect_batch", "end_batch" or "reset_if_needed": a worker is there when it
    has answered barrier_out and is about to park at barrier_in, for the first time after start-up.
    """
    _check(where, _COLLECTOR_PLACES, fault)
    return _with_fault(base, fault, where)


def _with_fault(base: type[_C], fault: Fault, where: str) -> type[_C]:
    """A subclass whose method `where` fires before it does what it did; one trigger per instance."""
    # The depth tells the triggers of a faulty subclass of a faulty class apart.
    original, name = getattr(base, where), f"_trigger_{len(base.__mro__)}"

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        vars(self).setdefault(name, Trigger(fault)).call()
        return original(self, *args, **kwargs)

    return type(f"Faulty{base.__name__}", (base,), {where: method, "__doc__": f"{base.__name__} with a {fault}."})


def faulty_eval_collector(base: type[BaseEvalCollector], fault: Fault) -> type[BaseEvalCollector]:
    """A subclass of `base` with a fault before its `fault.at`-th row of environment steps, counted over
    all evaluations."""
    original = base.collect_evaluation

    def collect_evaluation(self: Any, itr: int) -> None:
        if "_trigger" not in vars(self):
            self._trigger, step = Trigger(fault), self.envs.step

            def faulty_step(*args: Any, **kwargs: Any) -> None:
                self._trigger.call()
                step(*args, **kwargs)

            self.envs.step = faulty_step
        original(self, itr)

    doc = f"{base.__name__} with a {fault}."
    return type(f"Faulty{base.__name__}", (base,), {"collect_evaluation": collect_evaluation, "__doc__": doc})


# ---- trajectory infos ----------------------------------------------------------------------


def faulty_traj_info(base: type[TrajInfo], fault: Fault, where: str = "terminate") -> type[TrajInfo]:
    """A subclass of `base` with a fault where a trajectory ends: in "terminate", or in "handing over",
    while its attributes are pickled (which a `SerialSampler` does not do).

    Calls are counted over all trajectories of a process.
    """
    _check(where, _TRAJ_INFO_PLACES, fault)
    original, trigger = base.terminate, Trigger(fault)

    def terminate(self: Any, final_observation: Any) -> None:
        if where == "terminate":
            trigger.call()
        else:
            self._cargo = _Cargo(trigger)
        original(self, final_observation)

    return type(
        f"Faulty{base.__name__}", (base,), {"terminate": terminate, "__doc__": f"{base.__name__} with {fault}."}
    )


class _Cargo:
    """Pulls the trigger when it is pickled; arrives as False."""

    def __init__(self, trigger: Trigger) -> None:
        self._trigger = trigger
        self._error: BaseException | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # What cannot be pickled one way is tried another way: once it has failed, it keeps failing.
        if self._error is not None:
            raise self._error
        try:
            self._trigger.call()
        except BaseException as error:
            self._error = error
            raise
        return bool, ()
