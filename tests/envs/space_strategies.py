"""Hypothesis strategies for all spaces that can be recorded, and functions for parts of their elements."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from typing import Any

import numpy as np
from gymnasium import spaces
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.buffers.named import map_leaves
from penstock.envs import example_of

#: Keys of a Dict space; some are names of methods, one is a number.
KEYS = st.sampled_from(["position", "goal", "values", "copy", "a key", 3])

shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
INTEGERS = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64)


@st.composite
def float_boxes(draw: Any) -> spaces.Box:
    dtype, shape = np.dtype(draw(st.sampled_from([np.float16, np.float32, np.float64]))), draw(shapes)
    limits = hnp.arrays(dtype, shape, elements=st.floats(-1000, 1000, width=8 * dtype.itemsize))
    one, other = draw(limits), draw(limits)
    low, high = np.minimum(one, other), np.maximum(one, other)
    open_below, open_above = draw(hnp.arrays(np.bool_, shape)), draw(hnp.arrays(np.bool_, shape))
    return spaces.Box(
        np.where(open_below, dtype.type(-np.inf), low), np.where(open_above, dtype.type(np.inf), high), dtype=dtype
    )


@st.composite
def integer_boxes(draw: Any) -> spaces.Box:
    dtype, shape = np.dtype(draw(st.sampled_from(INTEGERS))), draw(shapes)
    bounds = np.iinfo(dtype)
    # Not all of int64: gymnasium cannot sample there.
    elements = st.integers(max(int(bounds.min), -(2**40)), min(int(bounds.max), 2**40))
    one, other = draw(hnp.arrays(dtype, shape, elements=elements)), draw(hnp.arrays(dtype, shape, elements=elements))
    return spaces.Box(np.minimum(one, other), np.maximum(one, other), dtype=dtype)


pictures = st.builds(lambda shape: spaces.Box(0, 255, shape, np.uint8), shapes)
flags = st.builds(lambda shape: spaces.Box(0, 1, shape, np.bool_), shapes)


# Before Gymnasium 1.3, the only dtype of Discrete is int64.
HAS_DTYPE = "dtype" in signature(spaces.Discrete).parameters
DISCRETE_DTYPES = [np.int64, np.int32, np.int8, np.uint8] if HAS_DTYPE else [np.int64]


def discrete(n: int, start: int, dtype: Any) -> spaces.Discrete:
    """A Discrete space of `dtype`, if this Gymnasium has one."""
    return spaces.Discrete(n, None, start, *([dtype] if HAS_DTYPE else []))


@st.composite
def discretes(draw: Any) -> spaces.Discrete:
    bounds = np.iinfo(draw(st.sampled_from(DISCRETE_DTYPES)))
    # Up to the largest number of a small dtype, where start + n does not fit.
    start = draw(st.integers(max(int(bounds.min), -1000), min(int(bounds.max), 1000)))
    n = draw(st.integers(1, min(int(bounds.max) - max(start, 0) + 1, int(bounds.max), 1000)))
    return discrete(n, start, bounds.dtype)


multi_binaries = st.builds(
    spaces.MultiBinary, st.one_of(st.integers(1, 4), hnp.array_shapes(min_dims=1, max_dims=2, max_side=3))
)


@st.composite
def multi_discretes(draw: Any) -> spaces.MultiDiscrete:
    dtype, shape = draw(st.sampled_from([np.int64, np.int32, np.int8])), draw(hnp.array_shapes(max_dims=2, max_side=3))
    start = draw(hnp.arrays(np.int64, shape, elements=st.integers(-128, 127)))
    last = draw(hnp.arrays(np.int64, shape, elements=st.integers(-128, 127)))
    start, last = np.minimum(start, last), np.maximum(start, last)
    return spaces.MultiDiscrete(np.minimum(last - start + 1, 127), dtype, start=start)


leaf_spaces = st.one_of(float_boxes(), integer_boxes(), pictures, flags, discretes(), multi_binaries, multi_discretes())
any_space = st.recursive(
    leaf_spaces,
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, min_size=1, max_size=3).map(spaces.Dict),
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
    ),
    max_leaves=5,
)
nested_spaces = any_space.filter(lambda space: isinstance(space, spaces.Dict | spaces.Tuple))


def sample(space: Any, n: int, seed: int) -> list[Any]:
    """`n` elements of `space`, as gymnasium samples them."""
    space.seed(seed)
    return [space.sample() for _ in range(n)]


def empty_row(space: Any, n: int) -> Any:
    """A row of a samples buffer for `n` environments."""
    return map_leaves(lambda leaf: np.zeros((n, *leaf.shape), leaf.dtype), example_of(space))


def children(space: Any) -> list[tuple[Any, Any]]:
    """Pairs of key and space in a Dict or Tuple space; nothing for other spaces."""
    if isinstance(space, spaces.Dict):
        return [*space.items()]
    return [*enumerate(space.spaces)] if isinstance(space, spaces.Tuple) else []


def nodes(space: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Pairs of path and space: `space` and every space in it, depth first. A path is a tuple of keys."""
    yield path, space
    for key, child in children(space):
        yield from nodes(child, (*path, key))


def at(element: Any, path: tuple[Any, ...]) -> Any:
    """The part of `element` at `path`."""
    for key in path:
        element = element[key]
    return element


def replaced(element: Any, path: tuple[Any, ...], value: Any) -> Any:
    """`element` with `value` at `path`."""
    if not path:
        return value
    key, *rest = path
    if isinstance(element, tuple):
        return tuple(replaced(part, tuple(rest), value) if i == key else part for i, part in enumerate(element))
    return {**element, key: replaced(element[key], tuple(rest), value)}


def leaf_paths(space: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Pairs of path and space for every space that is neither Dict nor Tuple, in order."""
    return [(path, node) for path, node in nodes(space) if not isinstance(node, spaces.Dict | spaces.Tuple)]


def path_name(path: tuple[Any, ...], root: str = "observation") -> str:
    """The name of `path` in error messages."""
    return root + "".join(f"[{key!r}]" for key in path)
