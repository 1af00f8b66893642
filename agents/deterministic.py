"""Agent for deterministic policies with exploration noise, as in DDPG and TD3."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from penstock.agents.agent import AgentStep, Space
from penstock.agents.distributions import BoxActions
from penstock.agents.inference import Inference
from penstock.agents.noise import ColumnNoise, OrnsteinUhlenbeck
from penstock.agents.random import draw
from penstock.agents.schedules import ColumnSetting, Setting
from penstock.agents.torch_agent import Device, ModelSource, TorchAgent, output_array
from penstock.arguments import one_of


class DeterministicPgAgent(TorchAgent):
    """Takes the model's action plus noise, clipped to the bounds of the `Box` action space.

    `model(observation)` returns actions `[B, ...]` in the environment's units. With `squash=True` it returns any
    numbers; the agent takes their tanh and scales it to the bounds. For the learner, `agent.action_of(output)`
    computes the same from a tensor, with gradients.

    `sigma` is the standard deviation of the noise. Its unit is half the range between the bounds, so that 0.1 means
    the same for every action space. In a dimension with fewer than two bounds, the unit is 1. `sigma` is one number,
    or one per environment in the order of env_ranks, or a function of itr that returns either.

    With `noise="ou"` the noise is an Ornstein-Uhlenbeck process (`OrnsteinUhlenbeck`, `ou_theta`, `ou_dt`), which
    starts at zero in each episode. While itr < `warmup_random_itrs`, actions are random, as with `RandomAgent`.
    Evaluations have no noise.

    The agent records nothing in `agent_info` and has no `value`: the critic belongs to the learner.
    """

    def __init__(
        self,
        model: ModelSource,
        *,
        sigma: Setting = 0.1,
        noise: Literal["gaussian", "ou"] = "gaussian",
        ou_theta: float = 0.15,
        ou_dt: float = 1.0,
        squash: bool = False,
        warmup_random_itrs: int = 0,
        inference: Inference = "torch",
        device: Device = None,
    ) -> None:
        super().__init__(model, inference=inference, device=device)
        one_of("noise", noise, ("gaussian", "ou"))
        self._sigma_setting = ColumnSetting("sigma", sigma)
        self._ou = (ou_theta, ou_dt) if noise == "ou" else None
        self.squash, self.warmup_random_itrs = squash, warmup_random_itrs
        self._scale: npt.NDArray[np.float64] | None = None
        self._is_eval = self._is_random = False

    def initialize(self, observation_space: Space, action_space: Space, *, seed: int | None = None) -> None:
        self._box = BoxActions(action_space, type(self).__name__, bounded=self.squash)
        super().initialize(observation_space, action_space, seed=seed)

    def seed_columns(self, rngs: Sequence[np.random.Generator]) -> None:
        shape = self._box.shape
        self._noise = ColumnNoise(rngs, lambda rng, n: rng.standard_normal((n, *shape)))
        self._uniform = ColumnNoise(rngs, partial(draw, self.action_space))
        self._n_columns = len(rngs)
        self._scale = None
        self.reset()

    def reset(self) -> None:
        self._process = OrnsteinUhlenbeck(self._n_columns, self._box.shape, *self._ou) if self._ou else None

    def reset_one(self, column: int) -> None:
        if self._process is not None:
            self._process.reset_one(column)

    def sample_mode(self, itr: int) -> None:
        super().sample_mode(itr)
        self._is_eval, self._is_random = False, itr < self.warmup_random_itrs
        sigma = self._sigma_setting.at(itr, self._n_columns, self.env_ranks, self.n_envs)
        self._scale = sigma.reshape(-1, *(1,) * len(self._box.shape)) * self._box.half_range

    def eval_mode(self, itr: int) -> None:
        super().eval_mode(itr)
        self._is_eval, self._is_random = True, False

    def step(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> AgentStep:
        if self._is_random:
            return AgentStep(self._uniform.next_row(self.selected))
        output = self.forward(observation, prev_action, prev_reward)
        action = output_array(output, "action", (len(prev_reward), *self._box.shape)).astype(np.float64, copy=False)
        if not np.isfinite(action).all():
            raise FloatingPointError(f"the model returned an action that is not finite: {action}")
        if self.squash:
            action = self._box.center + self._box.half_range * np.tanh(action)
        if not self._is_eval:
            action = action + self._noise_row()
        return AgentStep(self._box.clip(action))

    def _noise_row(self) -> Any:
        if self._scale is None:  # no sampler has called sample_mode
            self.sample_mode(0)
            assert self._scale is not None
        normals, scale = self._noise.next_row(self.selected), self._scale
        if self.selected is not None:
            scale = scale[self.selected]
        return scale * normals if self._process is None else self._process.next_row(normals, scale, self.selected)

    def action_of(self, output: torch.Tensor) -> torch.Tensor:
        """The action `[..., *shape]` without noise, for an output of the model: a tensor, with gradients."""
        return self._box.scale_torch(output.tanh()) if self.squash else output
