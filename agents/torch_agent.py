"""The base of agents whose policy is a `torch.nn.Module`."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from penstock.agents.agent import Agent, AgentRuntime, Space, zeros_of
from penstock.agents.inference import INFERENCE, Inference, TracedModel
from penstock.agents.numpy_model import NumpyModel
from penstock.arguments import must_be, one_of, signature
from penstock.buffers.named import ArrayTree, map_leaves
from penstock.buffers.reports import in_one_line
from penstock.errors import ConfigError, SpaceError

_log = logging.getLogger("penstock")

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
        copied._link = _link_to(copied.model)
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
        link = self.agent._link or _link_to(self.agent.model)
        return nullcontext() if link is None else link.page_locked(memory)


def _arrays(outputs: object) -> list[npt.NDArray[np.float64]]:
    """The outputs of a model as arrays."""
    parts = outputs if isinstance(outputs, tuple | list) else [outputs]
    return [np.asarray(part.detach() if isinstance(part, torch.Tensor) else part, np.float64) for part in parts]


class _CopiesComputed(TorchFunctionMode):
    """In this mode, `copy.deepcopy` copies the values of computed tensors too, which torch refuses. The old
    `weight_norm` keeps such weights in the model, and computes them again before each call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            args = args[0].detach(), *args[1:]
        return func(*args, **(kwargs or {}))


