"""An agent that calls a function of numpy arrays. It needs no torch."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.agents.agent import Agent, AgentStep
from penstock.arguments import signature
from penstock.buffers import pickling
from penstock.buffers.named import NamedArrays
from penstock.errors import ConfigError

_SPARE_BYTES = 4096  # so that a small function may grow


class FunctionAgent(Agent):
    """Acts by calling `fn(observation)`: a scripted policy, a controller, or a model of another library, such as JAX.

    `observation` is an array `[B, ...]`, or `NamedArrays` for Dict and Tuple spaces. `fn` returns actions `[B, ...]`:
    an array, or a dict or tuple of arrays for Dict and Tuple action spaces. If `fn` has a parameter named `rngs`, the
    agent calls `fn(observation, rngs=rngs)`, with one random generator per column. Draw the numbers for column b from
    `rngs[b]`: then they do not depend on the number of workers.

    `fn` may also return `(action, agent_info)`, where agent_info is a dict of arrays `[B, ...]` to record. For a
    Tuple action space, return `AgentStep(action, agent_info)` instead, because a tuple could be the action.

    With `parameters`, the agent calls `fn(parameters, observation)`. They are arrays in nested dicts, lists and tuples.
    To train, assign new ones to `agent.parameters`, then call `sync_shared_memory`. Workers get them as numpy arrays,
    also if the learner uses another library. Structure, shapes and dtypes must stay the same.
    `state_dict` and `save` contain them.

    `mask_key` is for random steps before the first batch, and for the check of masks (see `Agent.mask_key`): `fn`
    itself must choose legal actions. `device` must be None: `fn` itself moves arrays to a GPU and back.

    Every sampler acts with copies of `fn` that are made by cloudpickle, so lambdas and closures are allowed. Without
    `parameters`, call `sync_shared_memory` after you have changed what `fn` uses (the weights of its model, for
    example): it publishes `fn` again. A copy is replaced only if the pickled bytes differ. Global variables of an
    imported module are not copied. If `fn` cannot be pickled, only `SerialSampler` takes it, and acts with `fn` itself.
    In a distributed experiment, each worker has the `fn` of its own `make_agent`. The trainer publishes `parameters`
    alone: no code crosses a network.
    """

    _code = b""  # the pickled function as it was published or received, filled up with zeros
    # The bytes that this process last made of it. They may differ from the bytes of the process that sent it.
    _pickled: bytes | None = None

    def __init__(
        self, fn: Callable[..., Any], *, parameters: object = None, mask_key: str | None = None, device: None = None
    ) -> None:
        if device is not None:
            raise ConfigError(
                f"FunctionAgent has no model that it could move to device={device!r}: put the arrays on the device in "
                "fn, and return arrays of numpy. An agent with a torch module, such as CategoricalPgAgent, takes device"
            )
        if not callable(fn):
            raise ConfigError(f"FunctionAgent needs a function of the observation, got {type(fn).__name__}")
        self._fn, self.parameters, self.mask_key = fn, parameters, mask_key
        if parameters is not None and not tree_arrays(parameters):
            raise ConfigError("parameters of a FunctionAgent must contain arrays: leave them out if there are none")
        given = () if parameters is None else (None,)
        taken = signature(fn)
        self._takes_rngs = "rngs" in taken.parameters
        try:
            taken.bind(*given, None, **({"rngs": ()} if self._takes_rngs else {}))
        except TypeError:
            first = "" if parameters is None else "parameters, "
            raise ConfigError(
                f"FunctionAgent calls its function as fn({first}observation), or as fn({first}observation, rngs=rngs) "
                f"if a parameter is named rngs; this function has the parameters {taken}"
            ) from None

    def read_parameters(self) -> Mapping[str, npt.NDArray[Any]]:
        """The parameters by name. Without `parameters`, the pickled function as bytes. Nothing if it cannot be pickled:
        only SerialSampler takes it then.

        Raises `ConfigError` if the pickled function has more than twice the size that it had at first.
        """
        if self.parameters is not None:
            return dict(sorted(tree_arrays(self.parameters).items()))  # the order of a dict is not a part of it
        try:
            pickled = pickling.dumps(self._fn)
        except Exception:  # pickling runs the user's code, which may raise anything
            return {}
        size = len(self._code) or 2 * len(pickled) + _SPARE_BYTES
        if len(pickled) > size:
            raise ConfigError(
                f"the function of this FunctionAgent has {len(pickled):,} bytes in pickled form, but its workers have "
                f"room for {size:,}: initialize a new sampler with a new FunctionAgent"
            )
        is_received = self._pickled is None and self._code
        if not is_received and pickled != self._pickled:
            self._code = pickled.ljust(size, b"\0")
        self._pickled = pickled
        return {"function": np.frombuffer(self._code, np.uint8)}

    def _trained_parameters(self) -> Mapping[str, npt.NDArray[Any]]:
        return {} if self.parameters is None else self.read_parameters()

    _parameters_to_send = _trained_parameters

    def write_parameters(self, parameters: Mapping[str, npt.NDArray[Any]]) -> None:
        if self.parameters is not None:
            self.parameters = tree_with(self.parameters, {name: np.array(value) for name, value in parameters.items()})
            return
        code = parameters["function"].tobytes() if parameters else self._code
        if code != self._code:
            self._fn, self._code, self._pickled = pickle.loads(code), code, None

    def state_dict(self) -> dict[str, Any]:
        """The parameters by name. Without `parameters` it is empty, since a checkpoint must not contain code: save what
        the function uses yourself."""
        return super().state_dict() if self.parameters is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.parameters is not None:
            expected, given = sorted(tree_arrays(self.parameters)), sorted(state)
            if expected != given:
                raise ConfigError(f"the state has the parameters {given}, this FunctionAgent has {expected}")
            super().load_state_dict(state)

    def copy_for_worker(self) -> FunctionAgent:
        is_published = bool(self.read_parameters())
        copied = super().copy_for_worker()
        if self.parameters is not None:
            arrays = {name: array.copy() for name, array in tree_arrays(self.parameters).items()}
            copied.parameters = tree_with(self.parameters, arrays)
            return copied
        if is_published:  # an unpickled function, which changes only with sync_shared_memory
            copied._fn, copied._pickled = pickle.loads(copied._code), None
        return copied

    def seed_columns(self, rngs: Sequence[np.random.Generator]) -> None:
        self._rngs = rngs

    def reseed_columns(self, columns: npt.NDArray[np.intp], rngs: Sequence[np.random.Generator]) -> None:
        self._rngs = list(self._rngs)
        for b, rng in zip(columns, rngs, strict=True):
            self._rngs[b] = rng

    def column_state(self, column: int) -> dict[str, Any]:
        return {"rng": self._rngs[column].bit_generator.state}

    def load_column_state(self, column: int, state: Mapping[str, Any]) -> None:
        self._rngs[column].bit_generator.state = state["rng"]

    def step(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> AgentStep:
        rngs = self._rngs if self.selected is None else [self._rngs[b] for b in self.selected]
        inputs = (observation,) if self.parameters is None else (self.parameters, observation)
        result = self._fn(*inputs, rngs=rngs) if self._takes_rngs else self._fn(*inputs)
        if isinstance(result, AgentStep):
            return result
        has_info = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping | NamedArrays)
        if has_info and not isinstance(self.action_space, spaces.Tuple):
            return AgentStep(*result)
        return AgentStep(result)


# ---- trees of parameters ---------------------------------------------------------------------------


def tree_arrays(tree: object, path: str = "") -> dict[str, npt.NDArray[Any]]:
    """The arrays in nested dicts, lists and tuples, by dotted path."""
    children = _children(tree)
    if children is None:
        return {path or "array": np.asarray(tree)}
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, part in children:
        arrays |= tree_arrays(part, f"{path}.{name}" if path else name)
    return arrays


def tree_with(tree: Any, arrays: Mapping[str, Any], path: str = "") -> Any:
    """The same structure with these arrays."""
    children = _children(tree)
    if children is None:
        return arrays[path or "array"]
    parts = [tree_with(part, arrays, f"{path}.{name}" if path else name) for name, part in children]
    if isinstance(tree, Mapping):
        return type(tree)(zip(tree, parts, strict=True))  # type: ignore[call-arg]
    return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)


def _children(tree: object) -> list[tuple[str, Any]] | None:
    if isinstance(tree, Mapping):
        return [(str(key), part) for key, part in tree.items()]
    if isinstance(tree, list | tuple):
        return [(str(i), part) for i, part in enumerate(tree)]
    return None
