"""Environments, agents, collectors and trajectory infos with an injected fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from penstock.agents import Agent, AgentStep
from penstock.agents.delegation import DelegatingAgent
from penstock.collectors import Collector, EvalCollector, TrajInfo
from penstock.envs import EnvFn
from penstock.errors import ConfigError
from penstock.testing.environments import wrapped_env_fn
from penstock.testing.faults import Fault, Trigger

_ENV_PLACES = ("init", "reset", "step", "close")
_CALLED_ONCE = ("init", "start_envs")


def _check(where: str, places: Sequence[str], fault: Fault) -> None:
    if where not in places:
        raise ConfigError(f"where must be one of {', '.join(map(repr, places))}, got {where!r}")
    if where in _CALLED_ONCE and fault.at != 1:
        raise ConfigError(f"{where!r} is called once, so a fault there needs at=1, got at={fault.at}")


# ---- environments --------------------------------------------------------------------------


class FaultyEnv(gym.Wrapper[Any, Any, Any, Any]):
    """`env` with a fault in "init" (of the wrapper, after `env` is built), "reset", "step" or "close"."""

    def __init__(self, env: gym.Env[Any, Any], fault: Fault, where: str = "step") -> None:
        super().__init__(env)
        _check(where, _ENV_PLACES, fault)
        self._where, self._trigger = where, Trigger(fault)
        try:
            self._reach("init")
        except BaseException:
            env.close()  # the caller has no reference to it
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
    """An `env_fn` that builds a `FaultyEnv` around each environment of `env_fn`, an id or a callable.

    For one faulty environment among several, use `env_fn=[fn, fn, faulty_env(fn, fault)]`. The main process
    builds and closes the first one, to read the spaces: with "init" or "close", give `spare_pid=os.getpid()`.
    """
    _check(where, _ENV_PLACES, fault)
    return wrapped_env_fn(env_fn, lambda env, column: FaultyEnv(env, fault, where))


# ---- agents --------------------------------------------------------------------------------


class FaultyAgent(DelegatingAgent):
    """`agent` with a fault in its "step", "value", "reset_one" or "sample_mode".

    Only the copies that sample or evaluate in a worker fail, and each counts its own calls. The trial step in
    `initialize` does not count.
    """

    def __init__(self, agent: Agent, fault: Fault, where: str = "step") -> None:
        super().__init__(agent)
        _check(where, ("step", "value", "reset_one", "sample_mode"), fault)
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

    `where` is "start_envs", "collect_batch", "end_batch" or "reset_if_needed". A worker calls "reset_if_needed"
    between barrier_out and barrier_in, and for the first time after start-up.
    """
    _check(where, ("start_envs", "collect_batch", "reset_if_needed", "end_batch"), fault)
    # The name differs in each class, since a faulty class may be the base of another.
    original, name = getattr(base, where), f"_trigger_{len(base.__mro__)}"

    def method(self: Any, *args: object, **kwargs: object) -> Any:
        vars(self).setdefault(name, Trigger(fault)).call()  # one trigger per instance
        return original(self, *args, **kwargs)

    return _subclass(base, fault, {where: method})


def faulty_eval_collector(base: type[EvalCollector], fault: Fault) -> type[EvalCollector]:
    """A subclass of `base` with a fault before its `fault.at`-th row of environment steps, counted over
    all evaluations."""
    original = base.collect_evaluation

    def collect_evaluation(self: Any, itr: int) -> None:
        if "_trigger" not in vars(self):
            self._trigger, step = Trigger(fault), self.columns.step

            def faulty_step(*args: object) -> Any:
                self._trigger.call()
                return step(*args)

            self.columns.step = faulty_step
        original(self, itr)

    return _subclass(base, fault, {"collect_evaluation": collect_evaluation})


# ---- trajectory infos ----------------------------------------------------------------------


def faulty_traj_info(base: type[TrajInfo], fault: Fault, where: str = "terminate") -> type[TrajInfo]:
    """A subclass of `base` with a fault where a trajectory ends.

    `where` is "terminate", or "sending": while its attributes are pickled, which a `SerialSampler` does not do.
    Calls are counted over all trajectories of a process.
    """
    _check(where, ("terminate", "sending"), fault)
    original, trigger = base.terminate, Trigger(fault)

    def terminate(self: Any, final_observation: object) -> None:
        if where == "terminate":
            trigger.call()
        else:
            self._payload = _FaultyPickle(trigger)
        original(self, final_observation)

    return _subclass(base, fault, {"terminate": terminate})


class _FaultyPickle:
    """Calls the trigger when it is pickled; unpickles as False."""

    def __init__(self, trigger: Trigger) -> None:
        self._trigger = trigger
        self._error: BaseException | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickling is tried in several ways: after the first failure, all must fail.
        if self._error is not None:
            raise self._error
        try:
            self._trigger.call()
        except BaseException as error:
            self._error = error
            raise
        return bool, ()


def _subclass(base: type[Any], fault: Fault, methods: dict[str, Any]) -> type[Any]:
    return type(f"Faulty{base.__name__}", (base,), {**methods, "__doc__": f"{base.__name__} with a {fault}."})
