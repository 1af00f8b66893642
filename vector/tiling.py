"""One picture from the frames of many environments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError


def tile(frames: Sequence[Any]) -> npt.NDArray[np.uint8]:
    """One picture with all `frames`, each `[height, width, channels]`, in a grid that is filled row by row.

    The grid is as square as possible, and unused places are black. Raises `ConfigError` unless all frames are pictures
    of the same size.
    """
    pictures = [frame for frame in frames if isinstance(frame, np.ndarray) and frame.ndim == 3]
    if len(pictures) != len(frames) or len({picture.shape for picture in pictures}) != 1:
        raise ConfigError(
            "render_tiled needs one picture [height, width, channels] of the same size from each environment: build "
            'the environments with render_mode="rgb_array"'
        )
    n_columns = math.ceil(math.sqrt(len(pictures)))
    n_rows = math.ceil(len(pictures) / n_columns)
    height, width, channels = pictures[0].shape
    grid = np.zeros((n_rows * n_columns, height, width, channels), pictures[0].dtype)
    grid[: len(pictures)] = pictures
    grid = grid.reshape(n_rows, n_columns, height, width, channels).swapaxes(1, 2)
    tiled: npt.NDArray[np.uint8] = grid.reshape(n_rows * height, n_columns * width, channels)
    return tiled
