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
    is written. A slot's stamp is 2 v when it holds version v, and odd while it is being written: a reader
    that was overtaken finds another stamp than it expects, and reads again.
    """

    def __init__(self, parameters: Mapping[str, npt.NDArray[Any]], *, shared: bool) -> None:
        self._names = tuple(parameters)
        slot = NamedArrays({f"p{i}": ArraySpec.like(value) for i, value in enumerate(parameters.values())})
        word = np.dtype(np.int64)
        specs = NamedArrays(
            version=ArraySpec((1,), word), stamps=ArraySpec((2,), word), slots=NamedArrays(s0=slot, s1=slot)
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
        fields = arrays.slots.values()[version % 2].values()
        for target, (name, value) in zip(fields, parameters.items(), strict=True):
            if (target.shape, target.dtype) != (value.shape, value.dtype):
                raise ConfigError(
                    f"parameter {name} has shape {value.shape} and dtype {value.dtype}, it was initialized with "
                    f"{target.shape} and {target.dtype}: initialize a new sampler for a new model"
                )
        arrays.stamps[version % 2] = 2 * version - 1
        for target, value in zip(fields, parameters.values(), strict=True):
            target[...] = value
        arrays.stamps[version % 2] = 2 * version
        arrays.version[0] = version

    def read(self) -> tuple[dict[str, npt.NDArray[Any]], int]:
        """Reader: a private copy of the newest parameters, and their version."""
        arrays = self.memory.arrays
        for _ in range(_RETRIES):
            version = self.version
            values = [field.copy() for field in arrays.slots.values()[version % 2].values()]
            if int(arrays.stamps[version % 2]) == 2 * version:
                return dict(zip(self._names, values, strict=True)), version
        raise RuntimeError(f"parameters were overwritten during each of {_RETRIES} reads: publish less often")
