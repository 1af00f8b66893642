"""Epsilon-greedy agent for Q-networks. Epsilon may depend on the environment and on itr."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.agents.action_masks import ActionMask, mask_of
from penstock.agents.agent import AgentStep, Space
from penstock.agents.inference import Inference
from penstock.agents.noise import ColumnNoise
from penstock.agents.schedules import ColumnSetting, Setting
from penstock.agents.torch_agent import Device, ModelSource, TorchAgent, output_array
from penstock.buffers.named import NamedArrays
from penstock.errors import SpaceError


class EpsilonGreedyAgent(TorchAgent):
    """Takes the action with the largest Q, or, with probability epsilon, a random action.

    `model(observation)` returns q `[B, n]` for a `Discrete(n)` action space. Of equal q, the agent takes the first.

    `epsilon` is one number, or one per environment in the order of env_ranks, or a function of itr that returns
    either, such as `LinearSchedule(1.0, 0.05, n_itrs=200)`. Each worker calls the function at the start of a
    batch. With `spread`, environment i of N uses `epsilon ** (1 + spread * i / (N - 1))` (Ape-X: epsilon 0.4,
    spread 7). Evaluations use `eval_epsilon`.

    Recorded in `agent_info`, all `[T, B]`: `q` of the action (float32), `epsilon` (float32), and `explored` (bool).
    `explored` is True for a random action, even if it is the best one. `value` is the largest q.

    With `mask_key`, both the best and the random action are legal ones, and `value` is the largest q of a legal action
    (see `Agent.mask_key`).
    """

    action_space: spaces.Discrete
    _mask: ActionMask | None

    def __init__(
        self,
        model: ModelSource,
        *,
        epsilon: Setting = 0.1,
        spread: float | None = None,
        eval_epsilon: float = 0.0,
        mask_key: str | None = None,
        inference: Inference = "torch",
        device: Device = None,
    ) -> None:
        super().__init__(model, inference=inference, device=device)
        self.mask_key = mask_key
        self._epsilon_setting = ColumnSetting("epsilon", epsilon, highest=1.0, spread=spread)
        self._eval_setting = ColumnSetting("eval_epsilon", float(eval_epsilon), highest=1.0)
        self._epsilon: npt.NDArray[np.float64] | None = None

    def initialize(self, observation_space: Space, action_space: Space, *, seed: int | None = None) -> None:
        if not isinstance(action_space, spaces.Discrete):
            raise SpaceError(
                f"EpsilonGreedyAgent needs a Discrete action space, the environment has {action_space}: "
                "use an agent for this space, or discretize the actions with a wrapper"
            )
        super().initialize(observation_space, action_space, seed=seed)
        self._mask = mask_of(self)

    def seed_columns(self, rngs: Sequence[np.random.Generator]) -> None:
        # Two uniform numbers per step: one decides whether to explore, the other selects the random action.
        self._noise = ColumnNoise(rngs, lambda rng, n: rng.random((n, 2)))
        self._n_columns = len(rngs)
        self._epsilon = None

    def sample_mode(self, itr: int) -> None:
        super().sample_mode(itr)
        self._epsilon = self._epsilon_setting.at(itr, self._n_columns, self.env_ranks, self.n_envs)

    def eval_mode(self, itr: int) -> None:
        super().eval_mode(itr)
        self._epsilon = self._eval_setting.at(itr, self._n_columns, None, None)

    def _set_greedy(self, greedy: bool) -> None:
        if greedy and self._epsilon is not None:
            self._epsilon = np.zeros_like(self._epsilon)

    def step(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> AgentStep:
        q = self._q(self.forward(observation, prev_action, prev_reward), len(prev_reward))
        return self._choose(q, self._legal(observation))

    def value(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> Any:
        q = self._q(self.forward(observation, prev_action, prev_reward), len(prev_reward))
        return self._largest(q, self._legal(observation))

    def _largest(self, q: npt.NDArray[Any], legal: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.float32]:
        largest: npt.NDArray[Any] = (q if legal is None else np.where(legal, q, -np.inf)).max(axis=1)
        return largest.astype(np.float32)

    def _choose(self, q: npt.NDArray[Any], legal: npt.NDArray[np.bool_] | None, **more: Any) -> AgentStep:
        """Actions for q `[B, n]`, of the `legal` ones `[B, n]` (None: all are), and agent_info with `more`."""
        if self._epsilon is None:  # no sampler has called sample_mode
            self.sample_mode(0)
            assert self._epsilon is not None
        epsilon = self._epsilon if self.selected is None else self._epsilon[self.selected]
        n = int(self.action_space.n)
        noise = self._noise.next_row(self.selected)
        explored = noise[:, 0] < epsilon
        if legal is None:
            random, best = (noise[:, 1] * n).astype(np.int64), q.argmax(axis=1)
        else:
            assert self._mask is not None
            random = self._mask.draw(legal, noise[:, 1:]).astype(np.int64) - int(self.action_space.start)
            best = np.where(legal, q, -np.inf).argmax(axis=1)
        index = np.where(explored, random, best)
        q_of_action = q[np.arange(len(index)), index].astype(np.float32)
        info = NamedArrays(q=q_of_action, epsilon=np.float32(epsilon), explored=explored, **more)
        return AgentStep((index + self.action_space.start).astype(self.action_space.dtype, copy=False), info)

    def _legal(self, observation: object) -> npt.NDArray[np.bool_] | None:
        """Which actions are legal `[B, n]`; None without a mask."""
        return None if self._mask is None else self._mask.legal(observation)

    def _q(self, output: object, rows: int) -> npt.NDArray[Any]:
        """The model's output as an array `[B, n]`."""
        q = output_array(output, "q", (rows, int(self.action_space.n)))
        if np.isnan(q).any():  # argmax would choose NaN
            raise FloatingPointError(f"the model returned NaN as q: {q[np.isnan(q).any(axis=1)][0]}")
        return q
