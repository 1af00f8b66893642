"""The batches that the user holds: each is handed out as `Samples`, and its memory is given back for a later batch."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from penstock.buffers import PolicySamples, Samples
from penstock.buffers.samples import BatchStatus, for_each_policy, parts_of, with_status
from penstock.errors import StaleSamplesError

Batch = Samples | PolicySamples


class Batches:
    """Batch k is in slot `k % n_slots`. `held` are the batches that the user holds, oldest first."""

    def __init__(self, views: Sequence[Batch], *, debug: bool) -> None:
        """`views`: the numpy arrays of each slot. With `debug`, memory that is given back is poisoned, and `Samples`
        that were given back raise `StaleSamplesError`."""
        self.views, self.n_slots, self._debug = views, len(views), debug
        self._tell_torch = _increment_versions()
        self._tensors = [view.torch() for view in views]
        self._leaves = [[leaf for _, leaf in tensors.leaves()] for tensors in self._tensors]
        self.held: deque[Batch] = deque()

    def hand_out(self, batch: int, valid_until: int | None) -> Any:
        """The tensors of this batch, as a new object. `valid_until`: see `Samples`."""

        def handed_out(own: Samples) -> Samples:
            status = own.status
            n_seats = None if status is None else status.n_seats
            if self._debug:  # these objects will be made unusable, so each batch needs its own
                own = Samples(env=copy.copy(own.env), agent=copy.copy(own.agent))
            return with_status(own, BatchStatus(batch, valid_until, n_seats=n_seats))

        samples = for_each_policy(handed_out, self._tensors[batch % self.n_slots])
        self.held.append(samples)
        return samples

    def give_back(self, newer: int, *, keep_last_row: bool = False) -> None:
        """End the validity of the oldest batch that the user holds, because batch `newer` begins. With
        `keep_last_row`, workers still read its last row: only the other rows are poisoned."""
        samples = self.held.popleft()
        batch = samples.batch
        assert batch is not None
        for own in parts_of(samples):
            status = own.status
            assert status is not None
            status.is_current = False
        # Torch does not see what workers write. Without this, a backward pass through a graph on this batch would give
        # a wrong gradient. With it, the backward pass raises an error.
        self._tell_torch(self._leaves[batch % self.n_slots])
        if self._debug:
            self.poison(batch, keep_last_row=keep_last_row)
            line = _line_of_user()
            stale = (
                f"batch {batch} was used after its memory was given back for batch {newer}, which began at "
                f"{line}. Use a batch before that line, keep a copy (samples.copy()), or raise n_slots"
            )
            for own in parts_of(samples):
                for part in (own.env, own.agent, own):
                    object.__setattr__(part, "_values", _StaleFields(stale))

    def set_valid_until(self, batch: int | None) -> None:
        """What `valid_until` of all batches in the user's hands says from now on."""
        for own in [own for samples in self.held for own in parts_of(samples)]:
            if own.status is not None:
                own.status.valid_until = batch

    def poison(self, batch: int, *, keep_last_row: bool = False) -> None:
        """Write NaN, False, or the smallest integer (the largest, if unsigned) into the memory of this batch."""
        for view in parts_of(self.views[batch % self.n_slots]):
            poisoned = [leaf for _, leaf in (view[:-1] if keep_last_row else view).leaves()]
            if keep_last_row and "bootstrap_value" in view.agent:  # it is not in `view[:-1]`
                poisoned.append(view.agent.bootstrap_value)
            for leaf in poisoned:
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


def _line_of_user() -> str:
    """File and line of the user's code that called penstock."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("penstock."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class _StaleFields(dict[str, Any]):
    """Takes the place of the fields of `Samples` that were given back: every use raises `StaleSamplesError`."""

    def __init__(self, message: str) -> None:
        super().__init__()
        self._message = message

    def _refuse(self, *_: Any) -> NoReturn:
        raise StaleSamplesError(self._message)

    __getitem__ = __contains__ = __iter__ = __len__ = keys = values = items = get = _refuse
