"""Environments that write their observations in place, or into memory that others use too: the batches of a plain loop,
and errors that name them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from hypothesis import given
from hypothesis import strategies as st

from penstock import (
    AgentStep,
    AsyncSampler,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    SerialSampler,
    SpaceError,
    TrajInfo,
    WorkerError,
)
from penstock.envs import BatchedCartPole, CountingEnv, ScriptedGame
from penstock.envs.direct_steps import step_into_of
from penstock.vector import ShmVectorEnv

from ..against_loop import compare
from ..scale import examples
from ..support import Diary, collect_with, sampler_of
from ..toy_games import TurnGame
from ..vector.vector_support import NestedInPlace

SIZES: dict[str, Any] = {"batch_T": 12, "batch_B": 4, "n_batches": 3}


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


class Without(CountingEnv):
    step_into = None  # type: ignore[assignment]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"sampler": {"check_finite": True, "debug": True}},
    {"sampler": {"record_final_obs": False}},
    {"traj_info_cls": Diary},
    {"wait_reset": True, "sampler": {"debug": True}},
]


@pytest.mark.parametrize("env_fn", [CountingEnv, partial(CountingEnv, truncate=True), NestedInPlace, Walk])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
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
    for batch, _ in collect_with(SerialSampler, NestedInPlace, bootstrap_value=False, **options):
        position, goes_on = batch.env.observation.position, ~batch.env.done[:-1]
        assert position.dtype == np.float32
        assert goes_on.any()
        np.testing.assert_array_equal(position[1:][goes_on], batch.agent.action.move[:-1][goes_on])


# ---- batched environments ----------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_batched_environments_write_whole_rows(options: dict[str, Any]) -> None:
    env_fn = partial(BatchedCartPole, max_episode_steps=9)
    assert step_into_of(env_fn(num_envs=1), 0) is not None
    compare(SerialSampler, env_fn, RandomAgent, batched=True, **SIZES, **options)


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
    """Its 8th move writes or returns something wrong."""

    def __init__(self, returned: Any = "as it should", written: Any = None) -> None:
        super().__init__(length=20)
        self.returned, self.written = returned, written

    def step_into(self, out: Any, action: Any) -> Any:
        result = super().step_into(out, action)
        if self.count == 8 and self.written is not None:
            out[...] = self.written
        return self.returned if self.count == 8 and self.returned != "as it should" else result


FOUR = r"env.step_into of env_rank 2 must return four values .*: got "


@pytest.mark.parametrize(
    ("wrong", "message", "cause", "checks"),
    [
        ({"written": np.zeros(3)}, "could not broadcast", ValueError, {}),
        ({"written": np.nan}, "observation of env_rank 2 must be finite", SpaceError, {"check_finite": True}),
        ({"written": -5}, "observation of env_rank 2 must be in Box", SpaceError, {"debug": True}),
        ({"returned": (0, 1.0, False, False, {})}, FOUR + "5 values", SpaceError, {}),
        ({"returned": None}, FOUR + "None", SpaceError, {}),
        ({"returned": (1.0, "no", False, {})}, "terminated of env_rank 2 must be True or False", SpaceError, {}),
        ({"returned": (1.0, False, False, 3)}, "info .* of env_rank 2 .*must be a dict", SpaceError, {}),
        ({"returned": ("much", False, False, {})}, "reward of env_rank 2 must be a single number", SpaceError, {}),
        ({"returned": (None, True, False, {})}, "reward of env_rank 2 must be a single number", SpaceError, {}),
    ],
)
def test_an_error_names_the_environment(wrong: Any, message: str, cause: type[Exception], checks: Any) -> None:
    with sampler_of(
        SerialSampler, [partial(Wrong, **(wrong if b == 2 else {})) for b in range(4)], **checks
    ) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        with pytest.raises(WorkerError, match=message) as caught:
            sampler.obtain_samples(0)
    assert "env_rank 2" in str(caught.value)
    assert isinstance(caught.value.__cause__, cause)


def test_a_step_into_that_is_no_method_is_refused() -> None:
    env_fn = type("Wrong", (CountingEnv,), {"step_into": 3})
    with pytest.raises(WorkerError, match="step_into of env_rank 0 must be a method, got 3"):
        collect_with(SerialSampler, env_fn)


# ---- one buffer for several environments -------------------------------------------------------

BOARD, SHARED = np.zeros(2, np.float32), np.zeros(4, np.float32)  # workers have one each
#: What all environments of a process return, in the form that the kind of an environment names.
SURFACES: dict[str, Any] = {
    "list": [0.0, 0.0],
    "arrays": [np.zeros(1, np.float32), np.zeros(1, np.float32)],
    "tensor": torch.zeros(2),
    "view": np.zeros((2, 2), np.float32)[1],
    "transposed": np.zeros((2, 1), np.float64).T[0],
}
SPACE = spaces.Box(0, 99, (2,), np.float32)
NESTED = spaces.Dict(parts=spaces.Tuple([SPACE, SPACE]))


class OneBoard(gym.Env[Any, Any]):
    """Shows its number, drawn if none is given, and its count on the board of all environments; episodes of three
    steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, i: int | None = None, kind: str = "array", tells: bool = False) -> None:
        self.i, self.kind, self.tells, self.count, self.n_resets = i, kind, tells, 0, 0
        self.shown: Any = BOARD
        self.observation_space = {"parts": NESTED, "arrays": spaces.Box(0, 99, (2, 1), np.float32)}.get(kind, SPACE)

    def observe(self) -> Any:
        board = SURFACES.get(self.kind, BOARD)
        for j, number in enumerate((self.i, self.count)):
            board[j] = np.full(1, number, np.float32) if self.kind == "arrays" else number
        is_own = {
            "own": True,
            "only reset": self.count > 0,
            "only step": self.count == 0,
            "from the third episode on": self.n_resets < 3,
        }
        self.shown = board.copy() if is_own.get(self.kind) else board
        return {"parts": (self.shown.copy(), self.shown)} if self.kind == "parts" else self.shown

    def told(self) -> dict[str, Any]:
        """An info with the board."""
        return {"board": self.shown, "two": [self.shown, self.shown], "count": self.count} if self.tells else {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.i = self.i if seed is None or self.i is not None else int(self.np_random.integers(99))
        self.count, self.n_resets = 0, self.n_resets + 1
        return self.observe(), self.told()

    def step(self, action: Any) -> Any:
        self.count += 1
        return self.observe(), 0.0, self.count == 3, False, self.told()


#: Entries of `info` that show the board.
TOLD = {"env_info": {"board": np.zeros(2, np.float32), "two": np.zeros((2, 2), np.float32), "count": 0}}
telling = partial(OneBoard, tells=True)


class OneBoardGame(ScriptedGame):
    """Its agents see the same board, which is that of all games."""

    board: Any = SHARED

    def observe(self) -> Any:
        self.board[:] = *self.np_random.random(3), self.t
        return dict.fromkeys(super().observe(), self.board)


class OneListGame(OneBoardGame):
    board: ClassVar = [0.0] * 4


class OneBoardInTurns(TurnGame):
    """The same in turns."""

    def last(self, observe: bool = True) -> Any:
        SHARED[:], *rest = super().last(observe)
        return SHARED, *rest


class Mirror(RandomAgent):
    """Reports what it sees."""

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        step = super().step(observation, prev_action, prev_reward)
        return AgentStep(step.action, {"seen": np.array(observation)})


def two_policies() -> dict[str, Any]:
    return {"even": Mirror(), "odd": RandomAgent()}


def by_parity(agent: str) -> str:
    return ("even", "odd")[int(agent[1:]) % 2]


CHECKS = {"sampler": {"debug": True, "check_finite": True}}
FINITE = {"sampler": {"check_finite": True}}


@pytest.mark.parametrize(
    ("cls", "env_fn", "how"),
    [
        (SerialSampler, OneBoard, {}),
        (SerialSampler, OneBoard, CHECKS),
        (ParallelSampler, partial(OneBoard, kind="only reset"), {}),
        (SerialSampler, partial(OneBoard, kind="parts"), {"agent": RandomAgent}),
        (ParallelSampler, OneBoard, {"traj_info_cls": TrajInfo}),
        (ParallelSampler, OneBoard, {"traj_info_cls": TrajInfo, **CHECKS}),
        (GpuSampler, OneBoard, {}),
        (SerialSampler, telling, {**TOLD, "traj_info_cls": TrajInfo}),
        (ParallelSampler, telling, {**TOLD, **CHECKS, "traj_info_cls": TrajInfo}),
        (GpuSampler, partial(telling, kind="view"), {**TOLD, "traj_info_cls": TrajInfo}),
        (SerialSampler, partial(telling, kind="from the third episode on"), {**TOLD, "traj_info_cls": TrajInfo}),
        (ParallelSampler, partial(OneBoard, kind="only step"), {"wait_reset": True, "traj_info_cls": TrajInfo}),
        (AsyncSampler, partial(OneBoard, kind="list"), {"wait_reset": True, "agent": RandomAgent}),
        *(
            (SerialSampler, partial(OneBoard, kind=kind), {"traj_info_cls": cls, "agent": RandomAgent, **checks})
            for kind, cls, checks in product(SURFACES, (TrajInfo, Diary), ({}, FINITE))
        ),
        (SerialSampler, OneBoardGame, {}),
        (SerialSampler, OneBoardGame, {"agent": two_policies, "policy_of": by_parity}),
        (SerialSampler, OneListGame, {}),
        (SerialSampler, OneListGame, {"agent": two_policies, "policy_of": by_parity}),
        (ParallelSampler, OneBoardGame, {"traj_info_cls": TrajInfo}),
        (SerialSampler, OneBoardInTurns, {}),
        (ParallelSampler, OneBoardInTurns, {}),
    ],
)
def test_environments_that_share_a_buffer_are_recorded_as_if_each_had_its_own(cls: Any, env_fn: Any, how: Any) -> None:
    how = {"traj_info_cls": Diary, "batch_T": 7, "batch_B": 4, "eval_n_envs": 3, "eval_max_steps": 21, **how}
    compare(cls, env_fn, how.pop("agent", Mirror), n_batches=2, **how)


@pytest.mark.parametrize(
    ("mode", "kind"), [("NEXT_STEP", "tensor"), ("SAME_STEP", "list"), *product(["DISABLED"], ["array", *SURFACES])]
)
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_so_are_the_rows_of_a_vector_environment(mode: str, kind: str, on_failure: Any) -> None:
    envs_of = [partial(telling, i, kind) for i in range(3)]
    with ShmVectorEnv(envs_of, n_workers=1, autoreset_mode=mode, on_worker_failure=on_failure) as envs:
        seen, infos = envs.reset()
        assert seen.reshape(3, 2).tolist() == [[i, 0] for i in range(3)]
        counts = {"NEXT_STEP": [1, 2, 3, 0, 1, 2, 3], "SAME_STEP": [1, 2, 0, 1, 2, 0, 1], "DISABLED": [1, 2, 3]}[mode]
        for count in counts:
            observation, _, terminated, _, infos = envs.step(np.zeros(3, int))
            assert observation.reshape(3, 2).tolist() == [[i, count] for i in range(3)]
            told = infos
            if terminated.any() and mode == "SAME_STEP":
                assert [np.ravel(each).tolist() for each in infos["final_obs"]] == [[i, 3] for i in range(3)]
                told = infos["final_info"]
            if count or mode != "NEXT_STEP":
                boards = np.array([np.ravel(np.asarray(board)) for board in told["board"]])
                assert boards.tolist() == [[i, count or 3] for i in range(3)]
