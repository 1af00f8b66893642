"""How environments of several agents are recognized, and what a sampler sees of them."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from functools import partial
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from penstock.envs import build_example_env, env_factories
from penstock.envs.factory import EnvFactory
from penstock.envs.seats import OneSeat, ParallelView, SeatRank, is_parallel, registered
from penstock.envs.toy import CountingEnv, ScriptedGame
from penstock.errors import ConfigError, SpaceError

from ..toy_games import Ghosts


class Turns(ScriptedGame):
    def agent_iter(self) -> Any:
        return iter(())


class Spaceless:
    def step(self, action: Any) -> None:
        """Nothing happens."""


def test_environments_of_several_agents_are_recognized_by_what_they_have() -> None:
    assert is_parallel(ScriptedGame())
    for other in (CountingEnv(), Turns(), Spaceless(), None, 3, gym.Wrapper(CountingEnv())):
        assert not is_parallel(other)


def test_the_rank_of_a_seat_is_a_number_that_names_the_agent() -> None:
    rank = SeatRank(7, "adversary_2")
    assert rank == 7
    assert hash(rank) == hash(7)
    assert rank < 8
    assert int(rank).__class__ is int
    assert f"{rank}" == str(rank) == repr(rank) == f"{rank:>3}" == "7, agent 'adversary_2'"
    assert np.asarray([rank], np.int64).tolist() == [7]
    assert str(SeatRank(0, 3)) == "0, agent 3"
    for same in (copy.copy(rank), copy.deepcopy(rank), pickle.loads(pickle.dumps(rank))):
        assert (same, same.agent_id) == (7, "adversary_2")


def test_a_view_has_the_agents_and_their_spaces() -> None:
    game = ScriptedGame(2)
    view = ParallelView(game)
    assert view.possible_agents == ["a0", "a1"]
    assert view.spaces["a1"] == (game.observation_space("a1"), game.action_space("a1"))
    assert view.step == game.step  # nothing is between
    observations, infos = view.reset(seed=3)
    assert set(observations) == set(infos) == set(view.agents) <= {"a0", "a1"}
    assert view.unwrapped is game
    assert view.metadata is game.metadata


@pytest.mark.parametrize("possible", [[], None, ["a0", "a0"], ()])
def test_the_agents_must_be_listed_once(possible: Any) -> None:
    game = ScriptedGame()
    game.possible_agents = possible
    if possible is None:
        del game.possible_agents
    with pytest.raises(ConfigError, match=r"possible_agents of ScriptedGame must name each agent once, .* fixed list"):
        ParallelView(game)


def test_spaces_must_be_spaces() -> None:
    class Wrong(ScriptedGame):
        def action_space(self, agent: str) -> Any:
            return 3 if agent == "a1" else super().action_space(agent)

    with pytest.raises(ConfigError, match="the action_space of agent 'a1' must be a gymnasium space, got 3"):
        ParallelView(Wrong())


def test_the_mask_of_an_info_becomes_a_part_of_the_observation() -> None:
    view = ParallelView(ScriptedGame(2, [{"a0": "die"}, {}], mask=True), mask_key="action_mask")
    space = view.spaces["a0"][0]
    assert set(space) == {"observation", "action_mask"}
    observations, _ = view.reset(seed=0)
    assert observations["a0"]["action_mask"].tolist() == [1, 1, 1]
    assert space.contains(observations["a0"])

    def forget(agent: str) -> Any:
        plain = view.env.step(dict.fromkeys(view.agents, 0))
        plain[4].pop(agent)
        view.env.step = lambda actions: plain
        return view.step({})

    observations, _, terminated, *_ = forget("a0")  # who has ended needs no mask
    assert terminated["a0"]
    assert not observations["a0"]["action_mask"].any()
    view = ParallelView(ScriptedGame(2, [{"a0": "die"}, {}], mask=True), mask_key="action_mask")
    view.reset(seed=0)
    with pytest.raises(SpaceError, match=r"^agent 'a1': info has no action mask 'action_mask'"):
        forget("a1")


def test_the_state_is_a_copy() -> None:
    class OneState(ScriptedGame):
        now = np.zeros(2, np.float32)

        def state(self) -> Any:
            self.now[:] = self.t
            return self.now

    view = ParallelView(OneState(2, [{}] * 3), global_state=True)
    assert set(view.spaces["a1"][0]) == {"observation", "global_state"}
    first, _ = view.reset(seed=0)
    second, *_ = view.step(dict.fromkeys(view.agents, 0))
    assert first["a0"]["global_state"].tolist() == [0, 0]
    assert second["a1"]["global_state"].tolist() == [1, 1]
    assert view.spaces["a1"][0].contains(second["a1"])


@pytest.mark.parametrize("space", [None, 3, spaces.Text(4), spaces.Dict({"a": spaces.Discrete(2)})])
def test_a_state_needs_a_space_of_fixed_shape(space: Any) -> None:
    game: Any = ScriptedGame()
    game.state_space = space
    with pytest.raises(ConfigError, match=r"global_state=True needs an environment with state\(\) and a state_space"):
        ParallelView(game, global_state=True)


class Wrapper:
    """As PettingZoo's: it passes on what it does not have."""

    def __init__(self, env: Any) -> None:
        self.env, self.level = env, 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    @property
    def unwrapped(self) -> Any:
        return getattr(self.env, "unwrapped", self.env)


