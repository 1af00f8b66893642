"""What samplers do with an agent that holds a torch model: copy the model, compile it, and lock pages for a GPU."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from penstock.agents.device import DeviceLink
from penstock.agents.runtime import AgentRuntime
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.agents.torch_agent import TorchAgent


class TorchRuntime(AgentRuntime):
    """The samplers' side of a `TorchAgent`."""

    agent: TorchAgent

    def worker_copy(self) -> TorchAgent:
        copied = self.server_copy()
        copied.model = copied.model.cpu()
        copied._link = None
        return copied

    def server_copy(self) -> TorchAgent:
        copied = self.agent.copy_for_worker()
        copied.model = _copy_of(copied.model)
        device = next((p.device for p in copied.model.parameters()), None)
        copied._link = DeviceLink(device) if device is not None and device.type != "cpu" else None
        copied._compiled_model = None
        copied._model_source = nn.Identity  # a worker does not call it, and it might not be picklable
        return copied

    def compile_model(self, options: Mapping[str, Any]) -> None:
        try:
            self.agent._compiled_model = torch.compile(self.agent.model, **options)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"torch.compile(model, **{dict(options)}) raised {error}") from error

    def page_locked(self, memory: npt.NDArray[np.uint8]) -> AbstractContextManager[None]:
        link = self.agent._link
        return nullcontext() if link is None else link.page_locked(memory)


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
        f"copy.deepcopy of {what} raised {type(error).__name__}: {error}. Exclude it from copies "
        "(__deepcopy__, __getstate__), or make it on first use"
    )
