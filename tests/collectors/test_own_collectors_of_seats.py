"""Where agents share an environment, against a plain loop: collectors of the user's own, and who joins and ends."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest

from penstock import (
    AgentStep,
    AsyncSampler,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    ResetCollector,
    Sampler,
    SerialSampler,
    SpaceError,
    WorkerError,
)
from penstock.collectors import EvalCollector
from penstock.columns.interface import Events
from penstock.envs.seeding import eval_seed
from penstock.envs.toy import ScriptedGame

from ..against_loop import compare
from ..toy_games import split_agents

T, B, SEED = 7, 3, 5
KINDS = [{"k": k} for k in (3, 4, 2)]
GAMES = [partial(ScriptedGame, **kind) for kind in KINDS]
SAMPLERS: dict[str, tuple[type[Sampler], dict[str, Any]]] = {
    "serial": (SerialSampler, {}),
    "parallel": (ParallelSampler, {"n_workers": 2}),
    "slots": (ParallelSampler, {"n_workers": 3, "n_slots": 2, "debug": True}),
    "central": (GpuSampler, {"n_workers": 2}),
    "own process": (GpuSampler, {"n_workers": 2, "server": "process"}),
    "ahead": (AsyncSampler, {}),
}
SIZES: dict[str, Any] = {"batch_T": T, "batch_B": B, "env_kwargs": KINDS, "max_decorrelation_steps": 0}


class Traced(ResetCollector):
    """Overrides each part of the loop and the hooks, and counts the calls. Writes the doubled reward of each seat, its
    environment and the row."""

    extra_fields: ClassVar[Any] = {"twice": np.float32(0), "own": np.zeros(2, np.int64), "games": np.int64(0)}

    def start_envs(self) -> None:
        self.counts = Counter[str]()
        super().start_envs()

    def step_envs(self, t: int) -> None:
        super().step_envs(t)
        for recorder in self.recorders:
            reward, ranks = recorder.samples.reward[t + 1], np.array([int(r) for r in recorder.columns.env_ranks])
            fields = {"own": np.stack([ranks, 0 * ranks + t], 1), "games": np.full(len(ranks), self.counts["games"])}
            self.record_extra(t, recorder.policy, twice=2 * reward, **fields)

    def begin_episodes(self, events: Events, going: Sequence[int]) -> Sequence[Sequence[int]]:
        self.counts["games"] += len(events.over)
        return super().begin_episodes(events, going)


#: An inference server serves one policy.
SERVED = ("central", "own process")


@pytest.mark.parametrize(
    ("kind", "n_policies"), [(kind, n) for n in (1, 2) for kind in SAMPLERS if n == 1 or kind not in SERVED]
)
def test_a_collector_of_the_users_own_collects_what_a_plain_loop_does(kind: str, n_policies: int) -> None:
    cls, options = SAMPLERS[kind]
    own = split_agents(n_policies)
    policy_of = {"policy_of": own["policy_of"]} if n_policies == 2 else {}
    sizes = {"batch_T": T, "batch_B": B, "n_batches": 5}
    compare(cls, GAMES, lambda: own["agent"], sampler={"collector_cls": Traced, **options}, **policy_of, **sizes)


class Idle(Traced):
    """Nobody does anything in the third row."""

    def act(self, t: int) -> None:
        super().act(t)
        for recorder in self.recorders:
            if t == 2:
                recorder.prev_action[...] = recorder.samples.action[t + 1] = 0


@pytest.mark.parametrize("n_policies", [1, 2])
@pytest.mark.parametrize("kind", ["serial", "parallel", "slots"])
def test_a_collector_of_the_users_own_acts_and_writes_as_it_says(kind: str, n_policies: int) -> None:
    cls, options = SAMPLERS[kind]
    with cls(ScriptedGame, **SIZES, collector_cls=Idle, **options) as sampler:
        sampler.initialize(**split_agents(n_policies), seed=SEED)
        n_games = 0
        for itr in range(5):
            samples, infos = sampler.obtain_samples(itr)
            n_games += sum(info.agent_id is None for info in infos)
            for name, seats in sampler.seats().items():
                each = (samples if n_policies == 1 else samples[name]).numpy()
                extra, action, number = each.env.extra, each.agent.action, each.env.observation[..., 1]
                np.testing.assert_array_equal(extra.twice, 2 * each.env.reward)
                assert (extra.own[..., 0] == [e for e, _ in seats]).all()
                assert (extra.own[..., 1] == np.arange(T)[:, None]).all()
                assert not action[2].any()
                assert action[3:].any()
                np.testing.assert_array_equal(each.env.reward, np.where(each.env.valid, number + 1 + action, 0))
                if kind == "serial":
                    assert extra.games[-1, 0] == n_games
        assert n_games > 5


@pytest.mark.parametrize("cls", [SerialSampler, partial(ParallelSampler, n_workers=2)])
def test_extra_fields_of_several_policies_need_a_name(cls: Any) -> None:
    class Wrong(Traced):
        policy: ClassVar[Any] = ()

        def step_envs(self, t: int) -> None:
            ResetCollector.step_envs(self, t)
            self.record_extra(t, *self.policy, twice=np.zeros(len(self.recorders[0].columns), np.float32))

    class Misspelt(Wrong):
        policy = ("furst",)

    for collector_cls, got in ((Wrong, "None"), (Misspelt, "'furst'")):
        with cls(ScriptedGame, **SIZES, collector_cls=collector_cls) as sampler:
            sampler.initialize(**split_agents(2, RandomAgent), seed=SEED)
            message = rf"record_extra needs the name of one of the policies \['first', 'other'\].*, got {got}: call"
            with pytest.raises((SpaceError, WorkerError), match=message):
                sampler.obtain_samples(0)


def test_a_policy_that_is_not_recorded_has_extra_fields_of_its_own() -> None:
    with SerialSampler(ScriptedGame, **SIZES, collector_cls=Traced) as sampler:
        sampler.initialize(**split_agents(2, RandomAgent), seed=SEED, record=["other"])
        batch, _ = sampler.obtain_samples(0)
        assert [name for name, _ in batch.items()] == ["other"]
        np.testing.assert_array_equal(batch.other.env.extra.twice, 2 * batch.other.env.reward)


class Twice(EvalCollector):
    """Plays each game with the seed of the first one."""

    def seed_of(self, e: int) -> int:
        return eval_seed(self.streams.seed, self.streams.env_ranks[e])


@pytest.mark.parametrize("cls", [SerialSampler, partial(ParallelSampler, n_workers=2)])
def test_an_evaluation_of_the_users_own(cls: Any) -> None:
    evaluation = {"eval_n_envs": 2, "eval_episodes": 6, "eval_env_kwargs": KINDS[:2], "eval_max_steps": 2000}
    with cls(ScriptedGame, **SIZES, eval_collector_cls=Twice, **evaluation) as sampler:
        sampler.initialize(Still(), seed=SEED)
        infos = sampler.evaluate_agent(0)
    found = defaultdict(list)
    for info in infos:
        found[info.env_rank, info.number].append((info.agent_id, info.Length, info.Return))
    assert found.keys() == {(env_rank, episode) for env_rank in range(2) for episode in range(3)}
    for (env_rank, _), figures in found.items():
        assert figures == found[env_rank, 0], "each episode is the first one again"


class Still(RandomAgent):
    """Always takes action 1."""

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        step = super().step(observation, prev_action, prev_reward)
        return AgentStep(np.ones_like(step.action))


# ---- games whose lists and flags are unusual -----------------------------------------------------


class Listing(ScriptedGame):
    """Lists agents as `lists` says for each step, and flags those in `ends`: as truncated if they are `cut`."""

    def __init__(self, lists: list[list[str]], ends: dict[int, list[str]], cut: bool = False) -> None:
        super().__init__(2, [{}] * (len(lists) + 1), ["a0"])
        self.lists, self.ends, self.cut = [*lists, []], ends, cut

    def step(self, actions: Any) -> Any:
        assert actions.keys() <= {"a0", "a1"}
        self.t += 1
        self.agents = self.lists[self.t - 1]
        seen = {agent: np.full(4, self.t, np.float32) for agent in self.possible_agents}
        flagged = self.possible_agents if not self.agents else self.ends.get(self.t, [])
        flags = dict.fromkeys(flagged, True)
        return seen, {}, {} if self.cut else flags, flags if self.cut else {}, {}


def joined_at(lists: list[list[str]], ends: dict[int, list[str]], cut: bool = False) -> list[int]:
    """The steps before which a1 joins the first game."""
    sizes = {"batch_T": 7, "batch_B": 2, "n_batches": 1, "max_decorrelation_steps": 0}
    ((samples, _),) = compare(SerialSampler, partial(Listing, lists, ends, cut), RandomAgent, **sizes)
    return np.flatnonzero(samples.prev_done[: len(lists) + 1, 1]).tolist()


@pytest.mark.parametrize("cut", [False, True], ids=["terminated", "truncated"])
def test_who_is_flagged_when_it_is_listed_first_does_not_join_and_may_come_later(cut: bool) -> None:
    lists = [["a0", "a1"], ["a0", "a1"], ["a0"], ["a0", "a1"]]
    assert joined_at(lists, {1: ["a1"]}, cut) == [4], "it joins when it was not listed in between"


def test_who_was_listed_after_its_end_can_come_back() -> None:
    lists = [["a0", "a1"], ["a0", "a1"], ["a0", "a1"], ["a0"], ["a0", "a1"]]
    assert joined_at(lists, {2: ["a1"]}) == [1, 5]
