"""Data that does not fit: a SpaceError naming field and environment, within the batch in which it happened."""

import warnings
from collections.abc import Callable
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
from penstock.buffers import NamedArrays
from penstock.collectors.acting import write_action
from penstock.envs import CountingEnv
from penstock.errors import brief

from ..scale import mostly_first, quick_first, scaled
from ..support import sampler_of

both = pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
NAN, INF = float("nan"), float("inf")


class Spoilt(CountingEnv):
    """Counts like its base, but `spoil` has a go at what the third step, and `spoil_reset` at what the
    second reset returns. An episode lasts three steps if it is a `short` one."""

    def __init__(
        self,
        spoil: Callable[..., Any] | None = None,
        spoil_reset: Callable[..., Any] | None = None,
        short: bool = False,
        nested: bool = False,
    ) -> None:
        super().__init__(length=3 if short else 1000, truncate=True)
        self.spoil, self.spoil_reset, self.nested, self.n_steps = spoil, spoil_reset, nested, 0
        if nested:
            parts = {"grid": self.observation_space, "goal": spaces.Tuple((spaces.Discrete(9), spaces.Box(-1, 1)))}
            self.observation_space = spaces.Dict(parts)
            self.counting_space = parts["grid"]

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


def tupled(*goal: Any) -> dict[str, Any]:
    return {"spoil": replacing(0, {"grid": np.zeros(2), "goal": goal}), "nested": True}


TOO_LARGE = np.array([1.0, 1e300])
HOLD = r"must have values that float32 can hold, got 1e\+300"
KEYS = r"observation of env_rank 3 must have the entries \['goal', 'grid'\], got "
PAIR = r"observation\['goal'\] of env_rank 3 must have the entries \[0, 1\], got "
FINITE, DEBUG = {"check_finite": True}, {"debug": True}
VALUES = r"env\.step of env_rank 3 must return five values \(observation, reward, terminated, truncated, info\)"
NUMBER = "the reward of env_rank 3 must be a single number, got "

