"""Environments that write into the same memory again: a trajectory info sees what was there before the step."""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from penstock import (
    AgentStep,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    SerialSampler,
)
from penstock.columns.interface import Start, snapshot
from penstock.columns.single_columns import SingleColumns
from penstock.testing import check_traj_info
from penstock.vector import ShmVectorEnv
from penstock.workers.control import ControlBlock, Progress

from ..scale import quick_first
from ..support import Diary, sampler_of


class Plain(gym.Env[Any, Any]):
    """Observes its count of steps, in a dict; episodes of five."""

    observation_space = spaces.Dict({"count": spaces.Box(0, 9, (1,), np.float32), "n": spaces.Discrete(9)})
    action_space = spaces.Dict({"push": spaces.Box(-1, 1, (2,), np.float32)})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self.observe(), 1.0, self.count == 5, False, {}

    def observe(self) -> Any:
        return {"count": np.full(1, self.count, np.float32), "n": self.count}


@pytest.mark.slow
def test_the_kit_finds_nothing_wrong_with_a_diary() -> None:
    check_traj_info(Diary, Plain)


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
    """Shows its number and its count on the board of all environments; episodes of three steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, i: int, kind: str = "array") -> None:
        self.i, self.kind, self.count, self.shown = i, kind, 0, BOARD
        self.observation_space = spaces.Dict(parts=spaces.Tuple([SPACE, SPACE])) if kind == "parts" else SPACE

    def observe(self) -> Any:
        BOARD[:] = self.i, self.count
        self.shown = BOARD.copy() if self.kind == "own" or (self.kind == "only reset" and self.count) else BOARD
        return {"parts": (self.shown.copy(), self.shown)} if self.kind == "parts" else self.shown

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.count = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self.observe(), 0.0, self.count == 3, False, {}


class OneBoardGame:
    """Two agents who see the same board, which is that of all games; games of three steps."""

    possible_agents = ("a0", "a1")
    metadata: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, i: int) -> None:
        self.env = OneBoard(i)

    def observation_space(self, agent: str) -> Any:
        return SPACE

    def action_space(self, agent: str) -> Any:
        return self.env.action_space

    def each(self, value: Any) -> dict[str, Any]:
        return dict.fromkeys(self.possible_agents, value)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        return self.each(self.env.reset()[0]), self.each({})

    def step(self, actions: Any) -> Any:
        observation, reward, terminated, *_ = self.env.step(0)
        self.agents = [] if terminated else self.agents
        return self.each(observation), self.each(reward), self.each(terminated), self.each(False), self.each({})

    def close(self) -> None:
        pass


class OneBoardInTurns(OneBoardGame):
    """The same without an end: the agents move in turns."""

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        super().reset()

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


def one_board_of(cls: Any, env_fn: Any = OneBoard, **kwargs: Any) -> Any:
    kind = kwargs.pop("kind", {})
    kinds = [{"i": i, **kind} for i in range(4)]
    return sampler_of(cls, env_fn, batch_T=7, record_final_obs=True, env_kwargs=kinds, **kwargs)


@pytest.mark.parametrize(
    ("cls", "kind", "how"),
    quick_first(
        [
            (SerialSampler, "array", {}),
            (SerialSampler, "parts", {"max_decorrelation_steps": 5}),
            (ParallelSampler, "only reset", {}),
            (ParallelSampler, "array", {"traj_info_cls": Diary}),
            (ParallelSampler, "array", {"debug": True, "check_finite": True}),
            (GpuSampler, "array", {}),
        ],
        3,
    ),
)
def test_environments_that_share_a_buffer_are_recorded_as_if_each_had_its_own(cls: Any, kind: str, how: Any) -> None:
    with one_board_of(cls, kind={"kind": kind}, **how) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        for itr in range(2):
            sampler.obtain_samples(itr)
            env = sampler.samples_np.env
            for name in ("observation", "final_obs", "bootstrap_obs"):
                shown = env[name]
                for seen in (shown.parts["_0"], shown.parts["_1"]) if kind == "parts" else [shown]:
                    where = env.done if name == "final_obs" else np.ones(seen.shape[:-1], np.bool_)
                    assert (seen[..., 0] == np.arange(4))[where].all(), name
                    counts = seen[..., 1]
                    if name == "final_obs":
                        assert (counts[where] == 3).all()
                    elif name == "observation":
                        first = counts[0] if "max_decorrelation_steps" in how else (0 if itr == 0 else 1)
                        assert (counts == (first + np.arange(7)[:, None]) % 3).all()


@pytest.mark.parametrize("debug", [False, True])
def test_so_they_are_evaluated(debug: bool) -> None:
    how = {"eval_n_envs": 3, "eval_max_steps": 21, "eval_env_kwargs": [{"i": i} for i in range(3)], "debug": debug}
    with one_board_of(SerialSampler, traj_info_cls=Diary, **how) as sampler:
        sampler.initialize(Mirror(), seed=0)
        infos = sampler.evaluate_agent(0)
    assert len(infos) == 6
    for info in infos:
        i = info.end[0]
        for seen in (info.observations, [each.seen for each in info.agent_infos], [info.end]):
            first = 3 if seen[0] is info.end else 0
            assert [each.tolist() for each in seen] == [[i, first + t] for t in range(len(seen))]


@pytest.mark.parametrize("cls", quick_first([SerialSampler, ParallelSampler]))
def test_so_are_games_of_several_agents_who_all_see_one_array(cls: Any) -> None:
    with one_board_of(cls, OneBoardGame) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        for itr in range(2):
            sampler.obtain_samples(itr)
            env, i = sampler.samples_np.env, np.repeat(np.arange(4), 2)
            assert (env.observation[..., 0] == i).all()
            assert (env.observation[..., 1] == (itr + np.arange(7)[:, None]) % 3).all()
            assert (env.final_obs == np.stack([i, np.full(8, 3)], 1))[env.done].all()


@pytest.mark.parametrize("cls", quick_first([SerialSampler, ParallelSampler]))
def test_so_are_games_in_turns(cls: Any) -> None:
    with one_board_of(cls, OneBoardInTurns) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        for itr in range(2):
            sampler.obtain_samples(itr)
            env = sampler.samples_np.env
            assert env.valid[:6].all()
            for t, column in zip(*env.valid.nonzero(), strict=True):
                env_rank, agent = divmod(int(column), 2)
                first = env.observation[0, column, 1]
                assert env.observation[t, column].tolist() == [env_rank, first + 2 * t]
                assert first % 2 == agent


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
