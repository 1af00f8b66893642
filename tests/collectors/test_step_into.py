"""Environments that write their observations in place: the same batches as with `step`, and errors that name them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from hypothesis import given
from hypothesis import strategies as st

from penstock import (
    ParallelSampler,
    RandomAgent,
    ResetCollector,
    SerialSampler,
    SpaceError,
    TrajInfo,
    WaitResetCollector,
    WorkerError,
)
from penstock.envs import BatchedCartPole, CountingEnv, NestedEnv, SameStep
from penstock.envs.direct_steps import cells_of, step_into_of

from ..scale import examples, quick_first


class Nested(NestedEnv):
    """A NestedEnv that writes in place."""

    def step(self, action: Any) -> Any:
        return super().step(action)

    def step_into(self, out: Any, action: Any) -> Any:
        observation, *rest = super().step(action)
        out["position"][...] = observation["position"]
        out["camera"][...] = observation["camera"]
        out["goal"][0][...] = observation["goal"][0]
        out["goal"][1][...] = observation["goal"][1]
        return tuple(rest)


class Walk(gym.Env[Any, Any]):
    """A random walk over the cells of a Discrete space; ends at the first one."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = spaces.Discrete(9, start=3), spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at = int(self.np_random.integers(4, 12))
        return self.at, {}

    def step(self, action: Any) -> Any:
        return self._move(action)

    def step_into(self, out: Any, action: Any) -> Any:
        out[...], *rest = self._move(action)
        return tuple(rest)

    def _move(self, action: Any) -> Any:
        self.at = min(11, self.at + 2 * int(action) - 1)
        return self.at, float(self.at), self.at == 3, False, {}


