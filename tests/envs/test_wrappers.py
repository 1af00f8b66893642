"""Flat steps do exactly what the wrappers do with their own methods."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import operator
import textwrap
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, RecordEpisodeStatistics, TimeLimit, TransformReward
from hypothesis import given
from hypothesis import strategies as st

from penstock.envs import CountingEnv, direct_steps
from penstock.envs.checks import checked_step
from penstock.envs.direct_steps import flat_step_of
from penstock.errors import SpaceError

from ..scale import examples

RESULTS: list[Any] = [
    (0, 1.0, False, False, {}),
    (1, 1.0, True, False, {"a": 1}),
    (np.zeros(2).tolist(), 2, 0, None, None),
    [2, 0.5, False, False, {}],
    [0, 1.0, False, {}],
    [0, 1.0, False, False, {}, 0],
    None,
    ValueError("broken"),
]


class Scripted(gym.Env[Any, Any]):
    """Returns or raises the results that it is given, and notes its calls."""

    def __init__(self, results: list[Any]) -> None:
        self.observation_space = self.action_space = gym.spaces.Discrete(2)
        self.results, self.calls = list(results), []

    def step(self, action: Any) -> Any:
        self.calls.append(("step", action))
        result = self.results.pop(0) if self.results else (0, 1.0, False, False, {})
        if isinstance(result, Exception):
            raise result
        return result

    def reset(self, **kwargs: Any) -> Any:
        self.calls.append(("reset", kwargs))
        return len(self.calls), {}


KNOWN = (TimeLimit, OrderEnforcing, PassiveEnvChecker)


class OtherTimeLimit(TimeLimit[Any, Any]):
    pass


WRAPPERS: list[Callable[[Any], Any]] = [
    OrderEnforcing,
    lambda env: TimeLimit(env, 2),
    lambda env: TimeLimit(env, 4),
    PassiveEnvChecker,
    lambda env: OtherTimeLimit(env, 3),
    lambda env: TransformReward(env, operator.neg),
]
VALUES: list[tuple[str, Any]] = [
    ("_elapsed_steps", 0),
    ("_elapsed_steps", 2**70),
    ("_elapsed_steps", None),
    ("_elapsed_steps", True),
    ("_elapsed_steps", 1.5),
    ("_max_episode_steps", 1),
    ("_max_episode_steps", "many"),
    ("_has_reset", False),
    ("_has_reset", True),
    ("_has_reset", 1),
    ("_has_reset", []),
    ("checked_step", False),
    ("checked_step", True),
    ("checked_data_reuse", False),
    ("checked_data_reuse", True),
]
OPERATIONS = st.one_of(
    st.tuples(st.just("step"), st.integers(0, 1)),
    st.tuples(st.just("step"), st.integers(0, 1)),
    st.tuples(
        st.just("reset"), st.sampled_from([{"seed": 3}, {"seed": None, "options": {"a": 1}}, {}, {"options": {}}])
    ),
    st.tuples(st.just("refuse"), st.just({"sed": 1})),
    st.tuples(st.just("set"), st.tuples(st.integers(0, 3), st.sampled_from(VALUES))),
    st.tuples(
        st.just("delete"),
        st.tuples(st.integers(0, 3), st.sampled_from(["_elapsed_steps", "_has_reset", "checked_step", "env"])),
    ),
    st.tuples(st.just("hide"), st.tuples(st.integers(0, 3), st.sampled_from(["step", "reset"]))),
    st.tuples(st.just("replace"), st.integers(0, 3)),
)


def stack(results: list[Any], layers: list[int]) -> list[Any]:
    """The wrappers, the outermost first, and the environment."""
    envs = [Scripted(copy.deepcopy(results))]
    for layer in layers:
        envs.insert(0, WRAPPERS[layer](envs[0]))
    return envs


def outcomes_of(envs: list[Any], step: Any, operations: list[Any]) -> list[Any]:
    """What each operation returns or raises, and the attributes of all wrappers afterwards."""
    log: list[Any] = []
    inner = envs[-1]
    for name, argument in operations:
        try:
            if name == "step":
                outcome = step(argument)
            elif name in ("reset", "refuse"):
                outcome = envs[0].reset(**argument)
            else:
                outcome = change(envs, name, argument)
        except Exception as error:
            outcome = type(error), str(error)
        times = ("episode_start_time", "time_queue", "env", "step", "reset")
        state = [{key: value for key, value in vars(env).items() if key not in times} for env in envs[:-1]]
        log.append((name, _without_times(outcome), repr(state), list(inner.calls)))
    return log


def _without_times(outcome: Any) -> Any:
    if isinstance(outcome, tuple) and isinstance(outcome[-1], dict) and "episode" in outcome[-1]:
        return (*outcome[:-1], outcome[-1]["episode"]["l"])
    return outcome


def change(envs: list[Any], name: str, argument: Any) -> None:
    i = argument if name == "replace" else argument[0]
    env = envs[i % len(envs)]
    if name == "set":
        setattr(env, *argument[1])
    elif name == "delete":
        delattr(env, argument[1])
    elif name == "hide" and not (type(env) in KNOWN and argument[1] == "step"):  # these are looked up once
        setattr(env, argument[1], lambda *_, **__: (9, 9.0, False, False, {}))
    elif name == "replace" and env is not envs[-1]:
        env.env = Scripted([(7, 7.0, False, False, {})] * 3)


@examples(25, 300)
@given(
    results=st.lists(st.sampled_from(range(len(RESULTS))), max_size=8),
    layers=st.builds(
        operator.add,
        st.lists(st.integers(0, len(WRAPPERS) - 1), min_size=1, max_size=2),
        st.sampled_from([[], [0, 1], [0, 2], [3, 0, 1], [3, 0, 2]]),
    ),
    operations=st.lists(OPERATIONS, max_size=12),
    starts=st.booleans(),
)
def test_a_flat_step_does_what_the_wrappers_do(
    results: list[int], layers: list[int], operations: list[Any], starts: bool
) -> None:
    script = [RESULTS[i] for i in results]
    plain, flat = stack(script, layers), stack(script, layers)
    flat_step = flat_step_of(flat[0])
    assert (flat_step != flat[0].step) == (layers[-2:] in ([0, 1], [0, 2]))
    operations = [("reset", {"seed": 1}), *operations] if starts else operations
    step = plain[0].step  # looked up once, as collectors do
    assert outcomes_of(plain, step, operations) == outcomes_of(flat, flat_step, operations)


@pytest.mark.parametrize("wrong", [(0, 1.0, False, {}), (0, 1.0, False, False, {}, 0)])
def test_the_callers_of_a_flat_step_refuse_a_tuple_that_has_not_five_values(wrong: Any) -> None:
    env = stack([wrong], [0, 1])[0]
    step = flat_step_of(env)
    env.reset()
    assert step(0) == wrong
    with pytest.raises(SpaceError, match="env_rank 3 must return five values"):
        checked_step(wrong, 3)


@pytest.mark.parametrize("wrap", [RecordEpisodeStatistics, lambda env: OtherTimeLimit(env, 3)])
def test_other_wrappers_stay_as_they_are(wrap: Any) -> None:
    for env in (wrap(OrderEnforcing(CountingEnv())), OrderEnforcing(CountingEnv()), CountingEnv()):
        assert flat_step_of(env) == env.step
    env = TimeLimit(OrderEnforcing(wrap(OrderEnforcing(CountingEnv()))), 9)
    step = flat_step_of(env)
    assert step != env.step
    with pytest.raises(ResetNeeded):
        step(0)
    env.reset(seed=0)
    assert len(step(0)) == 5


def test_a_wrapper_with_a_step_of_its_own_is_not_flattened() -> None:
    env = OrderEnforcing(CountingEnv())
    env.step = lambda action: "mine"  # type: ignore[method-assign, assignment, return-value]
    assert flat_step_of(env)(0) == "mine"
    limited = TimeLimit(env, 3)
    assert flat_step_of(limited) == limited.step
    with pytest.raises(ValueError, match="not enough values to unpack"):
        flat_step_of(limited)(0)


#: The code that `flat_step_of` repeats, without docstrings and types.
CODE = {
    (gym.Wrapper, "step"): """
