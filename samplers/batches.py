"""The batches that the user holds: each is handed out as `Samples`, and its memory is given back for a later batch."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from penstock.buffers import NamedArrays, PolicySamples, Samples
from penstock.buffers.samples import BatchStatus, parts_of, with_status
from penstock.buffers.slots import for_user
from penstock.errors import StaleSamplesError

Batch = Samples | PolicySamples


class Batches:
    """Batch k is in slot `k % n_slots`. `held` are the batches that the user holds, oldest first."""

    def __init__(self, views: Sequence[Batch], slots: Sequence[NamedArrays], *, debug: bool) -> None:
        """`views`: the numpy arrays of each slot, whose memory is `slots`. With `debug`, memory that is given back is
        poisoned, and `Samples` that were given back raise `StaleSamplesError`."""
        self.views, self.n_slots, self._debug = views, len(views), debug
        self._tell_torch = _increment_versions()
        tensors = [view.torch() for view in views]
        self._leaves = [[leaf for _, leaf in slot.leaves()] for slot in tensors]
        self.views_for_user = [for_user(*pair) for pair in zip(views, slots, strict=True)]
        tensors = [for_user(*pair) for pair in zip(tensors, slots, strict=True)]
        # By slot: the tensors of each policy, with their status, which knows how many agents each environment has.
        self._parts = [[(part, part.status) for part in parts_of(slot)] for slot in tensors]
        self._names = None if isinstance(views[0], Samples) else views[0].keys()
        self.held: deque[tuple[Batch, list[BatchStatus]]] = deque()

    def hand_out(self, batch: int, valid_until: int | None) -> Any:
        """The tensors of this batch, as a new object. `valid_until`: see `Samples`."""
        parts: list[Samples] = []
        statuses: list[BatchStatus] = []
        for tensors, known in self._parts[batch % self.n_slots]:
            # With `debug`, these objects will be made unusable, so each batch needs its own.
            view = Samples(env=copy.copy(tensors.env), agent=copy.copy(tensors.agent)) if self._debug else tensors
            statuses.append(BatchStatus(batch, valid_until, n_seats=None if known is None else known.n_seats))
            parts.append(with_status(view, statuses[-1]))
        samples = parts[0] if self._names is None else PolicySamples(dict(zip(self._names, parts, strict=True)))
        self.held.append((samples, statuses))
        return samples

    def give_back(self, newer: int) -> None:
        """End the validity of the oldest batch that the user holds, because batch `newer` begins."""
        samples, statuses = self.held.popleft()
        for status in statuses:
            status.is_current = False
        batch: Any = statuses[0].batch
        # Torch does not see what workers write. Without this, a backward pass through a graph on this batch would give
        # a wrong gradient. With it, the backward pass raises an error.
        self._tell_torch(self._leaves[batch % self.n_slots])
        if self._debug:
            self._poison(batch)
            frame, _ = frame_of_user()
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            stale = (
                f"batch {batch} was used after its memory was given back for batch {newer}, which began at "
                f"{line}. Use a batch before that line, keep a copy (samples.copy()), or raise n_slots"
            )
            for policy in parts_of(samples):
                for part in (policy.env, policy.agent, policy):
                    object.__setattr__(part, "_values", _StaleFields(stale))

    def set_valid_until(self, batch: int | None) -> None:
        """What `valid_until` of all batches in the user's hands says from now on."""
        for status in [status for _, statuses in self.held for status in statuses]:
            status.valid_until = batch

    def _poison(self, batch: int) -> None:
        """Write NaN, False, or the smallest integer (the largest, if unsigned) into the memory of this batch."""
        for _, leaf in self.views[batch % self.n_slots].leaves():
            leaf[...] = _poison_of(leaf.dtype)


def _increment_versions() -> Callable[[Any], None]:
    """A function that increments the version counters of the tensors in a list."""
    from torch.autograd.graph import increment_version  # here, so that only processes that use tensors import it

    def one_by_one(leaves: Iterable[Any]) -> None:
        for leaf in leaves:
            increment_version(leaf)

    try:
        increment_version([])
    except TypeError:  # an older torch, which takes one tensor at a time
        return one_by_one
    return increment_version


def _poison_of(dtype: np.dtype[Any]) -> npt.ArrayLike:
    if dtype.kind in "fc":
        return np.nan
    if dtype.kind == "u":  # the smallest value is zero, which looks like data
        return int(np.iinfo(dtype).max)
    return int(np.iinfo(dtype).min) if dtype.kind == "i" else False


def frame_of_user() -> tuple[Any, int]:
    """The frame of the user's code that called penstock, and its `stacklevel` for a warning of the caller."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("penstock."):
        frame, level = frame.f_back, level + 1
    return frame, level


class _StaleFields(dict[str, Any]):
    """Takes the place of the fields of `Samples` that were given back: every use raises `StaleSamplesError`."""

    def __init__(self, message: str) -> None:
        super().__init__()
        self._message = message

    def _refuse(self, *_: Any) -> NoReturn:
        raise StaleSamplesError(self._message)

    __getitem__ = __contains__ = __iter__ = __len__ = keys = values = items = get = _refuse
