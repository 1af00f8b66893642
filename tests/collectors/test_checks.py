"""Data that does not fit: a SpaceError naming field and environment, within the batch in which it happened. What is
unusual but right is recorded."""

import types
import warnings
from collections import OrderedDict
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from penstock import (
    Agent,
    AgentStep,
    ParallelSampler,
    RandomAgent,
    Sampler,
    SerialSampler,
    SpaceError,
    TrajInfo,
    WorkerError,
)
from penstock.agents.outputs import write_action
from penstock.buffers import NamedArrays
from penstock.envs import CountingEnv
from penstock.errors import brief

from ..against_loop import compare
from ..scale import mostly_first, scaled
from ..support import sampler_of

both = pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
NAN, INF = float("nan"), float("inf")


class Spoilt(CountingEnv):
    """Counts like its base, but `spoil` has a go at what the third step, and `spoil_reset` at what the
    second reset returns. An episode lasts three steps if it is a `short` one."""

    def __init__(self, spoil: Any = None, spoil_reset: Any = None, short: bool = False, nested: bool = False) -> None:
        super().__init__(length=3 if short else 1000, truncate=True)
        self.spoil, self.spoil_reset, self.nested, self.n_steps = spoil, spoil_reset, nested, 0
        if nested:
            parts = {"grid": self.observation_space, "goal": spaces.Tuple((spaces.Discrete(9), spaces.Box(-1, 1)))}
            self.observation_space = spaces.Dict(parts)

    def observe(self) -> Any:
        counted = np.array([self.episode, self.count], np.float32)
        return {"grid": counted, "goal": (self.count % 9, np.zeros(1, np.float32))} if self.nested else counted

    def reset(self, **kwargs: Any) -> Any:
        result = super().reset(**kwargs)
        return self.spoil_reset(result) if self.spoil_reset is not None and self.episode == 1 else result

    def step(self, action: Any) -> Any:
        self.n_steps += 1
        result = super().step(action)
        return self.spoil(result) if self.spoil is not None and self.n_steps == 3 else result


def replacing(place: int, value: Any) -> Callable[[Any], Any]:
    """A spoil that puts `value` at one place of what `step` or `reset` returns."""
    return lambda result: (*result[:place], value, *result[place + 1 :])


def observation(value: Any) -> dict[str, Any]:
    return {"spoil": replacing(0, value)}


def reward(value: Any) -> dict[str, Any]:
    return {"spoil": replacing(1, value)}


def nested(grid: Any = (0.0, 0.0), goal: Any = (3, (0.0,)), **more: Any) -> dict[str, Any]:
    made = {"grid": np.array(grid, np.float32), "goal": (goal[0], np.array(goal[1], np.float32)), **more}
    return {"spoil": replacing(0, made), "nested": True}


TOO_LARGE = np.array([1.0, 1e300])
FINITE, DEBUG = {"check_finite": True}, {"debug": True}
SEEN, FINAL, REWARD = (f"{what} of env_rank 3 must " for what in ("observation", "the final observation", "the reward"))
HOLD = r"have values that float32 can hold, got 1e\+300"
KEYS = SEEN + r"have the entries \['goal', 'grid'\], got "
NUMBER = REWARD + "be a single number, got "
STEP = r"env\.step of env_rank 3 must return five values \(observation, reward, terminated, truncated, info\): "
RESET = r"env\.reset of env_rank 3 must return a tuple \(observation, info\), got "
INFO = r"the info that env\.{} of env_rank 3 returned must be a dict, got None"
FLAG = "{} of env_rank 3 must be True or False, got "


def at_end(wrong: dict[str, Any]) -> dict[str, Any]:
    return {**wrong, "short": True}


def at_reset(spoil: Callable[[Any], Any]) -> dict[str, Any]:
    return {"spoil_reset": spoil, "short": True}


def flag(place: int, value: Any) -> dict[str, Any]:
    return {"spoil": replacing(place, value)}


