"""Infos on their way from the environments to the user: pickled by row, and batched by Gymnasium's conventions."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv

from penstock.buffers import pickling
from penstock.buffers.reports import in_one_line
from penstock.buffers.tree import map_tree
from penstock.envs.infos import element, info_of, mask_name
from penstock.errors import EnvCallError, SpaceError

#: Pairs (row, info) of the rows that had any, ascending. With batched environments, the first row of each worker and
#: the infos of all its rows.
Infos = list[tuple[int, dict[str, Any]]]

RESTARTED = "worker_restarted"  #: in the info of a step that a worker's replacement truncated
#: The kinds of infos of one reply: of the step or the reset; where an episode ended and the environment was reset at
#: once, of the last step; and then `{"final_obs": observation}`, if the shared memory cannot keep its types.
INFO, FINAL_INFO, FINAL_OBS = "info", "final_info", "final_obs"

#: The infos of one environment's reply, each pickled, by row and kind.
Sent = dict[tuple[int, str], bytes]

# ---- in a worker -------------------------------------------------------------------------------


class InfoOutbox:
    """The infos of one worker for the main process. They are pickled at once: environments may use a dict again."""

    def __init__(self, env_ranks: Sequence[int], env_of: Sequence[int], first_row: int) -> None:
        """`env_of`: the environment of each row. `first_row`: the first row of this worker among those of all."""
        self._env_ranks, self._env_of, self._first_row = env_ranks, env_of, first_row
        self.pickled: dict[int, Sent] = {}  #: by environment

    def put(self, row: int, info: Mapping[str, Any], kind: str = INFO) -> None:
        """Raises `SpaceError` naming the entry that cannot be pickled."""
        own = self.pickled.setdefault(self._env_of[row], {})
        own[self._first_row + row, kind] = _pickled_info(info, self._env_ranks[row])

    def end(self, row: int) -> None:
        """The info of this row was that of the last step of an episode."""
        own = self.pickled.get(self._env_of[row], {})
        if (info := own.pop((self._first_row + row, INFO), None)) is not None:
            own[self._first_row + row, FINAL_INFO] = info

    def take(self) -> list[tuple[int, Sent]]:
        """What was put since the last call, by environment."""
        pickled, self.pickled = sorted(self.pickled.items()), {}
        return pickled


def keeps_types(arrays: Any, value: object) -> bool:
    """Whether `value` has the same types after it is written into a cell of `arrays` `[1, n, ...]` and read again."""
    if isinstance(arrays, dict):
        return type(value) is dict and all(keeps_types(part, value[key]) for key, part in arrays.items())
    if isinstance(arrays, tuple):
        return type(value) is tuple and all(map(keeps_types, arrays, value))
    if arrays.ndim == 2:
        return type(value) is arrays.dtype.type
    return type(value) is np.ndarray and value.dtype == arrays.dtype


def _pickled_info(info: Mapping[str, Any], env_rank: int) -> bytes:
    """Raises `SpaceError` naming the entry that cannot be pickled."""
    try:
        return pickle.dumps(dict(info), pickle.HIGHEST_PROTOCOL)
    except Exception:  # a class or function of the user's script, which goes by value
        for key, value in info.items():
            try:
                pickling.dumps(value)
            except Exception as error:
                raise SpaceError(
                    f"info[{key!r}] of env_rank {env_rank} cannot be pickled for the main process: "
                    f"{in_one_line(error)}. Leave it out, or turn it into numbers, text or arrays"
                ) from error
        return pickling.dumps(dict(info))


# ---- in the main process -----------------------------------------------------------------------


def unpickled(info: bytes, i: int) -> Any:
    """What environment i has pickled. Raises `EnvCallError` if that cannot be read."""
    try:
        return pickle.loads(info)
    except Exception as error:  # unpickling runs the user's code, which may raise anything
        raise unreadable("info", i, error) from error


def unreadable(name: str, i: int, error: Exception) -> EnvCallError:
    """The error for an object of environment i whose unpickling has raised `error`."""
    return EnvCallError(
        f"the {name} of env_rank {i} has an entry that cannot be unpickled in the main process: {in_one_line(error)}. "
        "This step's results are lost; leave the entry out, or turn it into numbers or text"
    )


class _Batch(VectorEnv[Any, Any, Any]):
    """Batches infos as Gymnasium does, for any number of environments."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.closed = True


def batch_infos(infos: Sequence[tuple[int, dict[str, Any]]], n: int) -> dict[str, Any]:
    """Infos by position, batched for `n` environments by Gymnasium's conventions: arrays, and masks of the same name
    with an underscore in front."""
    if not infos:
        return {}
    if all(info.keys() == _END_KEYS and info["final_info"] == {} for _, info in infos):
        return _batch_ends(infos, n)
    batch, batched = _Batch(n), dict[str, Any]()
    for position, info in infos:
        batched = batch._add_info(batched, info, position)
    return batched