def test_attributes_are_found_through_wrappers() -> None:
    game = ScriptedGame()
    view = ParallelView(Wrapper(game))
    assert view.unwrapped is game
    assert view.has_wrapper_attr("ledger")
    assert not view.has_wrapper_attr("speed")
    assert view.get_wrapper_attr("level") == 1
    view.set_wrapper_attr("ledger", 4.0)
    view.set_wrapper_attr("level", 2)
    view.set_wrapper_attr("speed", 3)
    assert (game.ledger, view.env.level, game.speed) == (4.0, 2, 3)  # type: ignore[attr-defined]
    assert "ledger" not in vars(view.env)


def test_an_agent_alone_is_an_environment() -> None:
    env = OneSeat("a0", ParallelView(ScriptedGame(3, [{"a0": "join"}, {}, {"a0": "die"}, {}], ["a1"])))
    assert env.observation_space.shape == (4,)
    observation, info = env.reset(seed=1)
    assert observation.tolist()[:3] == [1, 1, 0]  # it has joined after the first step
    assert info == {}
    steps = [env.step(1) for _ in range(2)]
    assert [step[1:4] for step in steps] == [(3.0, False, False), (4.0, True, False)]
    assert steps[-1][0].tolist()[:3] == [1, 3, 2]
    env.close()


def test_an_agent_alone_waits_for_a_game_in_which_it_plays() -> None:
    class Late(ScriptedGame):
        def reset(self, **arguments: Any) -> Any:
            self.start = ["a1"] if self.start is None else ["a0", "a1"]
            return super().reset(**arguments)

    env = OneSeat("a0", ParallelView(Late(2, [{}, {}])))
    observation, _ = env.reset(seed=1)
    assert observation.tolist()[:3] == [1, 0, 0]  # of the second game
    assert env.step(1)[1] == 2.0


def test_an_agent_alone_may_die_without_an_observation() -> None:
    class Unseen(ScriptedGame):
        def step(self, actions: Any) -> Any:
            observations, *rest = super().step(actions)
            return {a: o for a, o in observations.items() if a in self.agents}, *rest

    env = OneSeat("a1", ParallelView(Unseen(2, [{}, {"a1": "die"}, {}])))
    env.reset(seed=1)
    one, two = env.step(0), env.step(0)
    assert two[2]
    assert two[0].tolist() == one[0].tolist()


def test_the_others_do_not_act_after_their_end() -> None:
    env = OneSeat("a0", ParallelView(Ghosts(3, [{"a1": "die"}, {"a2": "cut"}, {}])))
    for _ in range(2):
        env.reset(seed=1)
        assert [env.step(0)[1:4] for _ in range(3)] == [(1, False, False), (2, False, False), (3, False, True)]