#: name: (what is wrong with env_rank 3, options, what the error says). `envs/test_rows.py` has more that does not fit.
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "observation of wrong shape": (observation(np.zeros(3)), {}, SEEN + r"have shape \(2,\), got \(3,\)"),
    "observation of wrong dtype": (observation(np.array(["a", "b"])), {}, SEEN + "have dtype float32, got <U1"),
    "observation None": (observation(None), {}, SEEN + r"have shape \(2,\), got None"),
    "observation with a gradient": (
        observation(torch.zeros(2, requires_grad=True)),
        {},
        "observation of env_rank 3 cannot be converted to an array: Can't call numpy",
    ),
    "dict": (observation({"a": 1.0, "b": 2.0}), {}, SEEN + r"have shape \(2,\), got a dict"),
    "no dict": ({**observation(np.zeros(2)), "nested": True}, {}, KEYS + "a ndarray"),
    "a key too many": (nested(extra=1), {}, KEYS + r"\['grid', 'goal', 'extra'\]"),
    "a tuple too long": (
        {"spoil": replacing(0, {"grid": np.zeros(2), "goal": (1, np.zeros(1), 2)}), "nested": True},
        {},
        r"observation\['goal'\] of env_rank 3 must have the entries \[0, 1\], got a tuple of 3",
    ),
    "NaN observation": (
        observation(np.array([1, NAN], np.float32)),
        FINITE,
        SEEN + r"be finite \(check_finite=True\), got nan at index \(1,\)",
    ),
    "inf in a nested observation": (
        nested(goal=(1, (-INF,))),
        FINITE,
        r"observation\['goal'\]\[1\] of env_rank 3 must be finite \(check_finite=True\), got -inf at index \(0,\)",
    ),
    "observation outside its space": (
        observation(np.array([1, -1], np.float32)),
        DEBUG,
        SEEN + r"be in Box.* \(debug=True\), got array\(\[ 1\., -1\.\], dtype=float32\)",
    ),
    "too large": (observation(TOO_LARGE), {}, SEEN + HOLD),
    "too large in a list": (observation(TOO_LARGE.tolist()), {}, SEEN + HOLD),
    "too large in a nested leaf": (
        {"spoil": replacing(0, {"grid": TOO_LARGE, "goal": (3, np.zeros(1))}), "nested": True},
        {},
        rf"observation\['grid'\] of env_rank 3 must {HOLD}",
    ),
    "too large at an end": (at_end(observation(TOO_LARGE)), {}, FINAL + HOLD),
    "final observation of wrong shape": (
        at_end(observation(np.zeros((2, 1)))),
        {},
        FINAL + r"have shape \(2,\), got \(2, 1\)",
    ),
    "final observation of wrong shape, not recorded": (
        at_end(observation(np.zeros((2, 1)))),
        {"record_final_obs": False},
        FINAL + r"have shape \(2,\), got \(2, 1\)",
    ),
    "NaN final observation": (at_end(observation(np.array([NAN, 1], np.float32))), FINITE, FINAL + "be finite"),
    "final observation outside its space": (at_end(observation(np.array([-1, 1]))), DEBUG, FINAL + "be in Box"),
    "reset observation of wrong shape": (
        at_reset(replacing(0, np.zeros(1, np.float32))),
        {},
        SEEN + r"have shape \(2,\), got \(1,\)",
    ),
    "reset without info": (at_reset(lambda result: result[0]), {}, RESET + r"array\("),
    "reset with three values": (at_reset(lambda result: (*result, {})), {}, RESET + r"\(array\(.*\{\}\)"),
    "reset with info None": (at_reset(replacing(1, None)), {}, INFO.format("reset")),
    "reward None": (reward(None), {}, NUMBER + "None"),
    "reward None at an episode's end": (at_end(reward(None)), {}, NUMBER + "None"),
    "reward with a gradient": (reward(torch.tensor(0.5, requires_grad=True)), {}, NUMBER + "tensor"),
    "reward string": (reward("1"), {}, NUMBER + "'1'"),
    "reward of two elements": (reward(np.zeros(2)), {}, NUMBER + r"array\(\[0\., 0\.\]\) \(float64, shape \(2,\)\)"),
    "reward complex": (reward(1j), {}, NUMBER + "1j"),
    "reward in an array": (reward(np.ones(1)), {}, NUMBER + r".*: return reward\.item\(\)"),
    "reward in a list": (reward([1.0]), {}, NUMBER + r"\[1\.0\](\n|$)"),
    "reward NaN": (reward(NAN), FINITE, REWARD + r"be finite \(check_finite=True\), got nan"),
    "reward inf": (reward(np.float32(-INF)), FINITE, REWARD + r"be finite \(check_finite=True\), got .*-inf"),
    "reward too large": (reward(1e300), {}, REWARD + "be a number that float32 can hold, got 1e"),
    "terminated None": (flag(2, None), {}, FLAG.format("terminated") + "None"),
    "terminated array": (flag(2, np.array([True, False])), {}, FLAG.format("terminated") + "array"),
    "truncated string": (flag(3, "no"), {}, FLAG.format("truncated") + "'no'"),
    "truncated float": (flag(3, 1.0), {}, FLAG.format("truncated") + r"1\.0"),
    "four values": ({"spoil": lambda result: result[:4]}, {}, STEP + ".*expected 5, got 4"),
    "six values": ({"spoil": lambda result: (*result, 1)}, {}, STEP + "too many values to unpack"),
    "no values": ({"spoil": lambda result: None}, {}, STEP + "cannot unpack non-iterable NoneType"),
    "info None": ({"spoil": replacing(4, None)}, {}, INFO.format("step")),
}


