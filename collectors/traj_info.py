"""TrajInfo: the record of one finished trajectory."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real
from typing import Any

__all__ = ["TrajInfo"]


class TrajInfo:
    """Length, Return, NonzeroRewards and DiscountedReturn of one trajectory.

    Subclasses add attributes in `__init__` and override `step`, which is called once per environment step, and
    `terminate`, called once when the trajectory has ended. `step` calls its `super()`, which counts. Constants
    come through `sampler.initialize(..., traj_info_kwargs={...})` as arguments of `__init__`.
    Attributes without a leading underscore are the record; everything in the instance's `__dict__`
    travels from the worker to the main process and must pickle.

    This class itself is never stepped: as long as it is not subclassed, its figures are computed from
    the recorded rewards, once per batch.
    """

    def __init__(self, discount: float = 1.0) -> None:
        number: object = discount  # numpy's floats are real numbers too
        if not isinstance(number, Real):
            raise TypeError(f"discount must be a number, got {discount!r}")
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
        """Account for one step: the `observation` acted on, the action, and what the environment
        returned for it.

        `observation` has the environment's own structure, `action` is what was recorded; both, and
        `agent_info`, are copies to be kept. `env_info` is the environment's own dict: copy what is kept of it.
        """
        self.Length += 1
        self.Return += float(reward)
        self.NonzeroRewards += int(reward != 0)
        self.DiscountedReturn += self._weight * float(reward)
        self._weight *= self._discount

    def terminate(self, final_observation: Any) -> None:
        """The trajectory has ended with `final_observation`, a copy to be kept."""

    @classmethod
    def restore(cls, attributes: dict[str, Any]) -> TrajInfo:
        """The instance whose attributes a worker has sent; `__init__` does not run again."""
        info = cls.__new__(cls)
        vars(info).update(attributes)
        return info

    @classmethod
    def from_figures(cls, figures: Iterable[tuple[int, float, int, float]]) -> list[TrajInfo]:
        """One instance per row of Length, Return, NonzeroRewards and DiscountedReturn."""
        infos = []
        for length, return_, nonzero_rewards, discounted_return in figures:
            info = cls.__new__(cls)
            # Written out, since thousands of short episodes may end in one batch: a third of `restore`'s cost.
            info.Length, info.Return = length, return_
            info.NonzeroRewards, info.DiscountedReturn = nonzero_rewards, discounted_return
            infos.append(info)
        return infos

    def __repr__(self) -> str:
        fields = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if not k.startswith("_"))
        return f"{type(self).__name__}({fields})"
