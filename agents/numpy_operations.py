"""The numpy versions of torch's operations, for `NumpyModel`.

Each saves more than 5 % of a whole step: `python benchmarks/inference.py --layers` shows how much.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

_Array = npt.NDArray[Any]

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

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
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
