"""The main process's end of a vector environment's memory: requests written, answers and infos taken."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from penstock.buffers.reports import in_one_line
from penstock.buffers.trajectory_queue import ObjectMessage, Unreadable
from penstock.envs.rows import arrays_like, in_range
from penstock.errors import EnvCallError, SpaceError, brief
from penstock.vector.memory import VectorMemory, taken
from penstock.vector.program import VectorJob

__all__ = ["Exchange", "Ids", "batch_infos"]

Ids = npt.NDArray[np.intp]


class Exchange:
    """Keeps count of what has been requested of each environment, and of what has come of it."""

    def __init__(self, memory: VectorMemory, job: VectorJob) -> None:
        self._rows = rows = memory.rows.arrays
        self._same_step = job.autoreset_mode is AutoresetMode.SAME_STEP
        self._action_space, self._action = job.action_space, rows.action
        self._requested, self._answered, self._told, self._one_by_one = (
            rows.requested,
            rows.answered,
            rows.told,
            rows.one_by_one,
        )
        self._taken = np.zeros(len(rows.requested), np.int64)  # the last request of which the answer was taken
        self._inbox: dict[int, tuple[int, Mapping[str, Any]]] = {}
        self.observation = arrays_like(job.observation_space, rows.observation)
        self._final = arrays_like(job.observation_space, rows.final_observation)
        self.reward, self.terminated, self.truncated = rows.reward, rows.terminated, rows.truncated
        self.all: Ids = np.arange(len(rows.requested))

    # ---- requests ----------------------------------------------------------------------------

    def put_actions(self, actions: Any, which: Any = slice(None)) -> None:
        """Write `actions`, batched as Gymnasium does it, for the environments `which`. Raises `SpaceError`."""
        _put(self._action_space, self._action, actions, which, "action")

    def put_seeds(self, seeds: Sequence[int | None], which: Ids) -> None:
        """Note the seeds of a reset, for those that may have to take an environment's place."""
        self._rows.seed[which] = [-1 if seeds[i] is None else seeds[i] % 2**63 for i in which]

    def request(self, which: Any = slice(None), *, one_by_one: bool = False) -> None:
        """Ask for whatever has been written for the environments `which`. The gates are to be opened then."""
        self._one_by_one[0] = one_by_one
        self._requested[which] += 1

    @property
    def outstanding(self) -> Ids:
        """The environments of which something has been requested and not been taken."""
        return np.flatnonzero(self._requested != self._taken)

    @property
    def ready(self) -> Ids:
        """Those of them that have answered."""
        answered = self._answered
        return np.flatnonzero((answered == self._requested) & (answered != self._taken))

    # ---- answers -----------------------------------------------------------------------------

    def take(self, which: Ids, collect_infos: Callable[[], None]) -> list[tuple[int, dict[str, Any]]]:
        """The answers of `which` count as taken. Returns the infos that came with those that had not been, by
        environment: of episodes that ended and were reset at once with `final_obs` and `final_info`."""
        which = which[self._taken[which] != self._requested[which]]
        self._taken[which] = self._requested[which]
        telling = self._told[which] == self._requested[which]
        if telling.any():
            collect_infos()
        if self._same_step:
            telling |= self.terminated[which] | self.truncated[which]
        return [(i, self._info_of(i)) for i in which[telling].tolist()] if telling.any() else []

    def drop(self, which: Ids) -> None:
        """The answers of `which` count as taken, and nobody wants to know them."""
        self._taken[which] = self._requested[which]

    def put_infos(self, frames: Sequence[ObjectMessage]) -> None:
        """What has arrived in a worker's pipe."""
        for number, i, told in frames:
            if number and not isinstance(told, Unreadable):  # else the result of a call that nobody waits for any more
                self._inbox[i] = number, told

    def _info_of(self, i: int) -> dict[str, Any]:
        told: Mapping[str, Any] = {}
        if self._told[i] == self._requested[i]:
            told = {kind: _unpickled(info, i) for kind, info in self._inbox.pop(i)[1].items()}
        info: dict[str, Any] = {}
        if self._same_step and (self.terminated[i] or self.truncated[i]):
            info = {"final_obs": taken(self._final, i), "final_info": told.get("final_info", {})}
        return {**info, **told.get("info", {})}


def _unpickled(info: bytes, i: int) -> Any:
    try:
        return pickle.loads(info)
    except Exception as error:  # it runs the user's code: anything may come
        raise EnvCallError(
            f"the info of env_rank {i} has an entry that cannot be unpickled in the main process: "
            f"{in_one_line(error)}. This step's results are lost; leave the entry out, or turn it into numbers or text"
        ) from error


class _Batch(VectorEnv[Any, Any, Any]):
    """Lends Gymnasium's way of batching infos to any number of environments."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.closed = True


def batch_infos(infos: Sequence[tuple[int, dict[str, Any]]], n: int) -> dict[str, Any]:
    """Infos by position, batched for `n` environments by Gymnasium's conventions: arrays, and masks of the same name
    with an underscore in front."""
    if not infos:
        return {}
    batch, batched = _Batch(n), dict[str, Any]()
    for position, info in infos:
        batched = batch._add_info(batched, info, position)
    return batched


def _put(space: gym.Space[Any], row: Any, value: Any, which: Any, name: str) -> None:
    if isinstance(space, spaces.Dict):
        if not isinstance(value, Mapping) or set(value) != set(space.keys()):
            raise SpaceError(f"{name} must be a dict with the keys {list(space.keys())}, got {brief(value)}")
        for key, sub in space.items():
            _put(sub, row[str(key)], value[key], which, f"{name}[{key!r}]")
    elif isinstance(space, spaces.Tuple):
        if not isinstance(value, tuple | list) or len(value) != len(space):
            raise SpaceError(f"{name} must be a tuple of {len(space)} batched parts, got {brief(value)}")
        for k, (sub, part) in enumerate(zip(space, value, strict=True)):
            _put(sub, row[f"_{k}"], part, which, f"{name}[{k}]")
    else:
        wanted = row.shape if isinstance(which, slice) else (len(which), *row.shape[1:])
        array = np.asarray(value)
        fits = array.shape == wanted and np.can_cast(array.dtype, row.dtype, "same_kind")
        if fits and array.dtype != row.dtype and row.dtype.kind in "iu" and not in_range(array, row.dtype):
            raise SpaceError(f"{name} has values from {array.min()} to {array.max()}, which {row.dtype} cannot hold")
        if not fits:
            raise SpaceError(
                f"{name} must have shape {wanted} and dtype {row.dtype}, "
                f"got shape {array.shape} and dtype {array.dtype}"
            )
        row[which] = array
