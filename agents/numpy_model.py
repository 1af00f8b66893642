"""A small torch model as a list of numpy calls, which takes much less time than torch for a few rows."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx, nn
from torch.fx.node import map_arg
from torch.nn import functional as F

from penstock.agents.inference import refusal, trace
from penstock.errors import ConfigError

_Array = npt.NDArray[Any]

_refuse = partial(refusal, "numpy", instead='"traced" or "torch"')
_MOST_PROGRAMS = 32  # for how many numbers of rows the arrays are kept
_DTYPES: dict[torch.dtype, np.dtype[Any]] = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}


def _linear_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call of `F.linear` by name."""
    return {**dict(zip(("input", "weight", "bias"), node.args, strict=False)), **node.kwargs}


#: This many rows are multiplied by a matrix at a time. For another number of rows, BLAS may round in another way. With
#: a fixed number, the result for a row does not depend on how many others there are.
TILE = 8


class Program:
    """The calls of numpy that compute the model for one number of rows, with their arguments and the arrays for their
    results, which are allocated here.

    The arrays have rows of zeros after the last row, so that their length is a multiple of `TILE`.
    """

    def __init__(self, rows: int, dtype: np.dtype[Any]) -> None:
        self.rows, self.dtype = rows, dtype
        self.length = -(-rows // TILE) * TILE
        #: Where an input is copied to: array, index of the input, names that lead to a field of it.
        self.inputs: list[tuple[_Array, int, tuple[Any, ...]]] = []
        self.calls: list[Callable[[], Any]] = []  #: in order, with their arguments
        self.biases: list[tuple[_Array, _Array]] = []  #: of each layer: its biases repeated in every row, its biases
        self.outputs: Any = None

    def empty(self, *shape: int) -> _Array:
        return np.empty(shape, self.dtype)

    def take_biases(self) -> None:
        """Take the biases that the model has now."""
        for rows, one in self.biases:
            rows[...] = one

    def call(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Add a call that writes into the last argument. Returns this argument. Floats become arrays, to save time."""
        *inputs, out = (np.asarray(x, self.dtype) if isinstance(x, float) else x for x in arguments)
        # Most ufuncs take 0.2 µs less if `out` is no keyword.
        is_plain = isinstance(function, np.ufunc) and function not in (np.maximum, np.minimum)
        self.calls.append(partial(function, *inputs, out) if is_plain else partial(function, *inputs, out=out))
        return out


# Each operation takes a program, and the arguments of torch's function, with arrays in place of tensors. It adds calls
# to the program, and returns the array that will hold the result. It raises `ValueError` for arguments that it does not
# support.


def _unary(function: Callable[..., Any]) -> Callable[..., _Array]:
    def operation(p: Program, x: _Array) -> Any:
        return p.call(function, x, np.empty_like(x))

    return operation


def _binary(function: Callable[..., Any]) -> Callable[..., _Array]:
    def operation(p: Program, x: Any, y: Any) -> Any:
        x, y = (float(value) if isinstance(value, int | float) else value for value in (x, y))
        return p.call(function, x, y, p.empty(*np.broadcast_shapes(np.shape(x), np.shape(y))))

    return operation


def linear(p: Program, x: _Array, matrix: _Array, biases: _Array | None) -> Any:
    """`x` times `matrix`, plus the biases."""
    out = p.empty(*x.shape[:-1], matrix.shape[1])
    if x.ndim == 2:
        p.call(np.matmul, x.reshape(-1, TILE, x.shape[1]), matrix, out.reshape(-1, TILE, out.shape[1]))
    else:
        p.call(np.matmul, x, matrix, out)
    if biases is not None:  # for every row: to add one row to all takes twice as long
        p.biases.append((np.empty_like(out), biases))
        p.call(np.add, out, p.biases[-1][0], out)
    return out


def _relu(p: Program, x: _Array, inplace: bool = False) -> Any:
    return p.call(np.maximum, x, 0.0, np.empty_like(x))


def _sigmoid(p: Program, x: _Array) -> Any:
    out = p.call(np.multiply, x, 0.5, np.empty_like(x))  # by tanh, since exp would overflow
    p.call(np.tanh, out, out)
    p.call(np.multiply, out, 0.5, out)
    return p.call(np.add, out, 0.5, out)


def _elu(p: Program, x: _Array, alpha: float = 1.0, inplace: bool = False) -> Any:
    below = p.call(np.minimum, x, 0.0, np.empty_like(x))
    p.call(np.exp, below, below)
    p.call(np.subtract, below, 1.0, below)
    p.call(np.multiply, below, float(alpha), below)
    out = p.call(np.maximum, x, 0.0, np.empty_like(x))
    return p.call(np.add, out, below, out)


def _gelu(p: Program, x: _Array, approximate: str = "none") -> Any:
    if approximate != "none":
        raise ValueError(f"approximate={approximate!r} has no numpy version")
    # max(x, 0) - |x| / 2 (1 - erf(|x| / sqrt 2)). numpy has no erf: this is formula 7.1.26 of Abramowitz and Stegun,
    # whose error is below 1.5e-7.
    size = p.call(np.absolute, x, np.empty_like(x))
    z = p.call(np.multiply, size, math.sqrt(0.5), np.empty_like(x))
    t = p.call(np.multiply, z, 0.3275911, np.empty_like(x))
    p.call(np.add, t, 1.0, t)
    p.call(np.reciprocal, t, t)
    y = p.call(np.multiply, t, 1.061405429, np.empty_like(x))
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        p.call(np.add, y, coefficient, y)
        p.call(np.multiply, y, t, y)
    p.call(np.multiply, z, z, z)
    p.call(np.negative, z, z)
    p.call(np.exp, z, z)
    p.call(np.multiply, y, z, y)
    p.call(np.multiply, y, size, y)
    p.call(np.multiply, y, 0.5, y)
    out = p.call(np.maximum, x, 0.0, t)
    return p.call(np.subtract, out, y, out)


_row_sums = partial(np.add.reduce, axis=-1, keepdims=True)


def _layer_norm(
    p: Program,
    x: _Array,
    normalized_shape: Sequence[int],
    weight: _Array | None = None,
    bias: _Array | None = None,
    eps: float = 1e-5,
) -> Any:
    if tuple(normalized_shape) != x.shape[-1:]:
        raise ValueError("it normalizes more than the last dimension")
    mean, part = p.empty(*x.shape[:-1], 1), 1.0 / x.shape[-1]
    p.call(_row_sums, x, mean)
    p.call(np.multiply, mean, part, mean)
    out = p.call(np.subtract, x, mean, np.empty_like(x))
    square = p.call(np.multiply, out, out, np.empty_like(x))
    p.call(_row_sums, square, mean)
    p.call(np.multiply, mean, part, mean)
    p.call(np.add, mean, float(eps), mean)
    p.call(np.sqrt, mean, mean)
    p.call(np.divide, out, mean, out)
    for function, value in ((np.multiply, weight), (np.add, bias)):
        if value is not None:
            p.call(function, out, value, out)
    return out


def _flatten(p: Program, x: _Array, start_dim: int = 0, end_dim: int = -1) -> Any:
    if x.ndim < 2 or start_dim % x.ndim == 0:
        raise ValueError("it would flatten the batch dimension")
    start, end = start_dim % x.ndim, end_dim % x.ndim
    return _reshaped(p, x, (*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :]))


def _reshaped(p: Program, x: _Array, shape: tuple[int, ...]) -> Any:
    if not x.flags.c_contiguous:  # a part of another array
        whole = np.empty(x.shape, x.dtype)
        x = p.call(np.positive, x, whole)
    return x.reshape(shape)


def _squeeze(p: Program, x: _Array, dim: int | None = None) -> Any:
    if dim is None or dim % x.ndim == 0:
        raise ValueError("give squeeze the dimension to remove, which is not that of the batch")
    return x.squeeze(dim) if x.shape[dim] == 1 else x


def _item(p: Program, x: _Array, index: object) -> Any:
    if not (isinstance(index, tuple) and index and index[0] in (slice(None), Ellipsis)):
        raise ValueError("an index must keep the batch dimension, as x[:, 0] does")
    part: _Array = x[index]
    if part.size and not np.may_share_memory(part, x):  # a copy: it would keep the values that x has now
        raise ValueError("an index must consist of integers and slices")
    return part


def _clamp(p: Program, x: _Array, min: float | None = None, max: float | None = None) -> Any:
    for function, bound in ((np.maximum, min), (np.minimum, max)):
        if bound is not None:
            x = p.call(function, x, float(bound), np.empty_like(x))
    return x


def _cat(p: Program, parts: Sequence[_Array], dim: int = 0) -> Any:
    if dim % parts[0].ndim == 0:
        raise ValueError("it would join batches")
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return p.call(np.concatenate, tuple(parts), dim, p.empty(*shape))


def _expand_as(p: Program, x: _Array, other: _Array) -> Any:
    return np.broadcast_to(x, other.shape)


def _unchanged(p: Program, x: _Array) -> _Array:
    return x  # the inputs are converted to the model's dtype


OPERATIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.tanh, F.tanh, "tanh"), _unary(np.tanh)),
    **dict.fromkeys((torch.exp, "exp"), _unary(np.exp)),
    **dict.fromkeys((torch.relu, F.relu, "relu"), _relu),
    **dict.fromkeys((torch.sigmoid, F.sigmoid, "sigmoid"), _sigmoid),
    F.elu: _elu,
    F.gelu: _gelu,
    F.layer_norm: _layer_norm,
    **dict.fromkeys((torch.flatten, "flatten"), _flatten),
    **dict.fromkeys((torch.squeeze, "squeeze"), _squeeze),
    **dict.fromkeys((torch.clamp, "clamp"), _clamp),
    **dict.fromkeys((torch.cat, torch.concat), _cat),
    "expand_as": _expand_as,
    "float": _unchanged,
    operator.getitem: _item,
    operator.add: _binary(np.add),
    operator.sub: _binary(np.subtract),
    operator.mul: _binary(np.multiply),
    operator.truediv: _binary(np.divide),
}


# ---- the model -----------------------------------------------------------------------------


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
        """The dtype of all parameters and buffers of a floating-point type."""
        tensors = (*self._model.named_parameters(), *self._model.named_buffers())
        weights = [(name, tensor) for name, tensor in tensors if tensor.is_floating_point()]
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

    def _outputs(self, program: Program, values: dict[fx.Node, Any], result: object, inputs: Sequence[Any]) -> Any:
        """The array or the tuple of arrays that the model returns, without the zeros after the last row."""

        def output(part: object) -> Any:
            if not isinstance(part, fx.Node):
                raise _refuse("the model", "it must return a tensor or a tuple of tensors")
            array = self._value(program, values, part, inputs)
            return array[: program.rows] if part in self._has_rows else array

        return tuple(map(output, result)) if isinstance(result, tuple | list) else output(result)

    def __reduce__(self) -> tuple[Any, ...]:
        return NumpyModel, (self._model,)
