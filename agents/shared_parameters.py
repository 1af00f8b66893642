"""Agent parameters in shared memory: two slots and a version, so that readers never use half-written values."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.buffers.named import NamedArrays
from penstock.buffers.ordering import fence
from penstock.buffers.shared import ArraySpec, NamedMemory
from penstock.errors import ConfigError, SamplerStateError, brief

_MOST_READS = 1000  # attempts, before a reader gives up
_WRAPPER = re.compile(r"(?<![^.])(_orig_mod|module)\.")  # what torch.compile, or DataParallel, puts into a name


def parameters_of(agent: Any) -> dict[str, npt.NDArray[Any]]:
    """What `agent.read_parameters` returns, as arrays. Raises `ConfigError` if it is no dict, or has a value that is
    neither an array nor a number of numpy."""
    given = agent.read_parameters()
    if not hasattr(given, "items"):
        raise ConfigError(f"read_parameters of {type(agent).__name__} must return a dict, got {brief(given)}")
    for name, value in given.items():
        if not isinstance(value, np.ndarray | np.generic):
            raise ConfigError(
                f"read_parameters of {type(agent).__name__} must return numpy arrays, got {brief(value)} for {name!r}: "
                "return np.asarray(value)"
            )
    return {name: np.asarray(value) for name, value in given.items()}


def _remedy(names: Iterable[str], others: Iterable[str]) -> str:
    """What to do about parameters with `others` in place of `names`."""
    old, new = ([_WRAPPER.sub("", name) for name in side] for side in (names, others))
    if old != new:
        return "Initialize a new sampler for a new model"
    return (
        "A wrapper around the model, or around a part of it, has changed them: leave the agent's model as it was. Call "
        "model.compile() in place of torch.compile(model), and keep another wrapper in a variable of your own"
    )


class SharedParameters:
    """One writer (the learner), any number of readers (the workers), no lock.

    Version v is in slot v % 2. Readers use the newest version while the next one is written into the other slot. The
    stamp of a slot is 2 v when it holds version v, and odd while the writer writes into it. A reader copies the slot
    and then checks the stamp: if it has changed, the reader tries again.
    """

    #: Writer: called with a version before it is overwritten. It may wait until that version is not needed any more.
    before_overwrite: Callable[[int], None] | None = None
    #: Writer: called after each publication, with when it began (`time.monotonic_ns`) and its version.
    on_published: Callable[[int, int], object] | None = None
    n_batches = 0  #: Writer: how many batches have begun since the newest version was published

    def __init__(self, parameters: Mapping[str, npt.NDArray[Any]], *, shared: bool) -> None:
        self.names = tuple(parameters)
        slot = NamedArrays({f"p{i}": ArraySpec.like(value) for i, value in enumerate(parameters.values())})
        word = np.dtype(np.int64)
        specs = NamedArrays(
            version=ArraySpec((1,), word), stamps=ArraySpec((2,), word), slots=NamedArrays(s0=slot, s1=slot)
        )
        self.memory = NamedMemory(specs, shared=shared, purpose="the shared memory of the agent's parameters")
        self._bind_words()

    def _bind_words(self) -> None:
        """Keep views of the two control arrays, since a look-up by name takes longer."""
        #: Its one item is `version`.
        self.version_word = memoryview(self.memory.arrays.version)
        self._stamps = memoryview(self.memory.arrays.stamps)

    @property
    def version(self) -> int:
        """The newest complete version; 0 before the first one."""
        version: int = self.version_word[0]
        return version

    def publish(self, parameters: Mapping[str, npt.NDArray[Any]], version: int | None = None) -> None:
        """Writer: make `parameters` the next version, or a later one. Raises `ConfigError` if names, shapes or dtypes
        have changed."""
        began = time.monotonic_ns()
        if tuple(parameters) != self.names:
            raise ConfigError(
                "the agent's parameters have changed since the sampler was initialized. These names differ: "
                f"{sorted(set(parameters) ^ set(self.names))[:5]}. {_remedy(self.names, parameters)}"
            )
        version = self.version + 1 if version is None else version
        targets = self.memory.arrays.slots.values()[version % 2].values()
        for target, (name, value) in zip(targets, parameters.items(), strict=True):
            if (target.shape, target.dtype) != (value.shape, value.dtype):
                raise ConfigError(
                    f"parameter {name} has shape {value.shape} and dtype {value.dtype}, it was initialized with "
                    f"{target.shape} and {target.dtype}: initialize a new sampler for a new model"
                )
        if self.before_overwrite is not None:
            self.before_overwrite(version - 2)
        self._stamps[version % 2] = 2 * version - 1
        fence()
        for target, value in zip(targets, parameters.values(), strict=True):
            target[...] = value
        fence()
        self._stamps[version % 2] = 2 * version
        fence()
        self.version_word[0], self.n_batches = version, 0
        if self.on_published is not None:
            self.on_published(began, version)

    def continue_at(self, version: int, parameters: Mapping[str, npt.NDArray[Any]]) -> None:
        """Writer: make `parameters` this version, or the next if this one is not newer. If it is not newer and nothing
        has changed, do nothing. No worker may read meanwhile."""
        newest, _ = self.read()
        if version > self.version:
            self.version_word[0] = version - 1
        elif all(np.array_equal(newest[name], value, equal_nan=False) for name, value in parameters.items()):
            return
        self.publish(parameters)

    def read(self, wanted: int = 0) -> tuple[dict[str, npt.NDArray[Any]], int]:
        """Reader: a copy of the newest parameters, and their version.

        `wanted` is a version to read instead. If it has been overwritten, this reads the newest.
        """
        slots = self.memory.arrays.slots.values()
        for _ in range(_MOST_READS):
            version = wanted if self._stamps[wanted % 2] == 2 * wanted > 0 else self.version
            fence()
            values = [field.copy() for field in slots[version % 2].values()]
            fence()
            if self._stamps[version % 2] == 2 * version:
                return dict(zip(self.names, values, strict=True)), version
        raise SamplerStateError(
            f"sync_shared_memory overwrote the parameters during each of {_MOST_READS} reads: publish less often"
        )

    def __getstate__(self) -> tuple[tuple[str, ...], NamedMemory]:
        return self.names, self.memory

    def __setstate__(self, state: tuple[tuple[str, ...], NamedMemory]) -> None:
        self.names, self.memory = state
        self._bind_words()


class UnpublishedChanges:
    """Notices that the learner changes the parameters of `agent` and does not publish them.

    It compares them with the published ones once after 1, 2, 4, 8, ... batches, so that it takes no time in a run.
    """

    def __init__(self, agent: Any, parameters: SharedParameters) -> None:
        self._agent, self._parameters = agent, parameters
        parameters.n_batches = 1
        self._next_look = 1  # after so many batches
        self._last: int | None = None  # after so many, they must be published

    def note_batch(self, most: int) -> bool:
        """A batch was collected. Returns whether it is the last of `most` in a row for which changed parameters were
        not published."""
        n = self._parameters.n_batches
        self._parameters.n_batches += 1
        if n == 0:
            self._last = None
            return False
        if self._last is None and n >= self._next_look:
            self._next_look *= 2
            if self._has_changes():
                self._last = n + most - 1
        return n == self._last and self._has_changes()

    def _has_changes(self) -> bool:
        published, _ = self._parameters.read()
        trained = self._agent._trained_parameters()
        return any(value.tobytes() != published[name].tobytes() for name, value in trained.items() if name in published)
