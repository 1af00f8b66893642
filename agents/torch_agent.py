"""The base of agents whose policy is a `torch.nn.Module`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from penstock.agents.base import Agent
from penstock.agents.device import DeviceLink
from penstock.buffers.named import map_leaves
from penstock.errors import ConfigError

__all__ = ["TorchAgent"]

_Self = TypeVar("_Self", bound="TorchAgent")


class TorchAgent(Agent):
    """Holds a model and moves its parameters to and from shared memory; subclasses override `step`.

    `model` is an `nn.Module`, or a callable that builds one: without arguments, or with
    `observation_space` and `action_space` where its signature names them. A model built here, under a
    sampler seed, starts from the same weights every time, and torch's own generator is left alone.

    The module's `forward` takes `(observation)`, or `(observation, prev_action, prev_reward)` if it has
    three parameters or more; that of a recurrent agent takes the state as a fourth.
    """

    model: nn.Module
    _link: DeviceLink | None = None  #: the way to where a copy's model is, if not on the CPU
    _compiled: Callable[..., Any] | None = None  #: a copy's model, compiled

    def __init__(self, model: nn.Module | Callable[..., nn.Module]) -> None:
        if not (isinstance(model, nn.Module) or callable(model)):
            raise ConfigError(f"model must be an nn.Module or a callable that builds one, got {type(model).__name__}")
        self._model_source = model

    def initialize(
        self, observation_space: gym.Space[Any], action_space: gym.Space[Any], *, seed: int | None = None
    ) -> None:
        super().initialize(observation_space, action_space, seed=seed)
        self.model = self._build_model(seed)
        parameters = inspect.signature(self.model.forward).parameters
        positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._takes_previous = len(positional) >= 3
        floats = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        self._float_dtype = next(floats, torch.float32)

    def _build_model(self, seed: int | None) -> nn.Module:
        source = self._model_source
        if isinstance(source, nn.Module):
            return source
        names = inspect.signature(source).parameters
        offered = {"observation_space": self.observation_space, "action_space": self.action_space}
        arguments = {name: space for name, space in offered.items() if name in names}
        with torch.random.fork_rng(devices=[], enabled=seed is not None):
            if seed is not None:
                # Not torch.manual_seed, which seeds every GPU's generator too, and those are not forked here.
                torch.default_generator.manual_seed(seed)
            try:
                model = source(**arguments)
            except TypeError as error:
                raise ConfigError(
                    f"the model could not be built: {error}. It is called without arguments, or with those of "
                    "observation_space and action_space that its signature names"
                ) from error
        if not isinstance(model, nn.Module):
            raise ConfigError(f"the model factory must return an nn.Module, got {type(model).__name__}")
        return model

    def forward(
        self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32], state: Any = None
    ) -> Any:
        """The model's output for numpy inputs `[B, ...]`, on this copy's device, without gradients.

        Floating-point inputs are cast to the dtype of the model's parameters; integers stay. A `state`, in
        tensors, is passed on as it is.
        """
        model = self.model if self._compiled is None else self._compiled
        with torch.inference_mode():
            if state is not None:
                return model(self._tensor(observation), self._tensor(prev_action), self._tensor(prev_reward), state)
            if self._takes_previous:
                return model(self._tensor(observation), self._tensor(prev_action), self._tensor(prev_reward))
            return model(self._tensor(observation))

    def fetched(self, outputs: Sequence[Any]) -> Sequence[Any]:
        """Several outputs of the model in this process's memory, waited for together: from a GPU, each by itself
        costs a wait."""
        return outputs if self._link is None else self._link.fetch(outputs)

    def _tensor(self, value: Any) -> Any:
        return map_leaves(self._leaf_tensor, value)

    def _leaf_tensor(self, leaf: npt.NDArray[Any]) -> torch.Tensor:
        if self._link is not None:
            return self._link.send(leaf, self._float_dtype)
        tensor = torch.from_numpy(leaf)
        return tensor.to(self._float_dtype) if tensor.is_floating_point() else tensor

    # ---- modes -----------------------------------------------------------------------------

    def train_mode(self, itr: int) -> None:
        self.model.train()

    def sample_mode(self, itr: int) -> None:
        self._act_mode()

    def eval_mode(self, itr: int) -> None:
        self._act_mode()

    def _act_mode(self) -> None:
        if any(module.training for module in self.model.modules()):  # setting it takes ten times as long as looking
            self.model.eval()

    # ---- parameters ------------------------------------------------------------------------

    def _tensors(self) -> dict[str, torch.Tensor]:
        # Buffers too: running statistics are as much a part of the policy as weights. Not the
        # state_dict, which leaves out buffers that are not persistent.
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def read_parameters(self) -> Mapping[str, npt.NDArray[Any]]:
        return {name: _bits(tensor.detach().cpu()).numpy() for name, tensor in self._tensors().items()}

    def write_parameters(self, parameters: Mapping[str, npt.NDArray[Any]]) -> None:
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                _bits(tensor).copy_(torch.from_numpy(parameters[name]))

    def state_dict(self) -> dict[str, Any]:
        return self.model.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state)

    def worker_copy(self: _Self) -> _Self:
        twin = self.server_copy()
        twin.model = twin.model.cpu()
        twin._link = None
        return twin

    def server_copy(self: _Self) -> _Self:
        twin = super().worker_copy()
        twin.model = _copy_of(self.model)
        device = next((p.device for p in twin.model.parameters()), None)
        twin._link = DeviceLink(device) if device is not None and device.type != "cpu" else None
        twin._compiled = None
        twin._model_source = nn.Identity  # the factory may be anything; the worker has no need of it
        return twin

    def compile_model(self, options: Mapping[str, Any]) -> None:
        try:
            self._compiled = torch.compile(self.model, **options)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"torch.compile(model, **{dict(options)}) raised {error}") from error

    def page_locked(self, memory: npt.NDArray[np.uint8]) -> AbstractContextManager[None]:
        return nullcontext() if self._link is None else self._link.page_locked(memory)


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
        f"the model, a {type(model).__name__}, cannot be copied for the workers, which act with copies of their own: "
        f"copy.deepcopy of {what} raised {type(error).__name__}: {error}. Leave it out "
        "(__deepcopy__, __getstate__), or make it when it is first used"
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """numpy has no bfloat16: such tensors cross as the integers that their bits spell."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
