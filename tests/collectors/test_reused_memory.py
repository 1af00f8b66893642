"""Environments that write into the same memory again: a trajectory info sees what was there before the step."""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from penstock import AgentStep, GpuSampler, ParallelSampler, RandomAgent, SerialSampler, TrajInfo
from penstock.columns.interface import Start, snapshot
from penstock.columns.single_columns import SingleColumns
from penstock.envs import NestedEnv
from penstock.testing import check_traj_info
from penstock.vector import ShmVectorEnv
from penstock.workers.control import ControlBlock, Progress

from ..against_loop import compare
from ..scale import quick_first
from ..support import Diary


@pytest.mark.slow
def test_the_kit_finds_nothing_wrong_with_a_diary() -> None:
    check_traj_info(Diary, NestedEnv)


def test_what_is_kept_is_a_copy_of_the_same_structure() -> None:
    value = {"a": np.zeros(2), "b": (np.ones(1), 3), "c": [np.zeros(1)], "d": "text"}
    copy = snapshot(value)
    for array in (value["a"], value["b"][0], value["c"][0]):
        array[...] = 7
    assert (copy["a"].tolist(), copy["b"][0].tolist(), copy["b"][1]) == ([0, 0], [1], 3)
    assert (copy["c"][0].tolist(), copy["d"], type(copy["b"])) == ([0], "text", tuple)


# ---- one buffer for several environments -------------------------------------------------------

BOARD = np.zeros(2, np.float32)  # workers have one each
SPACE = spaces.Box(0, 99, (2,), np.float32)


class OneBoard(gym.Env[Any, Any]):
    """Shows its number, drawn if none is given, and its count on the board of all environments; episodes of three
    steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, i: int | None = None, kind: str = "array") -> None:
        self.i, self.kind, self.count, self.shown = i, kind, 0, BOARD
        self.observation_space = spaces.Dict(parts=spaces.Tuple([SPACE, SPACE])) if kind == "parts" else SPACE

    def observe(self) -> Any:
        BOARD[:] = self.i, self.count
        self.shown = BOARD.copy() if self.kind == "own" or (self.kind == "only reset" and self.count) else BOARD
        return {"parts": (self.shown.copy(), self.shown)} if self.kind == "parts" else self.shown

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.i = self.i if seed is None or self.i is not None else int(self.np_random.integers(99))
        self.count = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self.observe(), 0.0, self.count == 3, False, {}


class OneBoardGame:
    """Two agents who see the same board, which is that of all games; games of three steps."""

    possible_agents = ("a0", "a1")
    metadata: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, i: int | None = None) -> None:
        self.env = OneBoard(i)

    def observation_space(self, agent: str) -> Any:
        return SPACE

    def action_space(self, agent: str) -> Any:
        return self.env.action_space

    def each(self, value: Any) -> dict[str, Any]:
        return dict.fromkeys(self.possible_agents, value)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        return self.each(self.env.reset(seed=seed)[0]), self.each({})

    def step(self, actions: Any) -> Any:
        observation, reward, terminated, *_ = self.env.step(0)
        self.agents = [] if terminated else self.agents
        return self.each(observation), self.each(reward), self.each(terminated), self.each(False), self.each({})

    def close(self) -> None:
        pass


class OneBoardInTurns(OneBoardGame):
    """The same without an end: the agents move in turns."""

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        super().reset(seed)

    @property
    def agent_selection(self) -> str:
        return f"a{self.env.count % 2}"

    def agent_iter(self) -> Any:
        yield self.agent_selection

    def last(self, observe: bool = True) -> Any:
        return self.env.observe(), 0.0, False, False, {}

    def step(self, action: Any) -> None:
        self.env.count += 1


class Mirror(RandomAgent):
    """Reports what it sees."""

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        step = super().step(observation, prev_action, prev_reward)
        return AgentStep(step.action, {"seen": np.array(observation)})


CHECKS = {"sampler": {"debug": True, "check_finite": True}}


@pytest.mark.parametrize(
    ("cls", "env_fn", "how"),
    quick_first(
        [
            (SerialSampler, OneBoard, {}),
            (SerialSampler, OneBoard, CHECKS),
            (ParallelSampler, partial(OneBoard, kind="only reset"), {}),
            (SerialSampler, partial(OneBoard, kind="parts"), {"agent": RandomAgent}),
            (ParallelSampler, OneBoard, {"traj_info_cls": TrajInfo}),
            (ParallelSampler, OneBoard, {"traj_info_cls": TrajInfo, **CHECKS}),
            (GpuSampler, OneBoard, {}),
            (SerialSampler, OneBoardGame, {}),
            (ParallelSampler, OneBoardGame, {"traj_info_cls": TrajInfo}),
            (SerialSampler, OneBoardInTurns, {}),
            (ParallelSampler, OneBoardInTurns, {}),
        ],
        3,
    ),
)
def test_environments_that_share_a_buffer_are_recorded_as_if_each_had_its_own(cls: Any, env_fn: Any, how: Any) -> None:
    how = {"traj_info_cls": Diary, "batch_T": 7, "batch_B": 4, "eval_n_envs": 3, "eval_max_steps": 21, **how}
    compare(cls, env_fn, how.pop("agent", Mirror), n_batches=2, **how)


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
@pytest.mark.parametrize("env_fn", [OneBoard, OneBoardGame])
def test_so_are_the_rows_of_a_vector_environment(env_fn: Any, mode: str) -> None:
    has_seats = env_fn is OneBoardGame
    if has_seats and mode != "SAME_STEP":
        pytest.skip("games begin again at once")
    fns = [partial(env_fn, i) for i in range(3)]
    with ShmVectorEnv(fns, n_workers=1, autoreset_mode=mode) as envs:
        i = np.repeat(np.arange(3), 1 + has_seats)
        envs.reset()
        counts = {"NEXT_STEP": [1, 2, 3, 0, 1, 2, 3], "SAME_STEP": [1, 2, 0, 1, 2, 0, 1], "DISABLED": [1, 2, 3]}[mode]
        for count in counts:
            observation, _, terminated, _, infos = envs.step(np.zeros(len(i), int))
            assert observation.tolist() == [[each, count] for each in i]
            if terminated.any() and mode == "SAME_STEP":
                assert [each.tolist() for each in infos["final_obs"]] == [[each, 3] for each in i]


def test_after_the_first_row_only_a_shared_buffer_is_copied() -> None:
    for kind, is_copied in (("own", False), ("array", True), ("only reset", True)):
        progress = Progress(ControlBlock(1, 1, shared=False), 0)
        envs = [OneBoard(i, kind) for i in range(2)]
        columns = SingleColumns(envs, range(2), progress)
        columns.reset([0, 1], [Start(0), Start(1)])
        for _ in range(2):
            columns.step([np.zeros(2, np.int64)])
        kept = [own is env.shown for own, env in zip(columns.observations, envs, strict=True)]
        assert kept == [not is_copied] * 2, kind
