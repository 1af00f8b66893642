"""Trees: dicts, tuples, `NamedArrays`, and Dict and Tuple spaces, nested in any way. All else is a leaf.

Two trees have the same structure if their parts have the same names: the texts of the keys of a dict, and `_0`, `_1`, …
in a tuple, as in `NamedArrays`. So a space, its elements, and the arrays that record them can be walked together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from penstock.buffers.named import NamedArrays, _make, fields_of
from penstock.errors import SpaceError, brief

_CONSTANT = frozenset({float, int, bool, str, bytes, type(None)})


def map_tree(fn: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Call `fn` with each leaf of `tree` and what `others` have in the same place. Results are nested as `tree` is, in
    dicts, tuples and `NamedArrays`.

    Raises `SpaceError` if one of the `others` has other parts. A list may stand for a tuple there.
    """
    kind = tree.__class__
    if kind is np.ndarray:  # first, since the other checks take long
        return fn(tree, *others)
    if kind is dict and not others:
        return {key: fn(part) if part.__class__ is np.ndarray else map_tree(fn, part) for key, part in tree.items()}
    parts = tree if kind is dict else fields_of(tree)
    if parts is None:
        return fn(tree, *others)
    if others:
        columns = zip(parts.values(), *(_parts_like(tree, parts, other, "") for other in others), strict=True)
        results = [map_tree(fn, *column) for column in columns]
    else:
        results = [map_tree(fn, part) for part in parts.values()]
    if isinstance(tree, NamedArrays):
        return _make(type(tree), dict(zip(parts, results, strict=True)))
    return dict(zip(parts, results, strict=True)) if isinstance(tree, Mapping) else tuple(results)


def tree_leaves(tree: object, name: str = "", *others: Any) -> Iterator[tuple[Any, ...]]:
    """Each leaf of `tree`: its name, as in `observation['camera'][0]` or `action.arm`, the leaf, and what `others` have
    in the same place.

    Raises `SpaceError` as `map_tree` does.
    """
    parts = None if isinstance(tree, np.ndarray) else fields_of(tree)
    if parts is None:
        yield name, tree, *others
        return
    if isinstance(tree, NamedArrays):
        names: Iterable[str] = [f"{name}.{key}" for key in parts]
    else:
        names = [f"{name}[{key!r}]" for key in (parts if isinstance(tree, Mapping) else range(len(parts)))]
    for column in zip(names, parts.values(), *(_parts_like(tree, parts, other, name) for other in others), strict=True):
        yield from tree_leaves(column[1], column[0], *column[2:])


def tree_of(tree: object, leaves: Iterable[Any]) -> Any:
    """A tree with the structure of `tree` and these `leaves`, in order."""
    following = iter(leaves)
    return map_tree(lambda _: next(following), tree)


def _parts_like(tree: object, parts: Mapping[Any, Any], other: object, name: str) -> Iterable[Any]:
    """The parts of `other` in the order of `parts`, those of `tree`."""
    found = fields_of(tuple(other) if isinstance(other, list) else other)
    if found is not None and found.keys() != parts.keys():
        found = {str(key): part for key, part in found.items()}
        parts = {str(key): part for key, part in parts.items()}
    if found is None or found.keys() != parts.keys():
        kind = "dict with the keys" if isinstance(tree, Mapping | NamedArrays) else "tuple of"
        keys = list(parts) if isinstance(tree, Mapping | NamedArrays) else len(parts)
        raise SpaceError(f"{name or 'a value'} must be one {kind} {keys}, got {brief(other)}")
    return [found[key] for key in parts]


def is_constant(value: object) -> bool:
    """Whether `value` is a number, a text, bytes or None, which cannot be changed."""
    return value.__class__ in _CONSTANT or isinstance(value, np.generic)


def snapshot(value: Any) -> Any:
    """A copy of an observation, action, reward or entry of an info: an environment may change its own later, and two
    environments may share it. What cannot be copied becomes an array, or is returned as it is."""
    cls = value.__class__
    if cls is np.ndarray and not value.dtype.hasobject:
        return value.copy()
    if cls in _CONSTANT or isinstance(value, np.generic):  # `is_constant`, without a call
        return value
    if cls is dict:
        return {key: snapshot(part) for key, part in value.items()}
    if cls is tuple or cls is list:
        return cls(map(snapshot, value))
    try:
        # `clone` is that of a tensor, of which not each can be copied in another way.
        return value.clone() if hasattr(value, "clone") else copy.deepcopy(value)
    except Exception:  # an object of the user's, whose class may raise anything
        return np.asarray(value).copy() if cls is memoryview or hasattr(value, "__array__") else value
