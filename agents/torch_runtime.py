"""What samplers do with an agent that holds a torch model: copy the model, compile it, and lock pages for a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from penstock.agents.agent import AgentRuntime
from penstock.agents.device import DeviceLink
from penstock.agents.inference import TracedModel
from penstock.agents.numpy_model import NumpyModel
from penstock.buffers.reports import in_one_line
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.agents.torch_agent import TorchAgent


_TOLERANCE = 1e-4  # the largest difference to torch's outputs; where these are larger than 1, a share of them


class TorchRuntime(AgentRuntime):
    """The samplers' side of a `TorchAgent`."""

    agent: TorchAgent

    def worker_copy(self) -> TorchAgent:
        copied = self._plain_copy()
        copied.model = copied.model.cpu()
        copied._link = None
        return self._with_inference(copied)

    def server_copy(self) -> TorchAgent:
        copied = self._plain_copy()
        if copied._link is not None and copied.inference != "torch":
            raise ConfigError(
                f'inference="{copied.inference}" is for models on the CPU, the model is on {copied._link.device}: use '
                'inference="torch", or move the model'
            )
        return self._with_inference(copied)

    def _with_inference(self, copied: TorchAgent) -> TorchAgent:
        """Make `copied` run its model as its `inference` says; returns it."""
        if copied.inference != "torch":
            copied._act_mode()
        if copied.inference == "traced":
            copied._compiled_model = TracedModel(copied.model)
        elif copied.inference == "numpy":
            copied._numpy_model = NumpyModel(copied.model)
        return copied

    def _plain_copy(self) -> TorchAgent:
        copied = self.agent.copy_for_worker()
        copied.model = _copy_of(copied.model)
        device = next((p.device for p in copied.model.parameters()), None)
        copied._link = DeviceLink(device) if device is not None and device.type != "cpu" else None
        copied._compiled_model = copied._numpy_model = None
        copied._model_source = nn.Identity  # a worker does not call it, and it might not be picklable
        return copied

    def inference_difference(self, make_inputs: Callable[[], Sequence[Any]]) -> float | None:
        agent = self.agent
        if agent.inference == "torch":
            return None
        inputs = make_inputs()
        plain = copy.copy(agent)
        plain._compiled_model = plain._numpy_model = None
        largest = 0.0
        for i, (ours, exact) in enumerate(
            zip(_arrays(agent.forward(*inputs)), _arrays(plain.forward(*inputs)), strict=True)
        ):
            if ours.shape != exact.shape:
                raise self._too_different(f"output {i} has the shape {ours.shape}, with torch {exact.shape}")
            # Where both are -inf, as logits may be, there is no difference.
            differences = np.subtract(ours, exact, out=np.zeros_like(exact), where=ours != exact)
            difference = float(np.abs(differences).max(initial=0.0))
            allowed = _TOLERANCE * max(1.0, float(np.abs(exact[np.isfinite(exact)]).max(initial=0.0)))
            if not difference <= allowed:
                raise self._too_different(f"output {i} differs by {difference:.3g}, more than {allowed:.3g}")
            largest = max(largest, difference)
        return largest

    def _too_different(self, how: str) -> ConfigError:
        return ConfigError(
            f'inference="{self.agent.inference}" computes other outputs than the model, on observations of the '
            f'environment: {how}. Use inference="torch" for this model'
        )

    def compile_model(self, options: Mapping[str, Any]) -> None:
        if self.agent.inference != "torch":
            raise ConfigError(f'compile_model needs an agent with inference="torch", got "{self.agent.inference}"')
        try:
            self.agent._compiled_model = torch.compile(self.agent.model, **options)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"torch.compile(model, **{dict(options)}) raised {in_one_line(error)}") from error

    def page_locked(self, memory: npt.NDArray[np.uint8]) -> AbstractContextManager[None]:
        link = self.agent._link
        return nullcontext() if link is None else link.page_locked(memory)


def _arrays(outputs: Any) -> list[npt.NDArray[np.float64]]:
    """The outputs of a model as arrays."""
    parts = outputs if isinstance(outputs, tuple | list) else [outputs]
    return [np.asarray(part.detach() if isinstance(part, torch.Tensor) else part, np.float64) for part in parts]


def _copy_of(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                try:
                    if name != "_modules":
                        copy.deepcopy(value)
                except Exception as cause:
                    where = f"its attribute {path + '.' if path else ''}{name}"
                    raise _copy_error(model, where, cause) from cause
        raise _copy_error(model, "it", error) from error


def _copy_error(model: nn.Module, what: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"the model, a {type(model).__name__}, cannot be copied for the workers, which act with their own copies: "
        f"copy.deepcopy of {what} raised {in_one_line(error)}. Exclude it from copies "
        "(__deepcopy__, __getstate__), or make it on first use"
    )