_END_KEYS = {"final_obs", "final_info"}


def _batch_ends(infos: Sequence[tuple[int, dict[str, Any]]], n: int) -> dict[str, Any]:
    """The same for ends of episodes without other infos, the usual case: Gymnasium's way takes three times as long."""
    final_obs, has_ended = np.empty(n, object), np.zeros(n, np.bool_)
    for position, info in infos:
        final_obs[position], has_ended[position] = info["final_obs"], True
    return {"final_obs": final_obs, "_final_obs": has_ended, "final_info": {}, "_final_info": has_ended.copy()}


# ---- of batched environments -------------------------------------------------------------------


def merged_batches(
    infos: Infos,
    groups: Sequence[range],
    rows: npt.NDArray[np.intp],
    ended: npt.NDArray[np.intp],
    final: Any,
    space: Any,
) -> dict[str, Any]:
    """The infos of several workers as one batch of the rows `rows`, with the final observations `final` of those that
    have `ended`, elements of `space`. `groups` are the rows of each worker."""
    merged: dict[str, Any] = {}
    if infos:
        own, firsts = dict(infos), rows.searchsorted([group.start for group in groups]).tolist()
        parts = [
            (slice(at, at + len(group)), own.get(group.start, {}))
            for at, group in zip(firsts, groups, strict=True)
            if at < len(rows) and rows[at] == group.start
        ]
        merged = _merged(parts, len(rows), "info")
    if len(ended):
        done, final_obs = np.zeros(len(rows), np.bool_), np.full(len(rows), None)
        for k, row in zip(rows.searchsorted(ended).tolist(), ended.tolist(), strict=True):
            done[k], final_obs[k] = True, map_tree(partial(_element, row), space, final)
        merged = {**merged, "final_obs": final_obs, "final_info": merged.get("final_info", {})}
        merged.update(_final_obs=done, _final_info=done.copy())
    return merged


def _element(row: int, space: Any, rows: Any) -> Any:
    """One row, copied; a number of a Box is an array `[]`."""
    return np.array(rows[row]) if isinstance(space, gym.spaces.Box) else rows[row].copy()


def listed_infos(batch: Mapping[str, Any], n: int) -> Infos:
    """The opposite of `merged_batches`, for all `n` rows."""
    return [(row, info) for row in range(n) if (info := _row_of(batch, row))] if batch else []


def _merged(parts: Sequence[tuple[slice, Any]], n: int, name: str) -> Any:
    """Infos or final observations of some rows each, as one batch of `n` rows. Where an entry is missing, it is zero or
    None, and its mask is False."""
    (_, first), *_ = parts
    if isinstance(first, Mapping):
        merged = {}
        for key in dict.fromkeys(key for _, part in parts for key in part):
            own = [(rows, part[key]) for rows, part in parts if key in part]
            merged[key] = _merged(own, n, f"{name}[{key!r}]")
            mask = mask_name(str(key))
            if len(own) < len(parts) and not str(key).startswith("_") and all(mask not in part for _, part in parts):
                merged[mask] = _merged([(rows, True) for rows, _ in own], n, mask)
        return merged
    if isinstance(first, tuple):
        return tuple(_merged([(rows, part[i]) for rows, part in parts], n, name) for i in range(len(first)))
    arrays = [(rows, _as_rows(part, rows.stop - rows.start)) for rows, part in parts]
    (shape, *others), dtype = {array.shape[1:] for _, array in arrays}, np.result_type(*(array for _, array in arrays))
    if others:
        raise SpaceError(f"{name} must have the same shape in all workers, got {sorted((shape, *others))}")
    batch = np.full((n, *shape), None if dtype.hasobject else np.zeros((), dtype))
    for rows, array in arrays:
        batch[rows] = array
    return batch


def _as_rows(value: object, n: int) -> Any:
    """An array of `n` rows. What is none holds for each of them."""
    array = np.asarray(value)
    return array if array.shape[:1] == (n,) else np.broadcast_to(array, (n, *array.shape))


def _row_of(infos: Mapping[str, Any], b: int) -> dict[str, Any]:
    """The info of row b, with `final_obs` and `final_info` where its episode ended and it was reset at once."""
    info = info_of({key: value for key, value in infos.items() if key not in ("final_info", "_final_info")}, b)
    if "final_obs" in infos and infos["_final_obs"][b]:
        # Gymnasium's RecordEpisodeStatistics puts the statistics beside the infos of the reset.
        ended = {"episode": info.pop("episode")} if "episode" in info else {}
        final_info = {**info_of(infos.get("final_info", {}), b), **ended}
        info = {**info, "final_obs": element(infos["final_obs"], b), "final_info": final_info}
    return info
