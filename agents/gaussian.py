"""Policy-gradient agent for Box actions: independent normal distributions, clipped to the bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal

from penstock.agents.agent import Space
from penstock.agents.distributions import HALF_LOG_2_PI, BoxActions, gaussian_log_prob
from penstock.agents.inference import Inference
from penstock.agents.policy_gradient import PgAgent, PolicyHead
from penstock.agents.torch_agent import Device, ModelSource, output_array
from penstock.buffers.named import NamedArrays
from penstock.errors import SpaceError


class GaussianHead(PolicyHead):
    """Independent normal distributions. Reports actions before and after clipping."""

    outputs = (("mean",), ("mean", "log_std"))

    def __init__(self, action_space: Space, agent: str, initial_log_std: float | Sequence[float] | None = 0.0) -> None:
        self._box, self._agent, self._initial_log_std = BoxActions(action_space, agent), agent, initial_log_std
        self._raw_dtype = np.promote_types(self._box.dtype, np.float32)

    def prepare_model(self, model: nn.Module) -> None:
        if self._initial_log_std is None or hasattr(model, "log_std"):
            return
        given = np.asarray(self._initial_log_std, np.float64)
        try:
            initial = np.broadcast_to(given, self._box.shape)
        except ValueError:
            raise SpaceError(
                f"initial_log_std must be one number, or have the shape of an action, {self._box.shape}, "
                f"got shape {given.shape}"
            ) from None
        # In the dtype and on the device of the model's other parameters.
        like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
        model.register_parameter("log_std", nn.Parameter(torch.tensor(initial, dtype=like.dtype, device=like.device)))

    def draw(self, rng: np.random.Generator, n: int) -> npt.NDArray[Any]:
        return rng.standard_normal((n, *self._box.shape))

    def act(
        self, model: nn.Module, outputs: Sequence[Any], rows: int, noise: npt.NDArray[Any] | None
    ) -> tuple[npt.NDArray[Any], dict[str, Any]]:
        box, shape = self._box, (rows, *self._box.shape)
        mean = output_array(outputs[0], "mean", shape)
        log_std = output_array(
            outputs[1] if len(outputs) > 1 else self._own_log_std(model), "log_std", shape, box.shape
        )
        if log_std.shape != shape:
            log_std = np.broadcast_to(log_std, shape)
        exact = mean.astype(np.float64, copy=False)
        raw = exact if noise is None else exact + np.exp(log_std) * noise
        raw = raw.astype(self._raw_dtype, copy=False)
        # Compute it from the rounded action, which is recorded. So the learner gets the same log_prob.
        log_prob = gaussian_log_prob(raw, exact, log_std)
        info = {"raw_action": raw, "mean": mean, "log_std": log_std, "log_prob": log_prob.astype(np.float32)}
        return box.clip(raw), info

    # For learners: the parameters are mean and log_std `[..., *shape]`.

    def parameters(self, model: nn.Module, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        mean = outputs[0]
        log_std = outputs[1] if len(outputs) > 1 else self._own_log_std(model)
        return [mean, log_std.expand_as(mean)]

    def log_prob(self, parameters: Sequence[Tensor], action: Tensor, agent_info: NamedArrays) -> Tensor:
        mean, log_std = parameters
        z = (torch.as_tensor(agent_info.raw_action).to(mean) - mean) * (-log_std).exp()
        return self._summed(-0.5 * z * z - log_std - HALF_LOG_2_PI)

    def entropy(self, parameters: Sequence[Tensor]) -> Tensor:
        return self._summed(parameters[1] + (0.5 + HALF_LOG_2_PI))

    def distribution(self, parameters: Sequence[Tensor]) -> Distribution:
        mean, log_std = parameters
        normal = Normal(mean, log_std.exp(), validate_args=False)
        return Independent(normal, len(self._box.shape), validate_args=False)

    def _summed(self, values: Tensor) -> Tensor:
        n = len(self._box.shape)
        return values.flatten(-n).sum(-1) if n else values

    def _own_log_std(self, model: nn.Module) -> torch.Tensor:
        log_std = getattr(model, "log_std", None)
        if not isinstance(log_std, torch.Tensor):
            raise SpaceError(
                f"the model returned (mean, value) and has no parameter log_std of shape {self._box.shape}: return "
                f"(mean, log_std, value), or do not set initial_log_std to None; see {self._agent}"
            )
        return log_std


class GaussianPgAgent(PgAgent):
    """Samples from independent normal distributions, for a `Box` action space of a floating-point type.

    `model(observation)` returns `(mean, value)` or `(mean, log_std, value)`: mean `[B, ...]` in the shape of the
    actions, log_std in the same shape or without B, value `[B]` or `[B, 1]`.

    A model that returns `(mean, value)` has the logarithm of the standard deviation in its parameter `log_std`, which
    is the same in all states. If the model has none, `initialize` adds it with the value `initial_log_std`. Make the
    optimizer after `initialize`, so that `model.parameters()` contains it. With `initial_log_std=None` the agent adds
    nothing; use this for a model that returns log_std.

    The agent clips the actions that it draws to the bounds of the space, and `samples.agent.action` is the clipped
    action. Recorded in `agent_info`: `raw_action` `[T, B, ...]` before clipping (float32, or float64 for a float64
    space), `mean` and `log_std` `[T, B, ...]`, `log_prob` of `raw_action` and `value`, both `[T, B]`. Compute ratios
    of probabilities from `raw_action`: `log_prob` is not the density of the clipped action. The whole distribution is
    always recorded, so `record_distribution` changes nothing.

    `greedy_eval=True` takes the mean in evaluations. Each column has its own random stream, with one normal number
    per step and dimension.
    """

    def __init__(
        self,
        model: ModelSource,
        *,
        initial_log_std: float | Sequence[float] | None = 0.0,
        greedy_eval: bool = False,
        record_distribution: bool = False,
        inference: Inference = "torch",
        device: Device = None,
    ) -> None:
        super().__init__(
            model, greedy_eval=greedy_eval, record_distribution=record_distribution, inference=inference, device=device
        )
        self._initial_log_std = initial_log_std

    def _make_head(self, action_space: Space) -> PolicyHead:
        return GaussianHead(action_space, type(self).__name__, self._initial_log_std)
