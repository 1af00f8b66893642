"""Environments that write their observations in place: the batches of a plain loop that calls `step`, and errors that
name them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from hypothesis import given
from hypothesis import strategies as st

from penstock import ParallelSampler, RandomAgent, SerialSampler, SpaceError, WorkerError
from penstock.envs import BatchedCartPole, CountingEnv, NestedEnv
from penstock.envs.direct_steps import cells_of, step_into_of

from ..against_loop import compare
from ..scale import examples, quick_first
from ..support import Diary, collect_with, sampler_of
from .batches import Batch

SIZES: dict[str, Any] = {"batch_T": 12, "batch_B": 4, "n_batches": 3}


class Nested(NestedEnv):
    """A NestedEnv that writes in place."""

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
        self.at = min(11, self.at + 2 * int(action) - 1)
        return self.at, float(self.at), self.at == 3, False, {}

    def step_into(self, out: Any, action: Any) -> Any:
        out[...], *rest = self.step(action)
        return tuple(rest)


class Pictures(CountingEnv):
    """Pictures of its count, and the outs that it got."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 255, (5, 4, 2), np.uint8)
        self.shapes: set[Any] = set()

    def observe(self) -> Any:
        return np.arange(40, dtype=np.uint8).reshape(5, 4, 2) + np.uint8(self.count)

    def step_into(self, out: Any, action: Any) -> Any:
        result = super().step_into([0, 0], action)
        self.shapes.add((out.shape, str(out.dtype), out.flags.c_contiguous, out.flags.writeable))
        out[...] = self.observe()
        return result


class Without(CountingEnv):
    step_into = None  # type: ignore[assignment]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"sampler": {"check_finite": True, "debug": True}},
    {"sampler": {"record_final_obs": False}},
    {"traj_info_cls": Diary},
    {"wait_reset": True, "sampler": {"debug": True}},
]


@pytest.mark.parametrize("env_fn", [CountingEnv, partial(CountingEnv, truncate=True), Nested, Walk, Pictures])
@pytest.mark.parametrize("options", quick_first(OPTIONS), ids=str)
def test_batches_are_those_of_a_plain_loop_that_calls_step(env_fn: Any, options: dict[str, Any]) -> None:
    assert step_into_of(env_fn(), 0) is not None
    compare(SerialSampler, env_fn, RandomAgent, **SIZES, **options)


@examples(15, 30)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    classes=st.lists(st.sampled_from([CountingEnv, Without]), min_size=4, max_size=4),
    batch_T=st.integers(1, 9),
    truncate=st.booleans(),
    wait_reset=st.booleans(),
)
def test_some_environments_may_write_in_place(
    lengths: list[int], classes: list[Any], batch_T: int, truncate: bool, wait_reset: bool
) -> None:
    env_fns = [partial(cls, length, truncate) for cls, length in zip(classes, lengths, strict=False)]
    sizes = {"batch_T": batch_T, "batch_B": len(lengths), "n_batches": 3}
    compare(SerialSampler, env_fns, RandomAgent, wait_reset=wait_reset, **sizes)


def test_what_is_written_in_place_has_the_dtype_that_is_recorded() -> None:
    options = {"observation_dtype": np.float32, "env_info": {"count": 0}}
    for batch, _ in collect_with(SerialSampler, Nested, bootstrap_value=False, **options):
        position, goes_on = batch.env.observation.position, ~batch.env.done[:-1]
        assert position.dtype == np.float32
        assert goes_on.any()
        np.testing.assert_array_equal(position[1:][goes_on], batch.agent.action.move[:-1][goes_on])


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


@pytest.mark.parametrize("options", quick_first(OPTIONS[:3]), ids=str)
def test_batched_environments_write_whole_rows(options: dict[str, Any]) -> None:
    env_fn = partial(BatchedCartPole, max_episode_steps=9)
    assert step_into_of(env_fn(num_envs=1), 0) is not None
    compare(SerialSampler, env_fn, RandomAgent, batched=True, **SIZES, **options)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda seen: {**seen, "at": seen["at"][:, :1]}, "must have shape"),
        (lambda seen: {**seen, "both": (seen["both"][0] + 0.5, seen["both"][1])}, "same_kind"),
    ],
)
def test_a_batched_environment_with_wrong_observations_is_refused(wrong: Any, message: str) -> None:
    with pytest.raises(WorkerError, match=f"env_rank 0.*{message}"):
        collect_with(SerialSampler, partial(Batch, wrong=wrong), batched=True)


# ---- which method is called --------------------------------------------------------------------


class NewStep(CountingEnv):
    def step(self, action: Any) -> Any:
        return super().step(action)


class NewBoth(NewStep):
    def step_into(self, out: Any, action: Any) -> Any:
        return super().step_into(out, action)


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
    cls = ParallelSampler if how == "raises" else SerialSampler
    env_fns = [partial(Wrong, how, 8 if b == 2 else 10**9) for b in range(4)]
    checks = {"check_finite": how == "writes NaN", "debug": how == "leaves its space"}
    with sampler_of(cls, env_fns, **checks) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        with pytest.raises(WorkerError, match=message) as caught:
            sampler.obtain_samples(0)
    assert "env_rank 2" in str(caught.value)
    assert isinstance(caught.value.__cause__, cause)


def test_a_step_into_that_is_no_method_is_refused() -> None:
    env_fn = type("Wrong", (CountingEnv,), {"step_into": 3})
    with pytest.raises(WorkerError, match="step_into of env_rank 0 must be a method, got 3"):
        collect_with(SerialSampler, env_fn)
