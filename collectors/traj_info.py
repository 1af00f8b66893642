"""TrajInfo: the record of one finished trajectory."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real
from typing import Any

from penstock.errors import ConfigError


class TrajInfo:
    """The record of one finished trajectory.

    Attributes: `Length`, the number of steps; `Return`, the sum of the rewards; `NonzeroRewards`, the number of rewards
    that are not zero; `DiscountedReturn`, the sum with reward k weighted by `discount ** k`.

    To record more, write a subclass. Add attributes in `__init__`. Override `step`, which is called after every
    environment step, or `terminate`, which is called once at the end. Both run in the worker; call `super().step(...)`
    in `step`. Override `traj_done` if a trajectory has several episodes. Arguments of `__init__` come from
    `sampler.initialize(..., traj_info_kwargs={...})`. Attributes with a leading underscore are left out of the `repr`.
    The instance's `__dict__` is sent to the main process, so all of it must be picklable.

    Without a subclass nothing is called per step: the figures are computed once per batch, from its float32 rewards.
    """

    # The sampler sets these. Where several agents share an environment, there is one record for each agent, and one for
    # the whole game, with `agent_id` None and the rewards of all agents.
    env_rank: int | None = None  #: the environment
    episode: int | None = None  #: how many trajectories, or games, had ended in it before, since the start
    #: Of the reset that began it, in evaluations, if that had one; with several agents and `seed_episodes=True` also in
    #: training: that of the game in which it ended.
    seed: int | None = None
    agent_id: Any = None  #: the agent
    policy: str | None = None  #: the name of the policy that played the agent

    def __init__(self, discount: float = 1.0) -> None:
        number: object = discount  # numpy's floats are real numbers too
        if not isinstance(number, Real):
            raise ConfigError(f"discount must be a number, got {discount!r}")
        self.Length = 0
        self.Return = 0.0
        self.NonzeroRewards = 0
        self.DiscountedReturn = 0.0
        self._discount = discount
        self._weight = 1.0

    def step(
        self,
        observation: Any,
        action: Any,
        reward: float,
        terminated: bool,
        truncated: bool,
        agent_info: Any,
        env_info: dict[str, Any],
    ) -> None:
        """Add one step: the agent saw `observation` and chose `action`, with its `agent_info`.

        The environment returned the rest. `observation`, `action` and `reward` are the environment's own values, not
        the recorded ones. `agent_info` is this column's part. All of these are copies, so you may keep them. `env_info`
        is the environment's own dict, which it may reuse: copy what you keep of it.
        """
        self.Length += 1
        self.Return += float(reward)
        self.NonzeroRewards += int(reward != 0)
        self.DiscountedReturn += self._weight * float(reward)
        self._weight *= self._discount

    def traj_done(self, terminated: bool, truncated: bool, env_info: dict[str, Any]) -> bool:
        """Whether the trajectory has ended. Called after `step`, where an episode has ended.

        Override it if a trajectory has several episodes: if each is one life of a game, for example. Where it returns
        False, the trajectory goes on in the environment's next episode, and nothing is reported.
        """
        return True

    def terminate(self, final_observation: Any) -> None:
        """The trajectory ended with `final_observation`, a copy that you may keep."""

    @classmethod
    def restore(cls, attributes: dict[str, Any]) -> TrajInfo:
        """An instance with the attributes that a worker sent. `__init__` does not run again."""
        info = cls.__new__(cls)
        vars(info).update(attributes)
        return info

    @classmethod
    def from_records(cls, records: Iterable[tuple[int, int, int, float, int, float]]) -> list[TrajInfo]:
        """One instance per record: t, env_rank, Length, Return, NonzeroRewards and DiscountedReturn."""
        infos = []
        for _, _, length, return_, nonzero_rewards, discounted_return in records:
            info = cls.__new__(cls)
            # Three times as fast as `restore`: thousands of short episodes may end in one batch.
            info.Length, info.Return = length, return_
            info.NonzeroRewards, info.DiscountedReturn = nonzero_rewards, discounted_return
            infos.append(info)
        return infos

    def __repr__(self) -> str:
        fields = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if not k.startswith("_"))
        return f"{type(self).__name__}({fields})"