class Pictures(CountingEnv):
    """Pictures of its count, and the outs that it got."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.observation_space = spaces.Box(0, 255, (5, 4, 2), np.uint8)
        self.shapes: set[Any] = set()

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._picture(), super().reset(seed=seed)[1]

    def step(self, action: Any) -> Any:
        rest = super().step_into([0, 0], action)
        return self._picture(), *rest

    def step_into(self, out: Any, action: Any) -> Any:
        result = super().step_into([0, 0], action)
        self.shapes.add((out.shape, str(out.dtype), out.flags.c_contiguous, out.flags.writeable))
        out[...] = self._picture()
        return result

    def _picture(self) -> Any:
        return np.arange(40, dtype=np.uint8).reshape(5, 4, 2) + np.uint8(self.count)


def hiding(cls: Any) -> Any:
    """The same environments, which only have `step`: a subclass overrides it."""
    return type(f"Hiding{cls.__name__}", (cls,), {"step": partialmethod(cls.step)})


class Watching(TrajInfo):
    """Notes all that it is given."""

    def __init__(self, discount: float = 1.0) -> None:
        super().__init__(discount)
        self.Log: list[Any] = []

    def step(self, observation: Any, *args: Any) -> None:
        super().step(observation, *args)
        self.Log.append(repr(jsonable(observation)))

    def terminate(self, final_observation: Any) -> None:
        self.Log.append(repr(jsonable(final_observation)))


def jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: jsonable(value[key]) for key in sorted(value)}
    return [jsonable(part) for part in value] if isinstance(value, tuple) else np.asarray(value).tolist()


def sample(sampler_cls: Any, env_fn: Any, n_batches: int = 3, **kwargs: Any) -> list[Any]:
    """Everything that the sampler returns, as bytes and text."""
    found: list[Any] = []
    kwargs = {"batch_T": 12, "batch_B": 4, "max_decorrelation_steps": 5, **kwargs}
    with sampler_cls(env_fn, **kwargs) as sampler:
        sampler.initialize(RandomAgent(), seed=5)
        for itr in range(n_batches):
            _, infos = sampler.obtain_samples(itr)
            found += [(name, leaf.tobytes()) for name, leaf in sampler.samples_np.leaves()]
            found.append(repr([vars(info) for info in infos]))
    return found


ENVS: list[Any] = [CountingEnv, partial(CountingEnv, truncate=True), Nested, Walk, Pictures]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"check_finite": True, "debug": True},
    {"record_final_obs": False},
    {"observation_dtype": np.float32, "env_info": {"count": 0}},
    {"traj_info_cls": Watching},
    {"collector_cls": WaitResetCollector, "debug": True},
]


def both(env_fn: Any) -> tuple[Any, Any]:
    """`env_fn`, and one whose environments only have `step`."""
    if isinstance(env_fn, partial):
        return env_fn, partial(hiding(env_fn.func), **env_fn.keywords)
    return env_fn, hiding(env_fn)


@pytest.mark.parametrize("env_fn", ENVS)
@pytest.mark.parametrize("options", quick_first(OPTIONS), ids=str)
def test_batches_are_equal_bit_for_bit(env_fn: Any, options: dict[str, Any]) -> None:
    into, plain = both(env_fn)
    assert step_into_of(into(), 0) is not None
    assert step_into_of(plain(), 0) is None
    assert sample(SerialSampler, into, **options) == sample(SerialSampler, plain, **options)


@examples(15, 30)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    has_into=st.lists(st.booleans(), min_size=4, max_size=4),
    batch_T=st.integers(1, 9),
    truncate=st.booleans(),
    collector_cls=st.sampled_from([ResetCollector, WaitResetCollector]),
)
def test_some_environments_may_write_in_place(
    lengths: list[int], has_into: list[bool], batch_T: int, truncate: bool, collector_cls: Any
) -> None:
    size: dict[str, Any] = {"batch_T": batch_T, "batch_B": len(lengths), "collector_cls": collector_cls}
    classes = [CountingEnv if into else hiding(CountingEnv) for into, _ in zip(has_into, lengths, strict=False)]
    mixed, plain = (
        [partial(cls, length, truncate) for cls, length in zip(some, lengths, strict=True)]
        for some in (classes, [hiding(CountingEnv)] * len(lengths))
    )
    assert sample(SerialSampler, mixed, **size) == sample(SerialSampler, plain, **size)


def test_out_is_a_cell_of_the_samples() -> None:
    with SerialSampler(Pictures, batch_T=4, batch_B=3) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        sampler.obtain_samples(0)
        assert sampler.get_attr("shapes") == [{((5, 4, 2), "uint8", True, True)}] * 3


@pytest.mark.parametrize("shape", [(), (3,), (2, 1)])
def test_cells_are_views(shape: tuple[int, ...]) -> None:
    arrays = {"a": np.zeros((2, 3, *shape)), "b": (np.zeros((2, 3, *shape), np.int8), {}, ())}
    cells = cells_of(arrays, 1, 3)
    assert len(cells) == 3
    for b, cell in enumerate(cells):
        cell["a"][...] = b
        cell["b"][0][...] = b + 1
        assert cell["b"][1:] == ({}, ())
    wanted = np.zeros((2, 3, *shape))
    wanted[1].T[...] = [0, 1, 2]
    assert np.array_equal(arrays["a"], wanted)  # type: ignore[arg-type]
    wanted[1].T[...] = [1, 2, 3]
    assert np.array_equal(arrays["b"][0], wanted)  # type: ignore[arg-type]


# ---- batched environments ----------------------------------------------------------------------


class Rows(SameStep):
    """Counters in a Dict, with rewards, infos and episodes of three or four steps."""

    def __init__(self, num_envs: int, wrong: str = "") -> None:
        from gymnasium.vector.utils import batch_space

        self.num_envs, self.wrong = num_envs, wrong
        parts = (spaces.Box(0, 9, (2,), np.float32), spaces.Box(0, 9, (1,), np.int64))
        self.single_observation_space = spaces.Dict({"a": parts[0], "b": spaces.Tuple((parts[1],))})
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def _observation(self) -> Any:
        return {"a": np.stack([self.at] * 2, 1).astype(np.float32), "b": (self.at[:, None].copy(),)}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.at = np.zeros(self.num_envs, np.int64)
        self.length = np.array([3 + each % 2 for each in seed])
        return self._observation(), {}

    def advance(self, actions: Any) -> Any:
        self.at += 1
        observation, over = self._observation(), self.at >= self.length
        if self.wrong == "shape":
            observation["a"] = observation["a"][:, :1]
        if self.wrong == "dtype":
            observation["b"] = (self.at[:, None] + 0.5,)
        return observation, self.at * 1.0, over, np.zeros_like(over), {"at": self.at.copy()}

    def reset_rows(self, rows: Any) -> Any:
        self.at[rows] = 0
        observation = self._observation()
        return {"a": observation["a"][rows], "b": (observation["b"][0][rows],)}, {}


BATCHED: list[Any] = [partial(BatchedCartPole, max_episode_steps=9), Rows]


@pytest.mark.parametrize("env_fn", BATCHED)
@pytest.mark.parametrize(
    "options", quick_first([{}, {"check_finite": True, "debug": True}, {"record_final_obs": False}]), ids=str
)
def test_batched_environments_write_whole_rows(env_fn: Any, options: dict[str, Any]) -> None:
    into, plain = both(env_fn)
    assert step_into_of(into(num_envs=1), 0) is not None
    kwargs = {"batched": True, **options}
    wanted = sample(SerialSampler, plain, **kwargs)
    assert sample(SerialSampler, into, **kwargs) == wanted
    if not options:
        assert sample(ParallelSampler, into, n_workers=2, **kwargs) == wanted


@pytest.mark.parametrize(("wrong", "message"), [("shape", "must have shape"), ("dtype", "same_kind")])
def test_a_batched_environment_with_wrong_observations_is_refused(wrong: str, message: str) -> None:
    with pytest.raises(WorkerError, match=f"env_rank 0.*{message}"):
        sample(SerialSampler, partial(Rows, wrong=wrong), batched=True)


# ---- which method is called --------------------------------------------------------------------


class NewStep(CountingEnv):
    def step(self, action: Any) -> Any:
        return super().step(action)


class NewBoth(NewStep):
    def step_into(self, out: Any, action: Any) -> Any:
        return super().step_into(out, action)


class Without(CountingEnv):
    step_into = None  # type: ignore[assignment]


class Mixin:
    def step_into(self, out: Any, action: Any) -> Any:
        return 0


class Mixed(Mixin, NewStep):
    pass


@pytest.mark.parametrize(
    ("make", "is_used"),
    [
        (CountingEnv, True),
        (NewStep, False),
        (NewBoth, True),
        (type("Inheriting", (NewBoth,), {}), True),
        (Without, False),
        (Mixed, True),
        (partial(gym.make, "CartPole-v1"), False),
        (lambda: TimeLimit(CountingEnv(), 3), False),
    ],
)
def test_step_into_is_used_unless_step_is_newer(make: Callable[[], Any], is_used: bool) -> None:
    assert (step_into_of(make(), 0) is not None) == is_used


def test_a_step_that_is_set_on_the_environment_is_used() -> None:
    env = CountingEnv()
    env.step = lambda action: None  # type: ignore[method-assign, assignment, return-value]
    assert step_into_of(env, 0) is None


# ---- errors ------------------------------------------------------------------------------------


class Wrong(CountingEnv):
    """Fails in `step_into`, in the environment that moves for the `at`-th time."""

    def __init__(self, how: str, at: int = 8) -> None:
        super().__init__(dtype=np.float32, length=20)
        self.how, self.at = how, at

    def step_into(self, out: Any, action: Any) -> Any:
        result: Any = super().step_into(out, action)
        if self.count < self.at:
            return result
        if self.how == "raises":
            raise RuntimeError("the game has crashed")
        if self.how == "writes a wrong shape":
            out[...] = np.zeros(3)
        if self.how == "writes NaN":
            out[0] = np.nan
        if self.how == "leaves its space":
            out[0] = -5
        wrong = {
            "five values": (out, *result),
            "none": None,
            "flag": (1.0, "no", False, {}),
            "info": (1.0, False, False, 3),
            "reward": ("much", False, False, {}),
            "end without reward": (None, True, False, {}),
        }
        return wrong.get(self.how, result)


@pytest.mark.parametrize(
    ("how", "message", "cause"),
    [
        ("raises", "the game has crashed", RuntimeError),
        ("writes a wrong shape", "could not broadcast", ValueError),
        ("writes NaN", "observation of env_rank 2 must be finite", SpaceError),
        ("leaves its space", "observation of env_rank 2 must be in Box", SpaceError),
        ("five values", "env.step_into of env_rank 2 must return four values .*: got 5 values", SpaceError),
        ("none", "env.step_into of env_rank 2 must return four values .*: got None", SpaceError),
        ("flag", "terminated of env_rank 2 must be True or False", SpaceError),
        ("info", "info .* of env_rank 2 .*must be a dict", SpaceError),
        ("reward", "reward of env_rank 2 must be a single number", SpaceError),
        ("end without reward", "reward of env_rank 2 must be a single number", SpaceError),
    ],
)
def test_an_error_names_the_environment(how: str, message: str, cause: type[Exception]) -> None:
    env_fns = [partial(Wrong, how, 8 if b == 2 else 10**9) for b in range(4)]
    checks = {"check_finite": how == "writes NaN", "debug": how == "leaves its space"}
    with pytest.raises(WorkerError, match=message) as caught:
        sample(SerialSampler, env_fns, max_decorrelation_steps=0, **checks)
    assert "env_rank 2" in str(caught.value)
    assert isinstance(caught.value.__cause__, cause)


def test_an_error_in_a_process_names_the_environment() -> None:
    env_fns = [partial(Wrong, "raises", 8 if b == 2 else 10**9) for b in range(4)]
    with pytest.raises(WorkerError, match=r"(?s)env_rank 2.*the game has crashed"):
        sample(ParallelSampler, env_fns, n_workers=2, max_decorrelation_steps=0)


def test_a_step_into_that_is_no_method_is_refused() -> None:
    env_fn = type("Wrong", (CountingEnv,), {"step_into": 3})
    with pytest.raises(WorkerError, match="step_into of env_rank 0 must be a method, got 3"):
        sample(SerialSampler, env_fn)
