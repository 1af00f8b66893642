"""Agent parameters in shared memory, in two slots with a version, never read half-written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.buffers.named import NamedArrays
from penstock.buffers.shared import ArraySpec, NamedMemory
from penstock.errors import ConfigError

__all__ = ["SharedParameters"]

_RETRIES = 1000


class SharedParameters:
    """One writer (the learner), any number of readers (the workers), no lock.

    Version v lives in slot v % 2, so readers of the newest version are left alone while the next one
    is written. A reader that was overtaken twice finds the slot's sequence changed and reads again. The
    sequence is odd while its slot is being written.
    """

    def __init__(self, parameters: Mapping[str, npt.NDArray[Any]], *, shared: bool) -> None:
        self._names = tuple(parameters)
        slot = NamedArrays({f"p{i}": ArraySpec.like(value) for i, value in enumerate(parameters.values())})
        word = np.dtype(np.int64)
        specs = NamedArrays(
            version=ArraySpec((1,), word), sequence=ArraySpec((2,), word), slots=NamedArrays(s0=slot, s1=slot)
        )
        self.memory = NamedMemory(specs, shared=shared, purpose="the agent's shared parameters")

    @property
    def version(self) -> int:
        """The newest complete version; 0 before the first."""
        return int(self.memory.arrays.version[0])

    def publish(self, parameters: Mapping[str, npt.NDArray[Any]]) -> None:
        """Writer: make `parameters` the next version."""
        arrays = self.memory.arrays
        if tuple(parameters) != self._names:
            raise ConfigError(
                "the agent's parameters are not those that the sampler was initialized with: "
                f"{sorted(set(parameters) ^ set(self._names))[:5]} differ; initialize a new sampler for a new model"
            )
        version = self.version + 1
        slot = version % 2
        arrays.sequence[slot] += 1
        for target, (name, value) in zip(arrays.slots.values()[slot].values(), parameters.items(), strict=True):
            if target.shape != value.shape:
                raise ConfigError(f"parameter {name} has shape {value.shape}, was initialized with {target.shape}")
            target[...] = value
        arrays.sequence[slot] += 1
        arrays.version[0] = version

    def read(self) -> tuple[dict[str, npt.NDArray[Any]], int]:
        """Reader: a private copy of the newest parameters, and their version."""
        arrays = self.memory.arrays
        for _ in range(_RETRIES):
            version = self.version
            slot = version % 2
            before = int(arrays.sequence[slot])
            values = [field.copy() for field in arrays.slots.values()[slot].values()]
            if before % 2 == 0 and int(arrays.sequence[slot]) == before:
                return dict(zip(self._names, values, strict=True)), version
        raise RuntimeError(f"parameters were overwritten during each of {_RETRIES} reads: publish less often")
