"""Examples of spaces: the structure, shape and dtype in which a space's elements are recorded."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.arguments import must_be
from penstock.buffers.named import as_named, map_leaves
from penstock.buffers.tree import map_tree, tree_leaves
from penstock.errors import SpaceError

_REMEDIES = {
    spaces.Text: "encode the text as a fixed-size Box or MultiDiscrete with gymnasium.wrappers.TransformObservation",
    spaces.Sequence: "pad the sequence to a fixed length with gymnasium.wrappers.TransformObservation",
    spaces.Graph: "pad nodes and edges to a fixed number with gymnasium.wrappers.TransformObservation",
    spaces.OneOf: "flatten it with gymnasium.wrappers.FlattenObservation",
}
_ONE_OF_ACTION = (
    "replace it by a Tuple of the number of the part and all parts, with gymnasium.wrappers.TransformAction"
)


def example_of(space: gym.Space[Any], name: str = "observation") -> Any:
    """Zeros with the shape and dtype in which elements of `space` are recorded.

    An array for Box, Discrete, MultiDiscrete and MultiBinary; `NamedArrays` for Dict (its keys) and Tuple (`_0`,
    `_1`, …), nested like the space. Raises `SpaceError` for a space without a fixed shape; the message names a
    wrapper that gives it one.
    """
    for part_name, part in tree_leaves(space, name):
        _require_fixed_shape(part, part_name)
    try:
        return as_named(map_tree(lambda part: np.zeros(part.shape, part.dtype), space))
    except SpaceError as error:
        raise SpaceError(f"{name}: {error}") from None


def _require_fixed_shape(space: gym.Space[Any], name: str) -> None:
    if isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        return
    remedy = next((text for cls, text in _REMEDIES.items() if isinstance(space, cls)), None)
    if remedy is None:
        raise SpaceError(
            f"{name} has a space of type {type(space).__name__}, which penstock does not support: wrap the environment "
            "so that its spaces consist of Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple"
        )
    if name.startswith("action"):
        remedy = _ONE_OF_ACTION if isinstance(space, spaces.OneOf) else remedy.replace("Observation", "Action")
    raise SpaceError(f"{name} has a {type(space).__name__} space, whose elements have no fixed shape: {remedy}")


def observation_example(space: gym.Space[Any], float_dtype: npt.DTypeLike | None = None) -> Any:
    """Like `example_of`, but floating-point arrays have `float_dtype` if it is given."""
    example = example_of(space)
    if float_dtype is None:
        return example
    wanted = np.dtype(float_dtype)
    return map_leaves(lambda leaf: leaf.astype(wanted) if leaf.dtype.kind == "f" else leaf, example)


def checked_spaces(name: str, given: Any) -> tuple[gym.Space[Any], gym.Space[Any]] | None:
    """An argument with observation space and action space, or None. Raises `ConfigError` for anything else."""
    if given is None:
        return None
    is_pair = isinstance(given, tuple | list) and len(given) == 2
    fits = is_pair and all(isinstance(space, gym.Space) for space in given)
    observation_space, action_space = must_be(
        name, given, fits, "(observation_space, action_space), two gymnasium spaces, or None"
    )
    return observation_space, action_space