def deep_copy(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """`copy.deepcopy(value, memo)`, of any tensors."""
    with _CopiesComputed():
        return copy.deepcopy(value, memo)


def _copy_of(model: nn.Module) -> nn.Module:
    try:
        return deep_copy(model)  # type: ignore[no-any-return]
    except Exception as error:
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                try:
                    if name != "_modules":
                        deep_copy(value)
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


# ---- models on a GPU -------------------------------------------------------------------


class DeviceLink:
    """Moves the inputs of a model to its device, and its outputs back.

    On CUDA, copies in both directions are asynchronous. This requires page-locked host memory. Inputs in other memory
    are first copied to a page-locked buffer of torch. numpy copies them, with one thread: torch would use all CPUs and
    wait for its slowest thread, while workers use these CPUs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._is_cuda = device, device.type == "cuda"

    def send(self, array: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
        """`array` on the device. Floating-point numbers are converted to `dtype` there.

        Do not write into `array` before a result that depends on it has been fetched.
        """
        tensor = torch.from_numpy(array)
        if self._is_cuda and not tensor.is_pinned():
            tensor = torch.empty(array.shape, dtype=tensor.dtype, pin_memory=True)
            np.copyto(tensor.numpy(), array)
        tensor = tensor.to(self.device, non_blocking=True)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def fetch(self, outputs: Sequence[Any]) -> list[Any]:
        """`outputs` in host memory, with one wait for all of them. Values that are not tensors stay as they are."""
        if not self._is_cuda:
            return [output.cpu() if isinstance(output, torch.Tensor) else output for output in outputs]
        fetched = [self._start_fetch(output) for output in outputs]
        torch.cuda.current_stream(self.device).synchronize()
        return fetched

    def _start_fetch(self, output: object) -> Any:
        if not isinstance(output, torch.Tensor) or output.device != self.device:
            return output
        target = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
        return target.copy_(output.detach(), non_blocking=True)

    @contextmanager
    def page_locked(self, memory: npt.NDArray[np.uint8]) -> Iterator[None]:
        """Keep `memory` page-locked, so that the device copies from it directly. If the driver refuses, this is
        logged, and copies go through a buffer of torch."""
        if not self._is_cuda:
            yield
            return
        with torch.cuda.device(self.device):
            address, cudart = memory.ctypes.data, torch.cuda.cudart()  # type: ignore[no-untyped-call]
            error = int(cudart.cudaHostRegister(address, memory.nbytes, 0))
            if error:
                _log.info("CUDA error %d: %d bytes of shared memory are not page-locked", error, memory.nbytes)
                with suppress(RuntimeError):  # CUDA keeps the error, and torch would raise it later
                    torch.zeros(1, device=self.device)
        try:
            yield
        finally:
            if not error:
                # Wait for running copies. If this fails, an earlier CUDA error has made the device unusable.
                with suppress(RuntimeError), torch.cuda.device(self.device):
                    torch.cuda.current_stream().synchronize()
                cudart.cudaHostUnregister(address)


def _link_to(model: nn.Module) -> DeviceLink | None:
    """None for a model on the CPU, or without parameters."""
    parameter = _first_parameter(model)
    return None if parameter is None or parameter.device.type == "cpu" else DeviceLink(parameter.device)


# ---- the agent -------------------------------------------------------------------------

#: A model, or a callable that builds one.
ModelSource = nn.Module | Callable[..., nn.Module]

#: Where the model is moved to, for example "cuda"; None leaves it where it is.
Device = str | torch.device | None


class TorchAgent(Agent):
    """Holds a model and copies its parameters to and from shared memory. Subclasses override `step`.

    `model` is an `nn.Module`, or a callable that builds one. The agent calls it without arguments, or with
    `observation_space` and `action_space` if its signature has parameters of these names. The same seed of the
    sampler gives the same initial weights. torch's global random state does not change. Lazy layers get their sizes
    when the agent is initialized.

    The module's `forward` takes `(observation)`, or `(observation, prev_action, prev_reward)` if it has three or
    more parameters. The module of a recurrent agent takes the state as the fourth argument.

    `inference` says how workers run the module on a CPU. "torch" calls it. "traced" and "numpy" take less time for
    small networks: the module is traced once, with `torch.fx`. "traced" calls torch's functions without the layers.
    "numpy" does not use torch: `forward` returns numpy arrays. `docs/agents.md` lists the layers that it knows.
    `sampler.initialize` compares the outputs with torch's. It raises `ConfigError` for a module that cannot be run in
    this way.

    `device` moves the model, for example to "cuda", when the agent is initialized. There the learner trains it, and the
    inference server of a central sampler acts with it. Workers always act on the CPU. Samples stay on the CPU:
    `samples.to(device)` copies them, and `evaluate` does it by itself.
    """

    runtime_cls = TorchRuntime

    model: nn.Module
    _from_initialize = ("model", "observation_space", "action_space")
    greedy_eval = _greedy = False  # whether evaluations take the best actions, and whether `step` does
    # The runtime sets these in copies:
    _link: DeviceLink | None = None  # moves inputs and outputs if the model is not on the CPU
    _compiled_model: Callable[..., Any] | None = None  # called in place of the model
    _numpy_model: NumpyModel | None = None

    def __init__(self, model: ModelSource, *, inference: Inference = "torch", device: Device = None) -> None:
        fits = isinstance(model, nn.Module) or callable(model)
        must_be("model", model, fits, "an nn.Module or a callable that builds one")
        one_of("inference", inference, INFERENCE)
        self._model_source, self.inference = model, inference
        try:
            self._device = None if device is None else torch.device(device)
        except (TypeError, RuntimeError) as error:
            raise ConfigError(f'device must be a device of torch such as "cuda", or None: {error}') from error

    def initialize(self, observation_space: Space, action_space: Space, *, seed: int | None = None) -> None:
        super().initialize(observation_space, action_space, seed=seed)
        with torch.random.fork_rng(devices=[], enabled=seed is not None):
            if seed is not None:
                # torch.manual_seed would also seed the GPUs' generators, which this fork_rng does not restore.
                torch.default_generator.manual_seed(seed)
            self.model = self._build_model()
            parameters = signature(self.model.forward).parameters
            positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
            self._takes_previous = len(positional) >= 3
            floats = (p.dtype for p in self.model.parameters() if p.is_floating_point())
            self._float_dtype = next(floats, torch.float32)
            if self._lazy_tensors():
                self._size_lazy_layers()
        if self._device is not None:
            try:
                self.model.to(self._device)
            except (AssertionError, RuntimeError) as error:  # there is no such device, or it has no memory left
                raise ConfigError(f'the model cannot be moved to device="{self._device}": {error}') from error

    def _build_model(self) -> nn.Module:
        source = self._model_source
        if isinstance(source, nn.Module):
            return source
        names = signature(source).parameters
        offered = {"observation_space": self.observation_space, "action_space": self.action_space}
        arguments = {name: space for name, space in offered.items() if name in names}
        try:
            model = source(**arguments)
        except TypeError as error:
            raise ConfigError(
                f"the model could not be built: {in_one_line(error)}. It is called without arguments, or with "
                "observation_space and action_space if its signature has parameters of these names"
            ) from error
        must_be("what the model factory returns", model, isinstance(model, nn.Module), "an nn.Module")
        return model

    def _lazy_tensors(self) -> list[str]:
        return [name for name, tensor in self._named_tensors().items() if is_lazy(tensor)]

    def _size_lazy_layers(self) -> None:
        """Call the model once, on zeros: lazy layers take their sizes from their first input."""
        if self.joint:
            raise ConfigError(
                f"{self._lazy_tensors()[0]} of the model has no size yet, and the first input of a joint agent is not "
                "known when it is initialized: use layers with sizes, or pass a model that was called"
            )
        trained = [module for module in self.model.modules() if module.training]
        try:
            self.model.eval()  # running statistics stay as they are
            with torch.no_grad():  # parameters that are made in inference mode could not be trained
                self.model(*self._first_inputs())
        except Exception as error:  # the user's code may raise anything
            if left := self._lazy_tensors():  # otherwise the sampler's own trial raises it
                raise ConfigError(
                    f"{left[0]} of the model has no size yet, and calling the model on zeros raised "
                    f"{in_one_line(error)}: use layers with sizes, or pass a model that was called"
                ) from error
        finally:
            for module in trained:
                module.training = True
        if left := self._lazy_tensors():
            raise ConfigError(
                f"{left[0]} of the model has no size, since forward has not called its layer: use a layer with sizes"
            )

    def _first_inputs(self) -> list[Any]:
        """Zeros for one column."""
        inputs = zeros_of(self.observation_space, 1), zeros_of(self.action_space, 1), np.zeros(1, np.float32)
        return [self._tensor(field) for field in (inputs if self._takes_previous or self.recurrent else inputs[:1])]

    def forward(
        self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32], state: Any = None
    ) -> Any:
        """The model's output for numpy inputs `[B, ...]`, on the model's device, without gradients. With
        `inference="numpy"`, a worker's copy returns numpy arrays.

        Floating-point inputs are converted to the dtype of the model's parameters; integers stay integers. `state`
        consists of tensors and is passed unchanged.
        """
        if self._numpy_model is not None:
            return self._numpy_model(len(prev_reward), observation, prev_action, prev_reward)
        model = self.model if self._compiled_model is None else self._compiled_model
        with torch.inference_mode():
            if state is not None:
                return model(self._tensor(observation), self._tensor(prev_action), self._tensor(prev_reward), state)
            if self._takes_previous:
                return model(self._tensor(observation), self._tensor(prev_action), self._tensor(prev_reward))
            return model(self._tensor(observation))

    def learner_tensor(self, value: object) -> Any:
        """Recorded arrays or tensors as tensors that the model of a learner takes: on its device, and floating-point
        numbers in its dtype."""
        like, dtype = _first_parameter(self.model), self._float_dtype
        device = None if like is None else like.device

        def converted(leaf: Any) -> torch.Tensor:
            tensor = torch.as_tensor(leaf)
            return tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)

        if value.__class__ is torch.Tensor and value.dtype is dtype and value.device == device:
            return value  # nothing to convert
        return map_leaves(converted, value)

    def fetched(self, outputs: Sequence[Any]) -> Sequence[Any]:
        """Outputs of the model in host memory. If the model is on a GPU, this waits once for all of them."""
        return outputs if self._link is None else self._link.fetch(outputs)

    def _tensor(self, value: ArrayTree) -> Any:
        return map_leaves(self._leaf_tensor, value)

    def _leaf_tensor(self, leaf: npt.NDArray[Any]) -> torch.Tensor:
        if self._link is not None:
            return self._link.send(leaf, self._float_dtype)
        tensor = torch.from_numpy(leaf)
        dtype = tensor.dtype
        return tensor if dtype is self._float_dtype or not dtype.is_floating_point else tensor.to(self._float_dtype)

    # ---- modes -----------------------------------------------------------------------------

    def train_mode(self, itr: int) -> None:
        self.model.train()

    def sample_mode(self, itr: int) -> None:
        self._act_mode()
        self._greedy = False

    def eval_mode(self, itr: int) -> None:
        self._act_mode()
        self._greedy = self.greedy_eval

    def _set_greedy(self, greedy: bool) -> None:
        self._greedy = greedy

    def _act_mode(self) -> None:
        if any(module.training for module in self.model.modules()):  # ten times as fast as a call of eval()
            self.model.eval()

    # ---- parameters ------------------------------------------------------------------------

    def _named_tensors(self) -> dict[str, torch.Tensor]:
        # Buffers too, since running statistics belong to the policy. state_dict() would omit some of them.
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def read_parameters(self) -> Mapping[str, npt.NDArray[Any]]:
        return {name: _bits(tensor.detach().cpu()).numpy() for name, tensor in self._named_tensors().items()}

    def _trained_parameters(self) -> Mapping[str, npt.NDArray[Any]]:
        names, values = dict(self.model.named_parameters()), self.read_parameters()
        return {name: values[name] for name in names}  # a forward pass may change running statistics

    def write_parameters(self, parameters: Mapping[str, npt.NDArray[Any]]) -> None:
        with torch.no_grad():
            for name, tensor in self._named_tensors().items():
                _bits(tensor).copy_(torch.from_numpy(parameters[name]))
        if self._numpy_model is not None:
            self._numpy_model.refresh()

    def state_dict(self) -> dict[str, Any]:
        return self.model.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state)
        self._publish_if_shared()

    @contextmanager
    def _acting(self, actor: Agent, greedy: bool) -> Iterator[None]:
        assert isinstance(actor, TorchAgent)
        actor.model = self.model
        actor._link = _link_to(self.model)
        trained = [module for module in self.model.modules() if module.training]
        try:
            with super()._acting(actor, greedy):
                yield
        finally:
            for module in trained:
                module.training = True

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchAgent:
        memo[id(self)] = copied = copy.copy(self)
        vars(copied).update(deep_copy(vars(copied), memo))
        return copied

    def _described(self) -> list[str]:
        described = super()._described()
        if "model" in vars(self):
            n = sum(parameter.numel() for parameter in self.model.parameters())
            described.insert(0, f"{type(self.model).__name__} with {n:,} parameters")
        return described if self.inference == "torch" else [*described, f"inference={self.inference!r}"]


def _first_parameter(module: nn.Module) -> nn.Parameter | None:
    """As `next(module.parameters(), None)`, which takes longer."""
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    for child in module._modules.values():
        if child is not None and (parameter := _first_parameter(child)) is not None:
            return parameter
    return None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """numpy has no bfloat16: such a tensor is passed as int16 with the same bits."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


_FLOATS_OF_NUMPY = (torch.float32, torch.float64)


def output_tuple(output: object, forms: Sequence[tuple[str, ...]], agent: str) -> tuple[Any, ...]:
    """Return `output`. Raise `SpaceError` unless it is a tuple as long as one of `forms`."""
    if isinstance(output, tuple):
        for form in forms:
            if len(output) == len(form):
                return output
    wanted = " or ".join(f"({', '.join(form)})" for form in forms)
    got = f"{type(output).__name__} of {len(output)}" if isinstance(output, tuple) else type(output).__name__
    raise SpaceError(f"the model must return a tuple {wanted}, got {got}: see {agent}")


def output_array(output: Any, name: str, *shapes: tuple[int, ...]) -> npt.NDArray[Any]:
    """The tensor or array `output` as an array in float64 or float32; all other types become float32.

    Raises `SpaceError` with `name` for a shape that is not in `shapes`, and for bools.
    """
    is_array = output.__class__ is np.ndarray  # from `inference="numpy"`
    if not is_array and output.__class__ is not torch.Tensor and not isinstance(output, torch.Tensor):
        raise SpaceError(f"the model's {name} must be a tensor of shape {_any_of(shapes)}, got {type(output).__name__}")
    if output.shape not in shapes:
        raise SpaceError(f"the model's {name} must have shape {_any_of(shapes)}, got {tuple(output.shape)}")
    if is_array:
        if output.dtype.char in "fd":
            return output  # type: ignore[no-any-return]
        _refuse_bools(output.dtype == np.bool_, name)
        return output.astype(np.float32)  # type: ignore[no-any-return]
    if output.dtype not in _FLOATS_OF_NUMPY:
        _refuse_bools(output.dtype == torch.bool, name)
        output = output.float()
    if output.requires_grad:  # if it is a parameter of the model
        output = output.detach()
    array: npt.NDArray[Any] = (output if output.is_cpu else output.cpu()).numpy()
    return array


def value_array(output: object, rows: int) -> npt.NDArray[np.float32]:
    """The model's values, of shape `[B]` or `[B, 1]`, as they are recorded: float32 `[B]`."""
    value: npt.NDArray[np.float32] = output_array(output, "value", (rows,), (rows, 1))
    if value.dtype != np.float32:
        value = value.astype(np.float32)
    return value if value.ndim == 1 else value.reshape(rows)


def _refuse_bools(is_bool: bool, name: str) -> None:
    if is_bool:
        raise SpaceError(f"the model's {name} must be numbers, got bools: return what they were computed from")


def _any_of(shapes: Sequence[tuple[int, ...]]) -> str:
    return " or ".join(map(str, dict.fromkeys(shapes)))