#: name: (what is wrong with env_rank 3, options, what the error says)
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "observation of wrong shape": (
        observation(np.zeros(3, np.float32)),
        {},
        r"observation of env_rank 3 must have shape \(2,\), got \(3,\)",
    ),
    "observation of wrong dtype": (
        observation(np.array(["a", "b"])),
        {},
        "observation of env_rank 3 must have dtype float32, got <U1",
    ),
    "complex observation": (
        observation(np.zeros(2, complex)),
        {},
        "observation of env_rank 3 must have dtype float32, got complex128",
    ),
    "observation None": (observation(None), {}, r"observation of env_rank 3 must have shape \(2,\), got None"),
    "observation with a gradient": (
        observation(torch.zeros(2, requires_grad=True)),
        {},
        "observation of env_rank 3 cannot be converted to an array: Can't call numpy",
    ),
    "reward with a gradient": (reward(torch.tensor(0.5, requires_grad=True)), {}, f"{NUMBER}tensor"),
    "ragged observation": (observation([[1.0], [1.0, 2.0]]), {}, "observation of env_rank 3 is ragged"),
    "missing key": (
        {"spoil": replacing(0, {"grid": np.zeros(2, np.float32)}), "nested": True},
        {},
        r"observation of env_rank 3 must have the entries \['goal', 'grid'\], got \['grid'\]",
    ),
    "nested observation None": (
        {"spoil": replacing(0, None), "nested": True},
        {},
        r"observation of env_rank 3 must have the entries \['goal', 'grid'\], got None",
    ),
    "nested leaf of wrong dtype": (
        nested(goal=(2.5, (0.0,))),
        {},
        r"observation\['goal'\]\[0\] of env_rank 3 must have dtype int64, got float64",
    ),
    "NaN observation": (
        observation(np.array([1, NAN], np.float32)),
        FINITE,
        r"observation of env_rank 3 must be finite \(check_finite=True\), got nan at index \(1,\)",
    ),
    "inf in a nested observation": (
        nested(goal=(1, (-INF,))),
        FINITE,
        r"observation\['goal'\]\[1\] of env_rank 3 must be finite \(check_finite=True\), got -inf at index \(0,\)",
    ),
    "observation outside its space": (
        observation(np.array([1, -1], np.float32)),
        DEBUG,
        r"observation of env_rank 3 must be in Box.* \(debug=True\), "
        r"got array\(\[ 1\., -1\.\], dtype=float32\)",
    ),
    "final observation of wrong shape": (
        {**observation(np.zeros((2, 1), np.float32)), "short": True},
        {},
        r"the final observation of env_rank 3 must have shape \(2,\), got \(2, 1\)",
    ),
    "final observation of objects": (
        {**observation(np.array([None, 1.0])), "short": True},
        {},
        "the final observation of env_rank 3 must have dtype float32, got object",
    ),
    "final observation without a key": (
        {"spoil": replacing(0, {}), "nested": True, "short": True},
        {},
        r"the final observation of env_rank 3 must have the entries \['goal', 'grid'\], got \[\]",
    ),
    "final observation of wrong shape, not recorded": (
        {**observation(np.zeros((2, 1), np.float32)), "short": True},
        {"record_final_obs": False},
        r"the final observation of env_rank 3 must have shape \(2,\), got \(2, 1\)",
    ),
    "NaN final observation": (
        {**observation(np.array([NAN, 1], np.float32)), "short": True},
        FINITE,
        "the final observation of env_rank 3 must be finite",
    ),
    "final observation outside its space": (
        {**observation(np.array([-1, 1], np.float32)), "short": True},
        DEBUG,
        "the final observation of env_rank 3 must be in Box",
    ),
    "reset observation of wrong shape": (
        {"spoil_reset": replacing(0, np.zeros(1, np.float32)), "short": True},
        {},
        r"observation of env_rank 3 must have shape \(2,\), got \(1,\)",
    ),
    "reset without info": (
        {"spoil_reset": lambda result: result[0], "short": True},
        {},
        r"env\.reset of env_rank 3 must return a tuple \(observation, info\), got array\(",
    ),
    "reset with three values": (
        {"spoil_reset": lambda result: (*result, {}), "short": True},
        {},
        r"env\.reset of env_rank 3 must return a tuple \(observation, info\), got \(array\(.*\{\}\)",
    ),
    "reset with info None": (
        {"spoil_reset": replacing(1, None), "short": True},
        {},
        r"the info that env\.reset of env_rank 3 returned must be a dict, got None",
    ),
    "reward None": (reward(None), {}, NUMBER + "None"),
    "reward None at an episode's end": ({**reward(None), "short": True}, {}, NUMBER + "None"),
    "reward string": (reward("1"), {}, NUMBER + "'1'"),
    "reward of two elements": (reward(np.zeros(2)), {}, NUMBER + r"array\(\[0\., 0\.\]\) \(float64, shape \(2,\)\)"),
    "reward complex": (reward(1j), {}, NUMBER + "1j"),
    "reward NaN": (reward(NAN), FINITE, r"the reward of env_rank 3 must be finite \(check_finite=True\), got nan"),
    "reward inf": (
        reward(np.float32(-INF)),
        FINITE,
        r"the reward of env_rank 3 must be finite \(check_finite=True\), got .*-inf",
    ),
    "terminated None": ({"spoil": replacing(2, None)}, {}, "terminated of env_rank 3 must be True or False, got None"),
    "terminated array": (
        {"spoil": replacing(2, np.array([True, False]))},
        {},
        "terminated of env_rank 3 must be True or False, got array",
    ),
    "truncated string": ({"spoil": replacing(3, "no")}, {}, "truncated of env_rank 3 must be True or False, got 'no'"),
    "truncated float": ({"spoil": replacing(3, 1.0)}, {}, r"truncated of env_rank 3 must be True or False, got 1\.0"),
    "four values": ({"spoil": lambda result: result[:4]}, {}, VALUES + ": .*expected 5, got 4"),
    "six values": ({"spoil": lambda result: (*result, 1)}, {}, VALUES + ": too many values to unpack"),
    "no values": ({"spoil": lambda result: None}, {}, VALUES + ": cannot unpack non-iterable NoneType"),
    "info None": ({"spoil": replacing(4, None)}, {}, r"the info that env\.step of env_rank 3 returned must be a dict"),
    "too large": (observation(TOO_LARGE), {}, f"observation of env_rank 3 {HOLD}"),
    "too large in a list": (observation(TOO_LARGE.tolist()), {}, f"observation of env_rank 3 {HOLD}"),
    "too large at an end": (
        {**observation(TOO_LARGE), "short": True},
        {},
        f"the final observation of env_rank 3 {HOLD}",
    ),
    "too large in a nested leaf": (
        {"spoil": replacing(0, {"grid": TOO_LARGE, "goal": (3, np.zeros(1))}), "nested": True},
        {},
        rf"observation\['grid'\] of env_rank 3 {HOLD}",
    ),
    "reward too large": (reward(1e300), {}, r"the reward of env_rank 3 must be a number that float32 can hold, got 1e"),
    "reward in an array": (reward(np.ones(1)), {}, NUMBER + r".*: return reward\.item\(\)"),
    "reward in a list": (reward([1.0]), {}, NUMBER + r"\[1\.0\]$"),
    "dict": (observation({"a": 1.0, "b": 2.0}), {}, r"observation of env_rank 3 must have shape \(2,\), got a dict"),
    "a key too many": (nested(extra=1), {}, KEYS + r"\['grid', 'goal', 'extra'\]"),
    "no dict": ({**observation(np.zeros(2)), "nested": True}, {}, KEYS + "a ndarray"),
    "a tuple too long": (tupled(1, np.zeros(1), 2), {}, PAIR + "a tuple of 3"),
    "a tuple too short": (tupled(1), {}, PAIR + "a tuple of 1"),
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