def spoilt_envs(cls: type[Sampler], env_kwargs: Any, **options: Any) -> Any:
    return sampler_of(cls, Spoilt, env_kwargs=env_kwargs, batch_T=2, **options)


def check_named(error: pytest.ExceptionInfo[WorkerError], message: str) -> None:
    assert type(error.value.__cause__) is SpaceError
    assert error.match(f"raised (penstock.errors.)?SpaceError while .*: {message}")
    assert f"): {error.value.__cause__}" in str(error.value), "the message quotes the cause"


def others(wrong: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the environments with which nothing is wrong."""
    return {name: value for name, value in wrong.items() if not name.startswith("spoil")}


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "name"), mostly_first([SerialSampler, *[ParallelSampler] * scaled(1, 4)], BAD))
def test_bad_data_is_named_in_its_batch(cls: type[Sampler], name: str) -> None:
    wrong, options, message = BAD[name]
    with spoilt_envs(cls, [others(wrong)] * 3 + [wrong], **options) as sampler:
        sampler.initialize(RandomAgent(), bootstrap_value=True)
        sampler.obtain_samples(0)  # two steps, with which nothing is wrong
        with pytest.raises(WorkerError) as error:
            sampler.obtain_samples(1)
    check_named(error, message)
    assert "env_rank 3, t=0 (itr=1): " in str(error.value)


class Adding(TrajInfo):
    """Gets only what has been checked."""

    def step(self, observation: Any, action: Any, reward: Any, *rest: Any) -> None:
        self.Twice = 2 * float(reward)

    def terminate(self, final_observation: Any) -> None:
        self.Last = final_observation


IN_EVALUATION = [name for name in BAD if "not recorded" not in name]


@pytest.mark.parametrize("name", IN_EVALUATION)
def test_bad_data_is_named_in_evaluations_too(name: str) -> None:
    wrong, options, message = BAD[name]
    size: dict[str, Any] = {"eval_n_envs": 2, "eval_max_steps": 20, "traj_info_cls": Adding}
    with spoilt_envs(
        SerialSampler, others(wrong), eval_env_kwargs=[others(wrong), wrong], **size, **options
    ) as sampler:
        sampler.initialize(RandomAgent())
        sampler.obtain_samples(0)
        with pytest.raises(WorkerError, match=r"env_rank 1, t=\d \(.*itr=3\)") as error:
            sampler.evaluate_agent(3)
    check_named(error, message.replace("env_rank 3", "env_rank 1"))


@pytest.mark.parametrize(
    "name", ["observation of wrong shape", "four values", "reset observation of wrong shape", "reward NaN"]
)
def test_bad_data_is_named_at_start_up(name: str) -> None:
    wrong, options, message = BAD[name]
    with (
        spoilt_envs(SerialSampler, [others(wrong)] * 3 + [wrong], max_decorrelation_steps=1000, **options) as sampler,
        pytest.raises(
            WorkerError, match=r"(resetting env_rank 3|env_rank 3 in the random steps before.*) \(start-up\)"
        ) as error,
    ):
        sampler.initialize(RandomAgent(), seed=0)
    check_named(error, message)


class Silent(Spoilt):
    """Ignores all warnings, as many simulators do, and numpy's errors too."""

    def step(self, action: Any) -> Any:
        warnings.filterwarnings("ignore")
        np.seterr(all="ignore")
        return super().step(action)


@pytest.mark.slow
@both
@pytest.mark.parametrize("has_c", [True, False])
@pytest.mark.parametrize("name", ["too large", "reward too large"])
def test_no_infinity_is_recorded_where_warnings_are_ignored(
    cls: type[Sampler], name: str, has_c: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_c:  # in this process, so it counts for a SerialSampler
        monkeypatch.setattr("penstock.envs.rows.put_row", lambda *_: False)
    with warnings.catch_warnings(), np.errstate(), sampler_of(cls, Silent, env_kwargs=BAD[name][0]) as sampler:
        sampler.initialize(RandomAgent())
        with pytest.raises(WorkerError, match="can hold, got"):
            sampler.obtain_samples(0)


# ---- agents ------------------------------------------------------------------------------------

#: env_rank 3 shows 99 after its third step, which is fine, and which the agents below wait for.
MARKED = observation(np.array([0, 99], np.float32))


class Wild(RandomAgent):
    """Spoils its actions once it sees the mark."""

    def __init__(self, spoil: Callable[[Any, Any], Any] = lambda action, marked: np.where(marked, 7, action)) -> None:
        super().__init__()
        self.spoil = spoil

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        action = super().step(observation, prev_action, prev_reward).action
        return AgentStep(self.spoil(action, observation[:, 1] == 99))


NO_SUCH_ACTION = r"the action of env_rank 3, given by the agent, must be in Discrete\(3\) \(debug=True\), got 7"


@pytest.mark.slow
@both
@pytest.mark.parametrize(
    ("agent", "options", "message"),
    [
        (Wild(), DEBUG, NO_SUCH_ACTION),
        (
            Wild(lambda action, marked: action[:1] if marked.any() else action),
            {},
            r"agent\.step must return action with shape \((2|4),\) and dtype int64, as in .*, got \(1,\)",
        ),
        (
            Wild(lambda action, marked: [[0], [0, 1]] if marked.any() else action.tolist()),
            {},
            r"action cannot be converted to an array: ValueError",
        ),
        (
            Wild(lambda action, marked: action + 0.5 if marked.any() else action.astype(np.int32)),
            {},
            r"action of env_rank \d must have dtype int64, as in the action space, got float64 [0-2].5: convert it",
        ),
    ],
)
def test_bad_actions_are_named_in_their_batch(
    cls: type[Sampler], agent: Agent, options: dict[str, Any], message: str
) -> None:
    with spoilt_envs(cls, [{}] * 3 + [MARKED], **options) as sampler:
        sampler.initialize(agent)
        sampler.obtain_samples(0)
        with pytest.raises(WorkerError, match=r"t=1 \(itr=1\)") as error:
            sampler.obtain_samples(1)
    check_named(error, message)


@both
def test_actions_of_another_kind_are_refused_before_any_worker_starts(cls: type[Sampler]) -> None:
    with (
        spoilt_envs(cls, {}) as sampler,
        pytest.raises(SpaceError, match="action of column 0 must have dtype int64, as in the action space, got"),
    ):
        sampler.initialize(Wild(lambda action, marked: action / 2))


def test_nested_actions_are_compared_leaf_by_leaf() -> None:
    row = NamedArrays(move=np.zeros((2, 3), np.float32), mode=NamedArrays(_0=np.zeros(2, np.uint8)))
    write_action(row, {"move": np.ones((2, 3)), "mode": (np.array([1, 2]),)})
    assert row.move.sum() == 6
    assert row.mode._0.tolist() == [1, 2]
    with pytest.raises(SpaceError, match=r"action\.move with shape \(2, 3\) and dtype float32, as in .*, got \(3,\)"):
        write_action(row, {"move": np.ones(3), "mode": (np.array([1, 2]),)})
    with pytest.raises(
        SpaceError, match=r"action\.mode\._0 of column 1 must have dtype uint8, as in the action space, got int64 -2"
    ):
        write_action(row, {"move": np.ones((2, 3)), "mode": (np.array([1, -2]),)})
    with pytest.raises(SpaceError, match=r"action with the fields \['move', 'mode'\], as in .* fields \['move'\]"):
        write_action(row, NamedArrays(move=np.ones((2, 3))))


# ---- what is unusual but right -----------------------------------------------------------------


class Info(OrderedDict[str, Any]):
    pass


def unusual(place: int, change: Callable[[Any], Any]) -> type[CountingEnv]:
    class Unusual(CountingEnv):
        def step(self, action: Any) -> Any:
            result: list[Any] = list(super().step(action))
            result[place] = change(result[place])
            return tuple(result)

    return Unusual


@pytest.mark.parametrize("options", [{}, {**FINITE, **DEBUG}], ids=["plain", "all options"])
@pytest.mark.parametrize(
    ("place", "change"),
    [
        (0, lambda observation: observation.astype(np.float16)),
        (1, int),
        (1, bool),
        (1, np.float32),
        (1, np.float64),
        (1, np.array),
        (1, Fraction),
        (1, lambda reward: 10**25 if reward == 2 else reward),
        (2, np.bool_),
        (2, int),
        (2, lambda terminated: np.array([terminated])),
        (3, np.bool_),
        (3, np.array),
        (4, Info),
        (4, types.MappingProxyType),
    ],
)
def test_unusual_data_that_is_right_passes(place: int, change: Callable[[Any], Any], options: dict[str, Any]) -> None:
    sizes = {"batch_T": 12, "batch_B": 2, "n_batches": 1, "eval_n_envs": 1, "eval_max_steps": 12}
    compare(SerialSampler, unusual(place, change), RandomAgent, sampler=options, **sizes)


@pytest.mark.parametrize("space", [spaces.Dict({}), spaces.Tuple(())])
def test_an_observation_may_have_no_parts(space: Any) -> None:
    class Blind(CountingEnv):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space: Any = space

        def reset(self, **kwargs: Any) -> Any:
            return space.sample(), super().reset(**kwargs)[1]

        def step(self, action: Any) -> Any:
            return space.sample(), *super().step(action)[1:]

    with SerialSampler(Blind, batch_T=5, batch_B=2, max_decorrelation_steps=0) as sampler:
        sampler.initialize(RandomAgent())
        sampler.obtain_samples(0)
        samples, _ = sampler.obtain_samples(1)
    assert samples.env.reward.sum() > 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nan_and_inf_are_recorded_as_they_are_unless_told_otherwise(dtype: Any) -> None:
    class Endless(CountingEnv):
        def step(self, action: Any) -> Any:
            _, _, *rest = super().step(action)
            return np.array([NAN, -INF], dtype), NAN, *rest

    with SerialSampler(Endless, batch_T=3, batch_B=2, max_decorrelation_steps=0) as sampler:
        sampler.initialize(RandomAgent())
        samples, _ = sampler.obtain_samples(0)
    assert samples.env.reward.isnan().all()
    assert samples.env.observation[1:, :, 0].isnan().all()
    assert (samples.env.observation[1:, :, 1] == -INF).all()


# ---- what users see of it ------------------------------------------------------------------


def test_values_in_errors_are_brief() -> None:
    assert len(brief(list(range(1000)))) < 250
    assert brief(np.zeros(2, np.float32)) == "array([0., 0.], dtype=float32) (float32, shape (2,))"
    assert "\n" not in brief(np.zeros((5, 5)))
