"""The games of PettingZoo, mpe2 and SuperSuit, as far as they are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from penstock import Agent, ParallelSampler, RandomAgent, SerialSampler
from penstock.envs.toy import ScriptedGame

from ..against_loop import compare
from ..scale import scaled
from ..support import assert_same, collect_with
from ..toy_games import Book

BaseParallelWrapper = pytest.importorskip("pettingzoo.utils", exc_type=ImportError).BaseParallelWrapper
pytestmark = pytest.mark.filterwarnings("ignore")  # the games' own warnings are not penstock's


def game(module: str, **kwargs: Any) -> Callable[[], Any]:
    """What builds the `ParallelEnv` of a module, in any process."""

    def make(**more: Any) -> Any:
        import os

        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame shows no window
        return importlib.import_module(module).parallel_env(**kwargs, **more)

    pytest.importorskip(module, exc_type=ImportError)
    return make


class Exact(BaseParallelWrapper):  # type: ignore[misc, type-arg]
    """Its rewards are multiples of 1/1024. So their sum over all agents does not depend on the order."""

    def step(self, actions: Any) -> Any:
        observations, rewards, *others = super().step(actions)
        return observations, {agent: round(reward * 1024) / 1024 for agent, reward in rewards.items()}, *others


def policies_of(env: Any) -> dict[Any, str]:
    """A policy for each kind of spaces."""
    kinds: list[Any] = []
    found = {}
    for agent in env.possible_agents:
        own = env.observation_space(agent), env.action_space(agent)
        if own not in kinds:
            kinds.append(own)
        found[agent] = f"policy_{kinds.index(own)}"
    env.close()
    return found


GAMES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (f"mpe2.{name}", {"max_cycles": 7})
        for name in (
            "simple_adversary_v3",
            "simple_crypto_v3",
            "simple_push_v3",
            "simple_reference_v3",
            "simple_speaker_listener_v4",
            "simple_spread_v3",
            "simple_tag_v3",
            "simple_v3",
            "simple_world_comm_v3",
        )
    },
    "continuous": ("mpe2.simple_spread_v3", {"max_cycles": 7, "continuous_actions": True}),
    "rps": ("pettingzoo.classic.rps_v2", {"max_cycles": 7}),
    "knights": (
        "pettingzoo.butterfly.knights_archers_zombies_v11",
        {"max_cycles": 500, "spawn_delay": 2, "max_zombies": 40},
    ),
    "pistonball": ("pettingzoo.butterfly.pistonball_v6", {"max_cycles": 12, "n_pistons": 4}),
    "cooperative_pong": ("pettingzoo.butterfly.cooperative_pong_v6", {"max_cycles": 12}),
    "pursuit": ("pettingzoo.sisl.pursuit_v5", {"max_cycles": 12, "n_pursuers": 4}),
    "multiwalker": ("pettingzoo.sisl.multiwalker_v9", {"max_cycles": 12}),
    "multiwalker, falling": (
        "pettingzoo.sisl.multiwalker_v9",
        {"max_cycles": 60, "terminate_on_fall": False, "remove_on_fall": True},
    ),
}
#: The options of batches for games that take long to show an end.
LONG = {
    "knights": {"batch_T": scaled(120, 90), "n_batches": 2, "batch_B": scaled(3, 2)},
    "multiwalker, falling": {"batch_T": 60},
    "pistonball": {"batch_T": 8, "n_batches": 2},
    "cooperative_pong": {"batch_T": 8, "n_batches": 2},
}
#: Two workers. Daily they are forks, which need not import the games again.
IN_TWO = {"n_workers": 2, "start_method": scaled("forkserver", "fork")}
#: Games in which agents die one by one.
DEATHS = ("knights", "multiwalker, falling")


#: The games of mpe2 run the same code. Daily: one with two policies, one with Box actions. The pictures of
#: cooperative_pong and pursuit take 2 to 4 s of CPU time.
DAILY = (
    "simple_speaker_listener_v4",
    "continuous",
    "rps",
    "knights",
    "pistonball",
    "multiwalker",
    "multiwalker, falling",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", scaled([*GAMES], DAILY))
def test_every_game_in_two_workers_is_that_of_a_plain_loop(name: str) -> None:
    module, kwargs = GAMES[name]
    env_fn = game(module, **kwargs)
    by_agent = policies_of(env_fn())

    def agents() -> dict[str, Agent]:
        return {policy: RandomAgent() for policy in sorted(set(by_agent.values()))}

    options: dict[str, Any] = {"batch_T": 15, "batch_B": 3, "n_batches": 3, **LONG.get(name, {})}
    options |= {"policy_of": by_agent.__getitem__, "bootstrap_value": False, "sampler": IN_TWO}
    wanted = compare(ParallelSampler, lambda: Exact(env_fn()), agents, **options)
    infos = [info for _, own in wanted for info in own]
    assert any(info.agent_id is not None for info in infos)
    n_done = sum(int(own.done.sum()) for batch, _ in wanted for own in batch.values())
    assert n_done == sum(info.agent_id is not None for info in infos)
    idle = sum(int((~own.valid).sum()) for batch, _ in wanted for own in batch.values())
    assert (idle > 0) == (name in DEATHS)


def spread() -> Any:
    return importlib.import_module("mpe2.simple_spread_v3").parallel_env(max_cycles=7)


def same_without_wrapper(wrap: Callable[[Any], Any]) -> None:
    same: dict[str, Any] = {"bootstrap_value": False, "n": 2}
    wrapped = collect_with(SerialSampler, lambda: wrap(spread()), RandomAgent(), **same)
    assert_same(wrapped, collect_with(SerialSampler, spread, RandomAgent(), **same))


@pytest.mark.slow
def test_wrappers_of_pettingzoo_work() -> None:
    pytest.importorskip("mpe2")
    from pettingzoo.utils import BaseParallelWrapper, aec_to_parallel, parallel_to_aec
    from pettingzoo.utils.wrappers import OrderEnforcingWrapper

    class Own(BaseParallelWrapper):  # type: ignore[misc, type-arg]
        """Passes everything on."""

    same_without_wrapper(Own)
    same_without_wrapper(lambda env: aec_to_parallel(OrderEnforcingWrapper(parallel_to_aec(env))))
    with SerialSampler(lambda: Own(spread()), batch_T=3, batch_B=2) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        assert len(sampler.get_attr("possible_agents")[1]) == 3
        sampler.set_attr("mark", [4, 5])
        assert sampler.get_attr("mark") == [4, 5]


@pytest.mark.slow
def test_wrappers_of_supersuit_work() -> None:
    pytest.importorskip("mpe2")
    supersuit = pytest.importorskip("supersuit", exc_type=ImportError)
    same_without_wrapper(supersuit.pad_observations_v0)
    env_fn = game("mpe2.simple_world_comm_v3", max_cycles=7)

    def padded() -> Any:
        return supersuit.pad_action_space_v0(supersuit.pad_observations_v0(env_fn()))

    with SerialSampler(padded, batch_T=20, batch_B=2) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        samples, infos = sampler.obtain_samples(0)
        assert samples.env.observation.shape == (20, 12, 34)
        assert len(infos) > 12


def test_environments_of_one_sampler_may_have_unlike_numbers_of_agents() -> None:
    options: dict[str, Any] = {"env_kwargs": [{"k": k} for k in (2, 4, 2)], "batch_B": 3, "n": 3}
    wanted = collect_with(SerialSampler, ScriptedGame, Book(), **options)
    assert wanted[0][0].env.reward.shape == (9, 8)
    assert_same(wanted, collect_with(ParallelSampler, ScriptedGame, Book(), n_workers=3, **options))
