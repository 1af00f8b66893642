"""The games of PettingZoo, mpe2, SuperSuit and magent2, as far as they are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from penstock import (
    Agent,
    AgentStep,
    AlternatingSampler,
    AsyncSampler,
    CategoricalPgAgent,
    ConfigError,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    Sampler,
    SerialSampler,
    SpaceError,
)

from ..against_loop import compare
from ..scale import scaled
from ..support import assert_same, collect_with

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


def exact(env_fn: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: Exact(env_fn())


def spread(**kwargs: Any) -> Callable[[], Any]:
    return game("mpe2.simple_spread_v3", **{"max_cycles": 7, **kwargs})


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


# ---- simple_spread in every sampler ------------------------------------------------------------

SAMPLERS: dict[str, tuple[type[Sampler], dict[str, Any]]] = {
    "parallel": (ParallelSampler, {"n_workers": 3}),
    "central": (GpuSampler, {"n_workers": 2}),
    "central, process": (GpuSampler, {"n_workers": 2, "server": "process"}),
    "central, first-ready": (GpuSampler, {"n_workers": 3, "min_ready": 1}),
    "alternating": (AlternatingSampler, {"n_workers": 3}),
    "asynchronous": (AsyncSampler, {"n_workers": 3, "lag": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", SAMPLERS)
def test_simple_spread_in_every_sampler_is_that_of_a_plain_loop(how: str) -> None:
    cls, kwargs = SAMPLERS[how]
    options: dict[str, Any] = {"batch_T": 9, "batch_B": 5, "n_batches": 4, "bootstrap_value": False}
    compare(cls, exact(spread()), RandomAgent, sampler=kwargs, **options)


# ---- roles -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_simple_speaker_listener_has_two_policies() -> None:
    env_fn = game("mpe2.simple_speaker_listener_v4", max_cycles=7)
    with SerialSampler(env_fn, batch_T=9, batch_B=4) as sampler:
        sampler.initialize({"speaker_0": RandomAgent(), "listener_0": RandomAgent()}, seed=0)
        samples, infos = sampler.obtain_samples(0)
        assert samples.speaker_0.env.observation.shape == (9, 4, 3)
        assert samples.listener_0.env.observation.shape == (9, 4, 11)
        assert {info.policy for info in infos} == {"speaker_0", "listener_0", None}
        assert sampler.seats()["listener_0"] == [(e, "listener_0") for e in range(4)]
    with (
        SerialSampler(env_fn, batch_T=9, batch_B=4) as sampler,
        pytest.raises(SpaceError, match=r"agent 'speaker_0' and env_rank 0, agent 'listener_0' have the same policy"),
    ):
        sampler.initialize(RandomAgent(), seed=0)


def prefix(agent_id: str) -> str:
    return agent_id.rsplit("_", 1)[0]


@pytest.mark.slow
def test_simple_world_comm_has_three_policies() -> None:
    env_fn = game("mpe2.simple_world_comm_v3", max_cycles=7)

    def agents() -> dict[str, Agent]:
        return {name: RandomAgent() for name in ("leadadversary", "adversary", "agent")}

    options: dict[str, Any] = {"policy_of": prefix, "bootstrap_value": False, "n": scaled(5, 3)}
    wanted = collect_with(SerialSampler, env_fn, agents(), **options)
    assert_same(wanted, collect_with(ParallelSampler, env_fn, agents(), n_workers=3, **options))
    sampler_cls: Any = scaled(partial(ParallelSampler, n_workers=2), SerialSampler)
    with sampler_cls(env_fn, batch_T=9, batch_B=5) as sampler:
        sampler.initialize(agents(), policy_of=prefix, seed=0)
        assert sampler.seats() == {
            "leadadversary": [(e, "leadadversary_0") for e in range(5)],
            "adversary": [(e, f"adversary_{i}") for e in range(5) for i in range(3)],
            "agent": [(e, f"agent_{i}") for e in range(5) for i in range(2)],
        }
        samples, _ = sampler.obtain_samples(0)
        assert samples.adversary.env.reward.shape == (9, 15)
        assert samples.adversary.by_env().env.reward.shape == (9, 5, 3)
        for own in samples.values():
            assert own.env.observation.is_contiguous() or own.env.observation[0].is_contiguous()


# ---- every game --------------------------------------------------------------------------------

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
    "battle": ("magent2.environments.battle_v4", {"max_cycles": 300, "map_size": 12}),
}
#: The options of batches for games that take long to show an end.
LONG = {
    "knights": {"batch_T": 120, "n_batches": 2, "batch_B": scaled(3, 2)},
    "multiwalker, falling": {"batch_T": 60},
    "battle": {"batch_T": 200, "n_batches": 2},
    "pistonball": {"batch_T": 8, "n_batches": 2},
    "cooperative_pong": {"batch_T": 8, "n_batches": 2},
}
#: Games in which agents die one by one.
DEATHS = ("knights", "multiwalker, falling", "battle")


class Attacking(RandomAgent):
    """The last 8 of the 21 actions in a battle are attacks. Random moves would kill nobody."""

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        step = super().step(observation, prev_action, prev_reward)
        return AgentStep(13 + np.asarray(step.action) % 8)


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
    "battle",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", scaled([*GAMES], DAILY))
def test_every_game_in_two_workers_is_that_of_a_plain_loop(name: str) -> None:
    module, kwargs = GAMES[name]
    env_fn = game(module, **kwargs)
    by_agent = policies_of(env_fn())

    def agents() -> dict[str, Agent]:
        cls = Attacking if name == "battle" else RandomAgent
        return {policy: cls() for policy in sorted(set(by_agent.values()))}

    options: dict[str, Any] = {"batch_T": 15, "batch_B": 3, "n_batches": 3, **LONG.get(name, {})}
    options |= {"policy_of": by_agent.__getitem__, "bootstrap_value": False, "sampler": {"n_workers": 2}}
    wanted = compare(ParallelSampler, exact(env_fn), agents, **options)
    infos = [info for _, own in wanted for info in own]
    assert any(info.agent_id is not None for info in infos)
    n_done = sum(int(own.done.sum()) for batch, _ in wanted for own in batch.values())
    assert n_done == sum(info.agent_id is not None for info in infos)
    idle = sum(int((~own.valid).sum()) for batch, _ in wanted for own in batch.values())
    assert (idle > 0) == (name in DEATHS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simple_spread_v3", "pursuit", "battle"])
def test_the_state_of_a_game_is_recorded(name: str) -> None:
    module, kwargs = GAMES[name]
    env_fn = game(module, **kwargs)
    env = env_fn()
    if not hasattr(env, "state_space") or env.state_space is None:
        pytest.skip("this game has no state")
    shape = env.state_space.shape
    by_agent = policies_of(env)
    agents: dict[str, Agent] = {policy: RandomAgent() for policy in sorted(set(by_agent.values()))}
    with SerialSampler(env_fn, batch_T=4, batch_B=2, max_decorrelation_steps=0, global_state=True) as sampler:
        sampler.initialize(agents, policy_of=by_agent.__getitem__, seed=0)
        samples, _ = sampler.obtain_samples(0)
        states = sampler.call("state")
        for policy, own in samples.items():
            assert own.env.global_state.shape[2:] == shape
            after = own.env.bootstrap_obs.global_state.numpy()
            for b, (rank, _) in enumerate(sampler.seats()[policy]):
                np.testing.assert_array_equal(after[b], np.asarray(states[rank], after.dtype))
            if own.env.valid.all():
                together = own.by_env().env.global_state
                assert (together == together[:, :, :1]).all()


# ---- ids, wrappers, what is refused ------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("env_id", ["classic/rps_v2", *scaled(["sisl/pursuit_v5"], [])])
def test_an_id_of_pettingzoo_is_an_env_fn(env_id: str) -> None:
    namespace, name = env_id.split("/")
    pytest.importorskip(f"pettingzoo.{namespace}.{name}", exc_type=ImportError)
    wanted = collect_with(
        SerialSampler, env_id, RandomAgent(), bootstrap_value=False, n=2, env_kwargs={"max_cycles": 8}
    )
    assert_same(
        wanted,
        collect_with(
            ParallelSampler,
            env_id,
            RandomAgent(),
            bootstrap_value=False,
            n=2,
            env_kwargs={"max_cycles": 8},
            n_workers=2,
        ),
    )


def test_games_in_turns_can_be_converted() -> None:
    def env_fn() -> Any:
        from pettingzoo.classic import rps_v2
        from pettingzoo.utils import aec_to_parallel

        return aec_to_parallel(rps_v2.env(max_cycles=6))

    with SerialSampler(env_fn, batch_T=20, batch_B=2) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        _, infos = sampler.obtain_samples(0)
        games = [info for info in infos if info.agent_id is None]
        assert len(games) >= 4
        assert all(info.Return == 0 for info in games)  # what one wins, the other loses


EXAMPLES = {
    "generated_agents_parallel_v0": "possible_agents of .* must name each agent once",
    "generated_agents_parallel_cust_agentid_v0": "possible_agents of .* must name each agent once",
    "generated_agents_env_v0": "possible_agents of .* must name each agent once",
    "generated_agents_env_cust_agentid_v0": "possible_agents of .* must name each agent once",
    "generated_agents_env_action_mask_info_v0": "possible_agents of .* must name each agent once",
    "generated_agents_env_action_mask_obs_v0": "possible_agents of .* must name each agent once",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_environments_of_pettingzoo_are_refused_with_the_reason(name: str) -> None:
    """Their agents are made up while they run."""
    module = pytest.importorskip(f"pettingzoo.test.example_envs.{name}", exc_type=ImportError)
    env_fn = getattr(module, "parallel_env", module.env)
    with SerialSampler(env_fn, batch_T=2, batch_B=1) as sampler, pytest.raises(ConfigError, match=EXAMPLES[name]):
        sampler.initialize(RandomAgent())


def same_without_wrapper(wrap: Callable[[Any], Any], **options: Any) -> None:
    make = spread()
    plain = collect_with(SerialSampler, make, RandomAgent(), bootstrap_value=False, n=2, **options)
    assert_same(
        plain, collect_with(SerialSampler, lambda: wrap(make()), RandomAgent(), bootstrap_value=False, n=2, **options)
    )


@pytest.mark.slow
def test_wrappers_of_pettingzoo_work() -> None:
    from pettingzoo.utils import BaseParallelWrapper, aec_to_parallel, parallel_to_aec
    from pettingzoo.utils.wrappers import OrderEnforcingWrapper

    class Own(BaseParallelWrapper):  # type: ignore[misc, type-arg]
        """Passes everything on."""

    same_without_wrapper(Own)
    same_without_wrapper(lambda env: aec_to_parallel(OrderEnforcingWrapper(parallel_to_aec(env))))
    with SerialSampler(lambda: Own(spread()()), batch_T=3, batch_B=2) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        assert len(sampler.get_attr("possible_agents")[1]) == 3
        sampler.set_attr("mark", [4, 5])
        assert sampler.get_attr("mark") == [4, 5]


@pytest.mark.slow
def test_wrappers_of_supersuit_work() -> None:
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


@pytest.mark.slow
def test_black_death_keeps_all_agents_there() -> None:
    supersuit = pytest.importorskip("supersuit", exc_type=ImportError)
    module, kwargs = GAMES["multiwalker, falling"]  # battle_v4 crashes with this wrapper, in a plain loop too
    env_fn = game(module, **kwargs)
    with SerialSampler(
        lambda: supersuit.black_death_v3(env_fn()), batch_T=80, batch_B=1, max_decorrelation_steps=0
    ) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        samples, infos = sampler.obtain_samples(0)
        assert samples.env.valid.all()  # nobody is ever away
        games = [info for info in infos if info.agent_id is None]
        assert len(games) >= 1
        assert all(info.Length == games[0].Length for info in infos if info.episode == 0)


@pytest.mark.slow
def test_unlike_numbers_of_agents_in_one_sampler() -> None:
    kwargs = [{"N": n, "max_cycles": 7, "local_ratio": 0.5} for n in (2, 4, 2)]
    make = game("mpe2.simple_spread_v3")

    def env_fn(N: int, **own: Any) -> Any:
        supersuit = pytest.importorskip("supersuit", exc_type=ImportError)
        padded = supersuit.observation_lambda_v0(
            make(N=N, **own),
            lambda row, space: np.pad(row, (0, 24 - len(row))).astype(np.float32),
            lambda space: gym.spaces.Box(-np.inf, np.inf, (24,), np.float32),
        )
        return padded

    options: dict[str, Any] = {"env_kwargs": kwargs, "batch_B": 3, "bootstrap_value": False, "n": 3}
    wanted = collect_with(SerialSampler, env_fn, RandomAgent(), **options)
    assert wanted[0][0].env.reward.shape == (9, 8)
    assert_same(wanted, collect_with(ParallelSampler, env_fn, RandomAgent(), n_workers=3, **options))


@pytest.mark.slow
def test_a_learner_plays_simple_spread_with_a_central_critic() -> None:
    import torch
    from torch import nn

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.critic = nn.Linear(18, 5), nn.Linear(54, 1)

        def forward(self, observation: Any) -> Any:
            return self.actor(observation.observation), self.critic(observation.global_state)[:, 0]

    agent = CategoricalPgAgent(Critic)
    with ParallelSampler(spread(), batch_T=14, batch_B=4, n_workers=2, global_state=True) as sampler:
        sampler.initialize(agent, seed=0, bootstrap_value=True)
        for itr in range(2):
            samples, _ = sampler.obtain_samples(itr)
            value = samples.agent.agent_info.value
            together = samples.by_env().agent.agent_info.value
            torch.testing.assert_close(together, together[..., :1].expand_as(together))  # all see the same state
            assert value.shape == (14, 12)
            torch.testing.assert_close(
                samples.agent.bootstrap_value,
                agent.model(samples.env.bootstrap_obs)[1].detach(),
            )
            agent.sync_shared_memory()


# ---- seeded games ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "kwargs"),
    [
        ("mpe2.simple_speaker_listener_v4", {"max_cycles": 17}),
        ("mpe2.simple_spread_v3", {"max_cycles": 17}),
        (
            "pettingzoo.butterfly.knights_archers_zombies_v11",
            {"max_cycles": 300, "spawn_delay": 2, "max_zombies": 50},
        ),  # agents die
    ],
)
def test_a_seeded_game_is_played_again(module: str, kwargs: Any) -> None:
    make, rng = game(module, **kwargs), np.random.default_rng(0)
    names = {agent: agent.split("_")[0] for agent in make().possible_agents}
    policies, T = {name: RandomAgent() for name in names.values()}, 100
    n_left, seeds, forgets = 0, set(), "knights" not in module  # their second games depend on the first
    sizes: dict[str, Any] = {"batch_T": T, "batch_B": 4, "n_workers": 2, "max_decorrelation_steps": 30 * forgets}
    with ParallelSampler(make, seed_episodes=True, **sizes) as sampler:
        sampler.initialize(policies, policy_of=names.get, seed=3)
        for itr in range(3):
            _, infos = sampler.obtain_samples(itr)
            seeds |= {(info.env_rank, info.seed) for info in infos}
            column_of = {seat: (name, i) for name, seats in sampler.seats().items() for i, seat in enumerate(seats)}
            for e, t in ((e, int(t)) for e in range(4) for t in rng.choice(T, 3)):
                episode, plain = sampler.episode(e, t), make()
                if episode.episode and not forgets:
                    continue
                plain.reset(seed=episode.seed)
                for i, recorded in enumerate(episode.rewards):
                    actions = dict(zip(plain.possible_agents, (own[i] for own in episode.actions), strict=True))
                    _, rewards, *_ = plain.step({agent: actions[agent] for agent in plain.agents})
                    assert recorded.tolist() == [np.float32(rewards.get(agent, 0)) for agent in plain.possible_agents]
                again, actions = episode.run()
                assert list(actions) == plain.agents == again.agents
                n_left += len(plain.agents) < len(names)
                results = again.step(actions), plain.step(actions)
                for agent in actions:
                    name, column = column_of[e, agent]
                    samples = sampler.samples_np[name]
                    assert np.array_equal(samples.agent.action[t, column], actions[agent])
                    assert {np.float32(found[1][agent]) for found in results} == {samples.env.reward[t, column]}
                again.close()
                plain.close()
    assert len({seed for _, seed in seeds}) == len(seeds) > 4
    assert n_left or forgets, "somebody has died"
