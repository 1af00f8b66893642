"""A small torch model as a list of numpy calls, which takes much less time than torch for a few rows."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx, nn
from torch.fx.node import map_arg
from torch.nn import functional as F

from penstock.agents.inference import refusal, trace
from penstock.agents.numpy_operations import OPERATIONS, Program, linear
from penstock.errors import ConfigError

_Array = npt.NDArray[Any]

_refuse = partial(refusal, "numpy", instead='"traced" or "torch"')
_MOST_PROGRAMS = 32  # for how many numbers of rows the arrays are kept
_DTYPES: dict[torch.dtype, np.dtype[Any]] = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}


def _floats(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The parameters and buffers of a floating-point type."""
    weights = (*model.named_parameters(), *model.named_buffers())
    return [(name, weight) for name, weight in weights if weight.is_floating_point()]


def _linear_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call of `F.linear` by name."""
    return {**dict(zip(("input", "weight", "bias"), node.args, strict=False)), **node.kwargs}


class NumpyModel:
    """Runs the operations of `model` in numpy, with transposed copies of the matrices. `refresh` copies them again.

    A call takes the number of rows B, and arrays `[B, ...]` (`NamedArrays` for Dict and Tuple spaces). It returns an
    array or a tuple of arrays `[B, ...]`, as the model does, which the caller may keep. Linear layers with the same
    input are computed together.

    The constructor raises `ConfigError`, with the name of the layer, for operations that `OPERATIONS` does not have.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._graph, weights = trace(model, "numpy")
        self._dtype = self._common_dtype()
        self._programs: dict[int, Program] = {}
        nodes = list(self._graph.nodes)
        self._weights: dict[fx.Node, _Array] = {
            node: weight.detach().numpy() for node, weight in zip(nodes, weights, strict=False)
        }
        self._inputs = [node for node in nodes[len(weights) :] if node.op == "placeholder"]
        self._has_rows = set(self._inputs)  # the other nodes depend on weights alone
        for node in nodes:
            self._require_known(node)
            if not self._has_rows.isdisjoint(node.all_input_nodes):
                self._has_rows.add(node)
        self._groups: dict[fx.Node, list[fx.Node]] = {}  # by input: the linear layers that take it
        for node in nodes:
            if node.target is F.linear:
                self._groups.setdefault(_linear_arguments(node)["input"], []).append(node)
        self._matrices = {first: self._new_matrix(group) for first, group in self._groups.items()}
        self.refresh()

    def _common_dtype(self) -> np.dtype[Any]:
        """The dtype of all weights."""
        weights = _floats(self._model)
        dtype = weights[0][1].dtype if weights else torch.float32
        for name, weight in weights:
            if weight.dtype not in _DTYPES or weight.dtype != dtype:
                why = f"it has dtype {weight.dtype}; all weights must be float32, or all float64"
                raise _refuse(f"the parameter {name}", why)
        return _DTYPES[dtype]

    def _require_known(self, node: fx.Node) -> None:
        """Raise `ConfigError` unless there is an operation for this node."""
        if node.op in ("placeholder", "output") or self._path(node) is not None or node.target is F.linear:
            return
        if node.op == "call_module" or node.target not in OPERATIONS:
            raise self._refusal(node, "there is no numpy version of it")

    def _refusal(self, node: fx.Node, why: str) -> ConfigError:
        """The error for a node that cannot be computed, with the name of the operation and the layer."""
        if node.op == "call_module":
            return _refuse(node.meta["layer"], why)
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target)
        return _refuse(f"{name!r} in {node.meta['layer']}", why)

    def _path(self, node: object) -> tuple[Any, ...] | None:
        """If `node` is an input of the model, or a field of a nested input: the node of the input, and the names that
        lead to the field. Otherwise None."""
        if node in self._inputs:
            return (node,)
        if isinstance(node, fx.Node) and node.target in (getattr, operator.getitem) and isinstance(node.args[1], str):
            before = self._path(node.args[0])
            return None if before is None else (*before, node.args[1])
        return None

    def _new_matrix(self, group: Sequence[fx.Node]) -> tuple[_Array, _Array | None]:
        """Memory for the matrices of linear layers with the same input, side by side `[n_inputs, n_outputs]`, and for
        their biases `[n_outputs]` (None if no layer has one)."""
        weights = [self._linear_weights(node) for node in group]
        n_outputs, n_inputs = sum(len(weight) for weight, _ in weights), weights[0][0].shape[1]
        has_bias = any(bias is not None for _, bias in weights)
        bias = np.zeros(n_outputs, self._dtype) if has_bias else None
        return np.empty((n_inputs, n_outputs), self._dtype), bias

    def _linear_weights(self, node: fx.Node) -> tuple[_Array, _Array | None]:
        """The matrix `[n_outputs, n_inputs]` and the biases of a linear layer. They share the memory of the model."""
        arguments = _linear_arguments(node)
        weight, bias = arguments["weight"], arguments.get("bias")
        if weight not in self._weights or (bias is not None and bias not in self._weights):
            raise self._refusal(node, "its weights are not parameters of the model")
        return self._weights[weight], None if bias is None else self._weights[bias]

    def refresh(self) -> None:
        """Copy the matrices and biases that the model has now. All other weights share the memory of the model."""
        for first, (matrix, biases) in self._matrices.items():
            at = 0
            for node in self._groups[first]:
                weight, bias = self._linear_weights(node)
                columns = slice(at, at := at + len(weight))
                matrix[:, columns] = weight.T
                if biases is not None and bias is not None:
                    biases[columns] = bias
        for program in self._programs.values():
            program.take_biases()

    # ---- calls -----------------------------------------------------------------------------

    def __call__(self, rows: int, *inputs: Any) -> Any:
        """The model's outputs for inputs of `rows` rows."""
        program = self._programs.get(rows)
        if program is None:
            program = self._new_program(rows, inputs)
        for array, i, path in program.inputs:
            value = inputs[i]
            for name in path:
                value = value[name]
            array[...] = value
        for call in program.calls:
            call()
        outputs = program.outputs
        return tuple([array.copy() for array in outputs]) if outputs.__class__ is tuple else outputs.copy()

    def _new_program(self, rows: int, inputs: Sequence[Any]) -> Program:
        """The calls for this number of rows. `inputs` are examples of the inputs."""
        program, values = Program(rows, self._dtype), dict(self._weights)
        for node in self._graph.nodes:
            if node.op == "output":
                program.outputs = self._outputs(program, values, node.args[0], inputs)
            elif node not in values and self._path(node) is None:
                self._add_calls(program, values, node, inputs)
        program.take_biases()
        while len(self._programs) >= _MOST_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        self._programs[rows] = program
        return program

    def _value(self, program: Program, values: dict[fx.Node, Any], node: fx.Node, inputs: Sequence[Any]) -> Any:
        """The array of `node`. An input, or a field of one, gets its array when it is used for the first time."""
        path = self._path(node)
        if node not in values and path is not None:
            index, names = self._inputs.index(path[0]), path[1:]
            leaf = inputs[index]
            for name in names:
                leaf = leaf[name]
            values[node] = np.zeros((program.length, *leaf.shape[1:]), self._dtype)
            program.inputs.append((values[node][: program.rows], index, names))
        return values[node]

    def _add_calls(self, program: Program, values: dict[fx.Node, Any], node: fx.Node, inputs: Sequence[Any]) -> None:
        """Append the calls for `node`, or for all linear layers that have its input."""

        def value(argument: fx.Node) -> Any:
            return self._value(program, values, argument, inputs)

        try:
            if node.target is not F.linear:
                arguments, keywords = map_arg(node.args, value), map_arg(node.kwargs, value)
                values[node] = OPERATIONS[node.target](program, *arguments, **keywords)
                return
            source = _linear_arguments(node)["input"]
            x, (matrix, biases) = value(source), self._matrices[source]
            out = linear(program, x, matrix, biases)
            at = 0
            for other in self._groups[source]:
                width = len(self._linear_weights(other)[0])
                values[other] = out[..., at : at + width]
                at += width
        except (TypeError, ValueError, IndexError, KeyError) as error:
            raise self._refusal(node, str(error)) from error

    def _outputs(self, program: Program, values: dict[fx.Node, Any], found: object, inputs: Sequence[Any]) -> Any:
        """The array or the tuple of arrays that the model returns, without the zeros after the last row."""

        def output(part: object) -> Any:
            if not isinstance(part, fx.Node):
                raise _refuse("the model", "it must return a tensor or a tuple of tensors")
            array = self._value(program, values, part, inputs)
            return array[: program.rows] if part in self._has_rows else array

        return tuple(map(output, found)) if isinstance(found, tuple | list) else output(found)

    def __reduce__(self) -> tuple[Any, ...]:
        return NumpyModel, (self._model,)
