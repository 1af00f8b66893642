"""PettingZoo's classic games, whose agents take turns."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import numpy as np
import pytest

from penstock import ParallelSampler, RandomAgent, SerialSampler
from penstock.errors import ConfigError
from penstock.vector import ShmVectorEnv
from tests.against_loop import compare
from tests.scale import FULL, scaled
from tests.support import assert_same, collect_with
from tests.toy_games import Scripted

pytest.importorskip("pettingzoo.classic.tictactoe_v3", exc_type=ImportError)

MASKED = "observation.action_mask"
#: By name: the arguments of the game, its mask, the length of a batch, and how many games are played daily. None of
#: chess: its observations take 4 s of CPU time, and it is masked as others are.
GAMES: dict[str, tuple[dict[str, Any], str | None, int, int]] = {
    "tictactoe_v3": ({}, MASKED, 8, 30),
    "connect_four_v3": ({}, MASKED, 16, 20),
    "rps_v2": ({"max_cycles": 15}, None, 8, 20),
    "chess_v6": ({}, MASKED, 32, 0),
}


MOST_MOVES = 20  # of all agents in most games


def game(name: str) -> Any:
    module = pytest.importorskip(f"pettingzoo.classic.{name}", exc_type=ImportError)
    path, kwargs = module.__name__, GAMES[name][0]
    return lambda: importlib.import_module(path).env(**kwargs)


@pytest.mark.slow
@pytest.mark.timeout(scaled(7200, 120))  # 1,000 games of chess take longer
@pytest.mark.parametrize("name", [name for name in GAMES if FULL or GAMES[name][3]])
def test_batches_are_those_of_a_plain_loop(name: str) -> None:
    """And the sum of each game is zero, and no move is illegal: an illegal one would end the game with a loss."""
    env_fn, (_, mask_key, T, n_daily) = game(name), GAMES[name]
    wanted, B = scaled(1_000, n_daily), 4
    agent = partial(NoValue, mask_key=mask_key)
    found = compare(SerialSampler, env_fn, agent, batch_T=T, batch_B=B, n_batches=-(-wanted * MOST_MOVES // (T * B)))
    for batch, infos in found:
        if mask_key:
            legal = np.take_along_axis(batch.observation.action_mask, batch.action[..., None], -1)
            assert legal[batch.valid].all()
            assert all(info.Return in (-1, 0, 1) for info in infos if info.agent_id is not None)
        assert all(info.Return == 0 for info in infos if info.agent_id is None)
    assert sum(info.agent_id is None for _, infos in found for info in infos) >= wanted - 2 * B


class NoValue(RandomAgent):
    """Gives every observation the value 1."""

    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        return np.ones(len(prev_reward), np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("env_id", ["classic/tictactoe-v3", "classic/rps-v2"])
def test_ids_of_the_registry_and_numbers_of_workers(env_id: str) -> None:
    options: Any = {"bootstrap_value": False, "n": 3, "batch_B": 5}
    agent: Any = RandomAgent(mask_key=None if "rps" in env_id else MASKED)
    wanted = collect_with(SerialSampler, env_id, agent, **options)
    for n_workers in scaled((1, 2, 3, 5), (3,)):
        assert_same(wanted, collect_with(ParallelSampler, env_id, agent, n_workers=n_workers, **options))


def moves_of(seed: int) -> tuple[list[int], int]:
    """A random game of tictactoe: its moves, and who has won (0, 1; 2: nobody)."""
    env, rng, moves = game("tictactoe_v3")(), np.random.default_rng(seed), []
    env.reset()
    for agent in env.agent_iter():
        observation, reward, terminated, _, _ = env.last()
        if terminated:
            return moves, 2 if not reward else (agent == "player_2") == (reward > 0)
        moves.append(int(rng.choice(np.flatnonzero(observation["action_mask"]))))
        env.step(moves[-1])
    raise AssertionError


@pytest.mark.slow
def test_the_table_of_two_batches() -> None:
    """The first player wins game 0 with its third move, the second one game 1 with its fourth. Batches of 4 rows."""
    found: dict[tuple[int, int], list[int]] = {}
    for seed in range(200):
        moves, winner = moves_of(seed)
        found.setdefault((len(moves), int(winner)), moves)
    g0, g1, g2 = found[5, 0], found[8, 1], found[9, 2]
    agent = Scripted([g0[::2] + g1[::2] + g2[::2], g0[1::2] + g1[1::2] + g2[1::2]])
    with SerialSampler(game("tictactoe_v3"), batch_T=4, batch_B=1, max_decorrelation_steps=0) as sampler:
        sampler.initialize(agent, seed=0)
        one, two = (sampler.obtain_samples(itr)[0].copy().numpy() for itr in range(2))
    T, F = True, False
    assert one.env.valid.T.tolist() == [[T, T, T, T], [T, T, F, F]]
    assert one.env.reward.T.tolist() == [[0, 0, 1, 0], [0, -1, 0, 0]]
    assert one.env.done.T.tolist() == [[F, F, T, F], [F, T, F, F]]
    assert one.env.prev_done.T.tolist() == [[T, F, F, T], [T, F, F, F]]
    assert one.agent.action.T.tolist() == [[g0[0], g0[2], g0[4], g1[0]], [g0[1], g0[3], 0, 0]]
    assert two.env.valid.T.tolist() == [[T, T, T, F], [T, T, T, T]]
    assert two.env.reward.T.tolist() == [[0, 0, -1, 0], [0, 0, 0, 1]]
    assert two.env.done.T.tolist() == [[F, F, T, F], [F, F, F, T]]
    assert two.env.prev_done.T.tolist() == [[F, F, F, F], [T, F, F, F]]
    assert two.agent.action.T.tolist() == [[g1[2], g1[4], g1[6], 0], [g1[1], g1[3], g1[5], g1[7]]]


def test_a_vector_environment_refuses_turns() -> None:
    with pytest.raises(ConfigError, match=r"played in turns .*Samplers take such environments"):
        ShmVectorEnv([game("rps_v2")] * 2)
