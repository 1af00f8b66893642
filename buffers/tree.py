"""Functions on nested dicts and tuples: elements of Dict and Tuple spaces, or batches of such elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np


def map_tree(fn: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Call `fn` with each leaf of `tree` and the leaves of `others` in the same place. Results are nested as `tree`."""
    if isinstance(tree, np.ndarray):  # first, since the check for a Mapping takes long
        return fn(tree, *others)
    if isinstance(tree, Mapping):
        return {key: map_tree(fn, part, *(other[key] for other in others)) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_tree(fn, *parts) for parts in zip(tree, *others, strict=True))
    return fn(tree, *others)


def tree_leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its name: `name` and the keys that lead there, as in `observation['camera'][0]`."""
    if not isinstance(tree, np.ndarray) and isinstance(tree, Mapping | tuple):
        for key, part in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from tree_leaves(part, f"{name}[{key!r}]")
    else:
        yield name, tree
