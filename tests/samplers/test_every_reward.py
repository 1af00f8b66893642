"""Every reward that an environment of any kind has paid is in one cell, or counted as late."""

from __future__ import annotations

from typing import Any

from gymnasium.vector import SyncVectorEnv
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.envs import CountingEnv, OwnClocks
from penstock.envs.toy import ScriptedGame

from ..scale import examples
from ..toy_games import Clocks, TurnGame
from .started import started


class Payments:
    """Each reward is 1.0, and who has not decided yet gets at most one: so late rewards can be counted."""

    def __init__(self) -> None:
        self.paid, self.has_decided, self.was_paid = 0, set[str](), set[str]()

    def due(self, agent: str, is_there: bool = True) -> bool:
        is_due = not is_there or agent in self.has_decided or agent not in self.was_paid
        self.was_paid |= {agent} if is_there else set()
        self.paid += is_due
        return is_due


class PaidMoves(TurnGame):
    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.payments = Payments()

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        super().reset(seed)
        self.payments.has_decided, self.payments.was_paid = set(), set()
        for agent in self.agents[: self._rng.integers(3)]:  # before the first move
            self._rewards[agent] += self.payments.due(agent)

    def step(self, action: Any) -> None:
        mover, before = self.agent_selection, dict(self._rewards)
        super().step(action)
        if action is not None:
            before[mover] = 0.0
            self.payments.has_decided.add(mover)
            for agent, reward in before.items():
                self._rewards[agent] = reward + (self._rewards[agent] != reward and self.payments.due(agent))

    @property
    def owed(self) -> float:
        """What was paid and not returned yet: that of the agent whose turn it is was returned."""
        return sum(self._rewards[agent] for agent in self.agents if agent != self.agent_selection)


class PaidClocks(Clocks):
    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.payments = Payments()

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.payments.has_decided, self.payments.was_paid = set(), set()
        return super().reset(seed, options)

    def step(self, actions: dict[str, int]) -> Any:
        before, payments = set(self.agents), self.payments
        payments.has_decided |= actions.keys()
        observations, rewards, *flags, infos = super().step(actions)
        there = before | set(self.agents)
        rewards = {agent: 1.0 for agent in rewards if payments.due(agent, agent in there)}
        payments.has_decided &= set(self.agents)
        payments.was_paid &= set(self.agents)
        return observations, rewards, *flags, infos


class OwingClocks(OwnClocks):
    @property
    def owed(self) -> float:
        return sum(reward for agent, reward in self._rewards.items() if agent != self.agent_selection)


class PaidSteps(CountingEnv):
    owed = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.payments = Payments()

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        self.payments.paid += 1
        return observation, 1.0, *rest


class PaidGame(ScriptedGame):
    owed = 0.0

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.payments = Payments()

    def step(self, actions: dict[str, Any]) -> Any:
        observations, rewards, *rest = super().step(actions)
        self.payments.paid += len(rewards)
        return observations, dict.fromkeys(rewards, 1.0), *rest


#: Each for k agents.
PAID: dict[str, Any] = {
    "turns": PaidMoves,
    "own clocks": lambda k: OwingClocks(PaidClocks(k)),
    "lock-step": PaidGame,
    "single": lambda k: PaidSteps(),
    "batched": lambda k: PaidSteps(),
}


@given(
    kind=st.sampled_from(list(PAID)),
    k=st.integers(1, 4),
    T=st.integers(1, 9),
    B=st.integers(1, 3),
    seed=st.integers(0, 2**20),
)
@example(kind="own clocks", k=2, T=2, B=1, seed=121309)  # a reward at the beginning of the last game
@examples(40, 400)
def test_every_reward_is_in_one_cell_or_is_counted(kind: str, k: int, T: int, B: int, seed: int) -> None:
    made: list[Any] = []

    def env_fn() -> Any:
        made.append(PAID[kind](k))
        return made[-1]

    def batched(num_envs: int) -> Any:
        return SyncVectorEnv([env_fn] * num_envs)

    is_batched = kind == "batched"
    options: dict[str, Any] = {"batched": is_batched, "batch_T": T, "batch_B": B, "seed": seed}
    with started(batched if is_batched else env_fn, **options) as sampler:
        recorded = 0.0
        for itr in range(6):
            samples, _ = sampler.obtain_samples(itr)
            recorded += float(samples.env.reward.sum())
            late, envs = sampler.stats().late_rewards, made[-B:]
            assert recorded + late == sum(env.payments.paid - env.owed for env in envs), kind