IN_EVALUATION = [name for name in BAD if "not recorded" not in name]


@pytest.mark.parametrize("name", quick_first(IN_EVALUATION, 12))
def test_bad_data_is_named_in_evaluations_too(name: str) -> None:
    wrong, options, message = BAD[name]
    size = {"eval_n_envs": 2, "eval_max_steps": 20, "eval_env_kwargs": [others(wrong), wrong]}
    with spoilt_envs(SerialSampler, others(wrong), **size, **options) as sampler:
        sampler.initialize(RandomAgent())
        sampler.obtain_samples(0)
        with pytest.raises(WorkerError, match=r"env_rank 1, t=\d \(.*itr=3\)") as error:
            sampler.evaluate_agent(3)
    check_named(error, message.replace("env_rank 3", "env_rank 1"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reward NaN", "final observation of wrong shape", "action outside the space"])
def test_evaluations_in_processes(name: str) -> None:
    agent: Agent = RandomAgent()
    if name in BAD:
        wrong, options, message = BAD[name]
    else:
        wrong, options, agent = MARKED, DEBUG, Wild()
        message = r"the action of env_rank 3, given by the agent, must be in Discrete\(3\) \(debug=True\), got 7"
    size = {"eval_n_envs": 2, "eval_max_steps": 20, "eval_env_kwargs": [others(wrong), wrong]}
    with spoilt_envs(ParallelSampler, others(wrong), **size, **options) as sampler:
        sampler.initialize(agent)
        with pytest.raises(WorkerError, match=r"\(evaluation, itr=3\)") as error:
            sampler.evaluate_agent(3)
    check_named(error, message.replace("env_rank 3", "env_rank 1"))


@pytest.mark.slow
@both
@pytest.mark.parametrize(
    "name", ["observation of wrong shape", "reward None", "reward NaN", "info None", "four values"]
)
def test_bad_data_is_named_while_decorrelating(cls: type[Sampler], name: str) -> None:
    wrong, options, message = BAD[name]
    with (
        sampler_of(
            cls, Spoilt, batch_T=2, env_kwargs=[{}] * 3 + [wrong], max_decorrelation_steps=1000, **options
        ) as sampler,
        pytest.raises(WorkerError, match=r"while decorrelating env_rank 3 \(start-up\): ") as error,
    ):
        sampler.initialize(RandomAgent(), seed=0)
    check_named(error, message)


@both
@pytest.mark.parametrize("steps", quick_first([0, 50]))
def test_a_misshapen_first_observation_is_named_at_start_up(cls: type[Sampler], steps: int) -> None:
    class Misshapen(CountingEnv):
        def reset(self, **kwargs: Any) -> Any:
            observation, info = super().reset(**kwargs)
            return observation[:1], info

    envs = [CountingEnv, CountingEnv, Misshapen]
    with (
        cls(envs, batch_T=2, batch_B=3, n_workers=2, max_decorrelation_steps=steps) as sampler,
        pytest.raises(WorkerError, match=r"while resetting env_rank 2.*\(start-up\)") as error,
    ):
        sampler.initialize(RandomAgent())
    check_named(error, r"observation of env_rank 2 must have shape \(2,\), got \(1,\)")


@pytest.mark.slow
@both
def test_infinity_itself_is_recorded_as_it_is(cls: type[Sampler]) -> None:
    with sampler_of(cls, Spoilt, env_kwargs=observation(np.array([1.0, -INF]))) as sampler:
        sampler.initialize(RandomAgent())
        sampler.obtain_samples(0)
        assert sampler.samples_np.env.observation[3, :, 1].tolist() == [-INF] * 4


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
    """Gives an action that is in no space, once it sees the mark."""

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        action = super().step(observation, prev_action, prev_reward).action
        return AgentStep(self.spoil(action, observation[:, 1] == 99))

    def spoil(self, action: Any, marked: Any) -> Any:
        return np.where(marked, 7, action)


class Misshapen(Wild):
    def spoil(self, action: Any, marked: Any) -> Any:
        return action[:1] if marked.any() else action


class Ragged(Wild):
    def spoil(self, action: Any, marked: Any) -> Any:
        return [[0], [0, 1]] if marked.any() else action.tolist()


class Fractional(Wild):
    def spoil(self, action: Any, marked: Any) -> Any:
        return action + 0.5 if marked.any() else action.astype(np.int32)


@pytest.mark.slow
@both
@pytest.mark.parametrize(
    ("agent", "options", "message"),
    [
        (
            Wild(),
            DEBUG,
            r"the action of env_rank 3, given by the agent, must be in Discrete\(3\) \(debug=True\), got 7",
        ),
        (
            Misshapen(),
            {},
            r"agent\.step must return action with shape \((2|4),\) and dtype int64, as in .*, got \(1,\)",
        ),
        (Ragged(), {}, r"action cannot be converted to an array: ValueError"),
        (
            Fractional(),
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


class Dividing(Agent):
    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        return AgentStep(observation[:, 1] / 2)


@both
def test_actions_of_another_kind_are_refused_before_any_worker_starts(cls: type[Sampler]) -> None:
    with (
        spoilt_envs(cls, {}) as sampler,
        pytest.raises(SpaceError, match="action of column 0 must have dtype int64, as in the action space, got"),
    ):
        sampler.initialize(Dividing())


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


# ---- what users see of it ------------------------------------------------------------------


class Adding(TrajInfo):
    def step(self, observation: Any, action: Any, reward: Any, *rest: Any) -> None:
        self.Twice = 2 * float(reward)

    def terminate(self, final_observation: Any) -> None:
        self.Last = final_observation + np.zeros(2)


@pytest.mark.parametrize("name", ["reward None", "final observation of wrong shape"])
def test_a_traj_info_gets_only_what_has_been_checked(name: str) -> None:
    wrong, options, message = BAD[name]
    with sampler_of(
        SerialSampler, Spoilt, batch_T=2, env_kwargs=[others(wrong)] * 3 + [wrong], traj_info_cls=Adding, **options
    ) as sampler:
        sampler.initialize(RandomAgent())
        sampler.obtain_samples(0)
        with pytest.raises(WorkerError) as error:
            sampler.obtain_samples(1)
    check_named(error, message)


def test_values_in_errors_are_brief() -> None:
    assert len(brief(list(range(1000)))) < 250
    assert brief(np.zeros(2, np.float32)) == "array([0., 0.], dtype=float32) (float32, shape (2,))"
    assert "\n" not in brief(np.zeros((5, 5)))