def step(self, action):
    return self.env.step(action)""",
    (TimeLimit, "step"): """
def step(self, action):
    observation, reward, terminated, truncated, info = self.env.step(action)
    self._elapsed_steps += 1
    if self._elapsed_steps >= self._max_episode_steps:
        truncated = True
    return (observation, reward, terminated, truncated, info)""",
    (OrderEnforcing, "step"): """
def step(self, action):
    if not self._has_reset:
        raise ResetNeeded('Cannot call env.step() before calling env.reset()')
    return super().step(action)""",
    # Before 1.4 it has no attribute checked_data_reuse, and is called.
    (PassiveEnvChecker, "step"): """
def step(self, action):
    if self.checked_step is False:
        self.checked_step = True
        result = env_step_passive_checker(self.env, action)
        obs, reward, terminated, truncated, info = result
        env_data_reuse_passive_checker(self._previous_data, (obs, info), 'reset', 'step')
        self._previous_data = (obs, info)
        return result
    else:
        result = self.env.step(action)
        if self.checked_data_reuse is False:
            obs, reward, terminated, truncated, info = result
            env_data_reuse_passive_checker(self._previous_data, (obs, info), 'step', 'step')
            self._previous_data = None
            self.checked_data_reuse = True
        return result""",
}


@pytest.mark.parametrize(("cls", "name"), CODE)
def test_this_release_of_gymnasium_is_known_and_has_the_same_code(cls: Any, name: str) -> None:
    """`make floors` runs this with the lowest release. If it fails for a new one, compare its code."""
    assert direct_steps.are_known()
    if cls is PassiveEnvChecker and not hasattr(PassiveEnvChecker(CountingEnv()), "checked_data_reuse"):
        return
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(getattr(cls, name)))).body
    assert isinstance(function, ast.FunctionDef)
    function.body, function.returns = function.body[1:], None  # without the docstring
    for argument in function.args.args:
        argument.annotation = None
    assert ast.unparse(function) == ast.unparse(ast.parse(CODE[cls, name]))


@pytest.mark.parametrize("cls", [TimeLimit, OrderEnforcing, PassiveEnvChecker, gym.Wrapper])
def test_a_step_that_somebody_has_replaced_is_called(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env = TimeLimit(OrderEnforcing(CountingEnv()), 3)
    assert flat_step_of(env) != env.step
    monkeypatch.setattr(cls, "step", functools.wraps(cls.step)(lambda self, action: "replaced"))
    assert flat_step_of(env) == env.step


@pytest.mark.parametrize("version", ["1.0.0", "1.10.0", "1.5.0", "2.0.0a1"])
def test_the_wrappers_of_another_release_are_called(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym, "__version__", version)
    env = TimeLimit(OrderEnforcing(CountingEnv()), 3)
    assert flat_step_of(env) == env.step


def test_a_wrapper_that_wraps_itself_is_an_error() -> None:
    env = TimeLimit(OrderEnforcing(CountingEnv()), 3)
    env.reset()
    env.env.env = env
    with pytest.raises(RecursionError):
        flat_step_of(env)(0)
