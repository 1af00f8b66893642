"""Agent for normal distributions that a tanh squashes into the bounds, as in soft actor-critic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, distributions

from penstock.agents.agent import AgentStep, Space
from penstock.agents.distributions import HALF_LOG_2_PI, BoxActions, gaussian_log_prob, tanh_log_slope
from penstock.agents.inference import Inference
from penstock.agents.noise import ColumnNoise
from penstock.agents.policy_gradient import EvaluatedSteps, replayed_rows, require_samples
from penstock.agents.torch_agent import Device, ModelSource, TorchAgent, output_array, output_tuple
from penstock.buffers.named import NamedArrays
from penstock.buffers.samples import Samples

_EDGE = 1.0 - 2.0**-53  # the largest float64 below 1, whose arctanh is finite
_N_POINTS = 64  # of the quadrature of the entropy, for each dimension of the action


class SquashedGaussianAgent(TorchAgent):
    """Samples from independent normal distributions, takes the tanh and scales it to the bounds of the `Box`.

    `model(observation)` returns `(mean, log_std)`, both `[B, ...]` in the shape of the actions, before the tanh.
    Limit log_std in the model: the agent does not. Every dimension of the action space must be bounded.

    Recorded in `agent_info`: `raw_action`, `mean` and `log_std` `[T, B, ...]` before the tanh, and `log_prob`
    `[T, B]` of the action in the environment's units, corrected for tanh and scale. While itr < `warmup_random_itrs`,
    actions come from the uniform distribution between the bounds, and `log_prob` is its density.

    `greedy_eval` takes the mean in evaluations. For the learner, `agent.action_of(raw)` computes actions from
    tensors, with gradients, and `agent.evaluate(part)` the `log_prob` of recorded ones. The agent has no `value`: the
    critics belong to the learner.
    """

    _forms = (("mean", "log_std"),)

    def __init__(
        self,
        model: ModelSource,
        *,
        greedy_eval: bool = True,
        warmup_random_itrs: int = 0,
        inference: Inference = "torch",
        device: Device = None,
    ) -> None:
        super().__init__(model, inference=inference, device=device)
        self.greedy_eval, self.warmup_random_itrs = greedy_eval, warmup_random_itrs
        self._is_random = False

    def initialize(self, observation_space: Space, action_space: Space, *, seed: int | None = None) -> None:
        self._box = BoxActions(action_space, type(self).__name__, bounded=True)
        self._log_half_range = float(np.log(self._box.half_range).sum())
        self._raw_dtype = np.promote_types(self._box.dtype, np.float32)
        super().initialize(observation_space, action_space, seed=seed)

    def seed_columns(self, rngs: Sequence[np.random.Generator]) -> None:
        shape = self._box.shape
        self._noise = ColumnNoise(rngs, lambda rng, n: rng.standard_normal((n, *shape)))
        self._uniform = ColumnNoise(rngs, lambda rng, n: rng.uniform(-_EDGE, _EDGE, (n, *shape)))

    def sample_mode(self, itr: int) -> None:
        super().sample_mode(itr)
        self._is_random = itr < self.warmup_random_itrs

    def eval_mode(self, itr: int) -> None:
        super().eval_mode(itr)
        self._is_random = False

    def step(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> AgentStep:
        output = output_tuple(self.forward(observation, prev_action, prev_reward), self._forms, type(self).__name__)
        shape = (len(prev_reward), *self._box.shape)
        mean, log_std = (
            output_array(part, name, shape) for part, name in zip(output, ("mean", "log_std"), strict=True)
        )
        exact = mean.astype(np.float64, copy=False)
        if self._is_random:
            raw = np.arctanh(self._uniform.next_row(self.selected))
        else:
            raw = exact if self._greedy else exact + np.exp(log_std) * self._noise.next_row(self.selected)
        recorded = raw.astype(self._raw_dtype, copy=False)
        raw = recorded.astype(np.float64, copy=False)
        log_prob = gaussian_log_prob(raw, exact, log_std)
        if self._is_random:
            log_prob = np.full(len(raw), -np.log(2.0) * exact[0].size)
        else:
            log_prob = log_prob - tanh_log_slope(raw).reshape(len(raw), -1).sum(axis=1)
        info = NamedArrays(
            raw_action=recorded,
            mean=mean,
            log_std=log_std,
            log_prob=(log_prob - self._log_half_range).astype(np.float32),
        )
        return AgentStep(self._box.scale(np.tanh(raw)), info)

    def action_of(self, raw: torch.Tensor) -> torch.Tensor:
        """The action `[..., *shape]` for values before the tanh: a tensor, with gradients."""
        return self._box.scale_torch(raw.tanh())

    def evaluate(self, part: Samples) -> EvaluatedSteps:
        """`log_prob` and `entropy` of recorded steps with the present parameters, as `PgAgent.evaluate` finds them.

        Both belong to the action in the environment's units. There is no `value`. For steps of the random warm-up,
        `log_prob` is that of the policy, not the recorded one.
        """
        require_samples(part)
        lead, raw = part.env.valid.shape, torch.as_tensor(part.agent.agent_info.raw_action)
        outputs = replayed_rows(self, part, self._forms)
        mean, log_std = (output.reshape(*lead, *self._box.shape) for output in outputs)

        def summed(log_probs: Tensor) -> Tensor:
            return log_probs[..., None].flatten(len(lead)).sum(-1)

        def entropy() -> Tensor:
            # It has no closed form: the mean of the slope over each normal distribution, by Gauss-Hermite quadrature.
            points, weights = (mean.new_tensor(x) for x in np.polynomial.hermite_e.hermegauss(_N_POINTS))
            slope = _log_slope(mean[..., None] + log_std.exp()[..., None] * points) @ (weights / weights.sum())
            return summed(0.5 + HALF_LOG_2_PI + log_std + slope) + self._log_half_range

        def distribution() -> distributions.Distribution:
            center, half_range = mean.new_tensor(self._box.center), mean.new_tensor(self._box.half_range)
            # The transforms are cached, so that the tanh of a drawn action is not inverted where it is flat.
            to_bounds = distributions.AffineTransform(center, half_range, cache_size=1)
            squashed = distributions.TransformedDistribution(
                distributions.Normal(mean, log_std.exp()), [distributions.TanhTransform(cache_size=1), to_bounds]
            )
            return distributions.Independent(squashed, len(self._box.shape))

        # In float64, as when the agent acted: the slope of the tanh may nearly cancel the rest.
        raw, exact_mean, exact_log_std = (x.double() for x in (raw.to(mean.device), mean, log_std))
        z = (raw - exact_mean) * (-exact_log_std).exp()
        log_prob = summed(-0.5 * z * z - exact_log_std - HALF_LOG_2_PI - _log_slope(raw)) - self._log_half_range
        return EvaluatedSteps(log_prob.to(mean.dtype), None, entropy, distribution)


def _log_slope(x: Tensor) -> Tensor:
    """As `tanh_log_slope`, for a tensor, with gradients."""
    return 2.0 * (math.log(2.0) - x - torch.nn.functional.softplus(-2.0 * x))
