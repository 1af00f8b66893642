"""Faults: the ways in which a worker can raise, exit, crash, hang or be slow, at a place that a test chooses; and
environments, agents, collectors and trajectory infos with such a fault."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from penstock.agents import Agent, AgentStep
from penstock.agents.joint import DelegatingAgent
from penstock.arguments import integer, number, one_of
from penstock.collectors import Collector, EvalCollector, TrajInfo
from penstock.envs import EnvFn
from penstock.errors import ConfigError
from penstock.testing.environments import wrapped_env_fn

_HOUR = 3600  # seconds of one sleep; the sleeps never end


class InjectedFault(Exception):
    """What "raise" raises: an ordinary exception, which can be pickled."""


class UnpicklableFault(InjectedFault):
    """What "unpicklable" raises: it has a message, but cannot be pickled."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("an UnpicklableFault cannot be pickled")


class UnprintableFault(InjectedFault):
    """What "unprintable" raises: its `__str__` and `__repr__` raise, and it has a megabyte of arguments."""

    def __init__(self, message: str) -> None:
        super().__init__(message * (1_000_000 // max(len(message), 1)))

    def __str__(self) -> NoReturn:
        raise RuntimeError("an UnprintableFault has no text")

    __repr__ = __str__


@dataclass(frozen=True)
class Fault:
    """How a worker fails, and at which call. Where it fails is chosen when the fault is injected.
    `how` is one of:

    - "raise", "unpicklable", "unprintable": an exception, see `InjectedFault`, `UnpicklableFault`, `UnprintableFault`;
    - "system exit": `SystemExit`; "exit": `os._exit(0)`;
    - "kill": SIGKILL to itself; "segfault": a real one; "stop": SIGSTOP, until another process sends SIGCONT;
    - "delay": sleeps for `seconds`, then continues;
    - "hang": sleeps without end; "spin": loops without end, in Python; "hold the gil": sleeps without end in C code
      that holds the interpreter lock, so that no other thread of the process runs.

    Raises `ConfigError` if a field has a wrong value.
    """

    how: str
    at: int = 1  #: at which call it happens, counted from 1
    seconds: float = 1.0  #: of "delay"
    #: The path of a file that does not exist yet. Only the process that creates it fails, so a restarted worker does
    #: not fail again. None: every process fails at its call `at`.
    marker: str | None = None
    #: The pid of a process that never fails: usually the main process, which builds an environment to read its spaces.
    spare_pid: int | None = None

    def __post_init__(self) -> None:
        one_of("how", self.how, HOWS)
        integer("at", self.at, 1)
        number("seconds", self.seconds)
        if self.marker is not None and not Path(self.marker).parent.is_dir():
            raise ConfigError(f"marker={self.marker!r} is in a folder that does not exist: create the folder first")

    def fire(self) -> None:
        """Fail now, unless this process is `spare_pid` or another process has created the marker."""
        if os.getpid() != self.spare_pid and self._take_marker():
            _EFFECTS[self.how](self)

    def _take_marker(self) -> bool:
        """Whether this process may fail: there is no marker, or this process has created it."""
        if self.marker is None:
            return True
        try:
            os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True


class Trigger:
    """Counts the calls of one place in one process. At call `fault.at` the fault happens."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.calls = fault, 0

    def call(self) -> None:
        """Count one call."""
        self.calls += 1
        if self.calls == self.fault.at:
            self.fault.fire()


def _raiser(kind: type[BaseException]) -> Callable[[Fault], NoReturn]:
    def effect(fault: Fault) -> NoReturn:
        raise kind(f"a fault was injected: {fault.how} at call {fault.at}")

    return effect


def _segfault(fault: Fault) -> None:
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))  # no core file
    ctypes.string_at(0)


def _hang(fault: Fault) -> NoReturn:
    while True:
        time.sleep(_HOUR)


def _spin(fault: Fault) -> NoReturn:
    while True:
        pass


def _hold_the_gil(fault: Fault) -> NoReturn:
    sleep: Any = ctypes.PyDLL(None).sleep  # a PyDLL holds the interpreter lock during its calls
    while True:
        sleep(_HOUR)


_EFFECTS: dict[str, Callable[[Fault], object]] = {
    "raise": _raiser(InjectedFault),
    "unpicklable": _raiser(UnpicklableFault),
    "unprintable": _raiser(UnprintableFault),
    "system exit": _raiser(SystemExit),
    "exit": lambda fault: os._exit(0),
    "kill": lambda fault: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": _segfault,
    "delay": lambda fault: time.sleep(fault.seconds),
    "hang": _hang,
    "spin": _spin,
    "hold the gil": _hold_the_gil,
    "stop": lambda fault: os.kill(os.getpid(), signal.SIGSTOP),
}

#: Every `how` of a `Fault`.
HOWS = tuple(_EFFECTS)


_ENV_PLACES = ("init", "reset", "step", "close")
_CALLED_ONCE = ("init", "start_envs")


def _check(where: str, places: Sequence[str], fault: Fault) -> None:
    one_of("where", where, places)
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