def test_a_factory_returns_a_view_or_says_what_is_wrong() -> None:
    (factory,) = env_factories(partial(ScriptedGame, 2), None, 1)
    view = build_example_env(EnvFactory(factory.fn, {}, None, ParallelView))
    assert isinstance(view, ParallelView)
    with pytest.raises(ConfigError, match="This environment is played in turns"):
        build_example_env(EnvFactory(Turns, {}, None, ParallelView))


@pytest.mark.slow
def test_nothing_imports_pettingzoo() -> None:
    program = """
import sys
from penstock.envs import ScriptedGame, env_factories, build_example_env
from penstock.envs.seats import ParallelView
import gymnasium
env_factories(ScriptedGame, None, 2)
env_factories("CartPole-v1", None, 2)
ParallelView(ScriptedGame(mask=True), global_state=True, mask_key="action_mask").reset(seed=0)
assert "pettingzoo" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)


def test_registered_ids_are_found() -> None:
    pettingzoo = pytest.importorskip("pettingzoo")

    class Game(ScriptedGame, pettingzoo.ParallelEnv):  # type: ignore[misc, name-defined]
        """A registered one must be a ParallelEnv."""

    class InTurns(Turns, pettingzoo.AECEnv):  # type: ignore[misc, name-defined]
        """A registered one must be an AECEnv."""

    pettingzoo.register("parallel", "penstock_test/scripted_v0", Game, kwargs={"k": 2})
    try:
        make = registered("penstock_test/scripted_v0")
        assert make is not None
        assert make().possible_agents == ["a0", "a1"]
        assert make(k=4).possible_agents == ["a0", "a1", "a2", "a3"]
        (factory,) = env_factories("penstock_test/scripted_v0", {"k": 3}, 1)
        assert len(build_example_env(EnvFactory(factory.fn, factory.kwargs, None, ParallelView)).possible_agents) == 3
        assert cloudpickle.loads(cloudpickle.dumps(make))().possible_agents == ["a0", "a1"]
        assert registered("no/such_game_v0") is None
        pettingzoo.register("aec", "penstock_test/turns_v0", InTurns)
        in_turns = registered("penstock_test/turns_v0")
        assert in_turns is not None
        assert cloudpickle.loads(cloudpickle.dumps(in_turns))().possible_agents == ["a0", "a1", "a2"]
    finally:
        pettingzoo.parallel_registry.pop("penstock_test/scripted_v0", None)
        pettingzoo.aec_registry.pop("penstock_test/turns_v0", None)


def test_a_scripted_game_keeps_its_script() -> None:
    game = ScriptedGame(3, [{"a2": "join"}, {"a0": "die", "a1": "late"}, {"a1": "cut"}, {"a0": "late"}], ["a0", "a1"])
    observations, _ = game.reset(seed=0)
    assert {agent: row.tolist()[:3] for agent, row in observations.items()} == {"a0": [1, 0, 0], "a1": [2, 0, 0]}
    with pytest.raises(ValueError, match=r"actions for \['a0'\], but \['a0', 'a1'\] act"):
        game.step({"a0": 0})
    game.step({"a0": 0, "a1": 1})
    assert game.agents == ["a0", "a1", "a2"]
    _, rewards, terminated, truncated, _ = game.step({"a0": 0, "a1": 1, "a2": 2})
    assert rewards == {"a0": 2, "a1": 3, "a2": 4}
    assert terminated == {"a0": True, "a1": False, "a2": False}
    assert not any(truncated.values())
    _, _, _, truncated, _ = game.step({"a1": 0, "a2": 0})
    assert truncated == {"a1": True, "a2": False}
    observations, rewards, _, truncated, _ = game.step({"a2": 0})
    assert rewards == {"a2": 4, "a0": 0.5}
    assert truncated == {"a2": True}
    assert game.agents == []
    assert list(observations) == ["a2"]
    assert game.ledger == 1 + 2 + 2 + 3 + 4 + 3 + 3 + 4.5
