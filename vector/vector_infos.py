"""Infos on their way from the environments to the user: pickled by row, and batched by Gymnasium's conventions."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

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
        pickled = self.pickled.setdefault(self._env_of[row], {})
        pickled[self._first_row + row, kind] = _pickled_info(info, self._env_ranks[row])

    def end(self, row: int) -> None:
        """The info of this row was that of the last step of an episode."""
        pickled = self.pickled.get(self._env_of[row], {})
        if (info := pickled.pop((self._first_row + row, INFO), None)) is not None:
            pickled[self._first_row + row, FINAL_INFO] = info

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


def batch_infos(infos: Infos, n: int) -> dict[str, Any]:
    """Infos by position, batched for `n` environments by Gymnasium's conventions: arrays, and masks of the same name
    with an underscore in front.

    Where all environments return the same type, the array is that of Gymnasium. Gymnasium takes the type of the first
    one for all, and cuts off the numbers of the others. Here it is their common type, or there is an array of objects.
    """
    if not infos:
        return {}
    if all(info.keys() == _END_KEYS and info["final_info"] == {} for _, info in infos):
        return _batch_ends(infos, n)
    return _batch(infos, n)


_END_KEYS = {"final_obs", "final_info"}


def _batch_ends(infos: Infos, n: int) -> dict[str, Any]:
    """The same, in a third of the time, for the usual case: ends of episodes without other infos."""
    final_obs, has_ended = np.empty(n, object), np.zeros(n, np.bool_)
    for position, info in infos:
        final_obs[position], has_ended[position] = info["final_obs"], True
    return {"final_obs": final_obs, "_final_obs": has_ended, "final_info": {}, "_final_info": has_ended.copy()}


def _batch(infos: Infos, n: int) -> dict[str, Any]:
    batched: dict[str, Any] = {}
    rows_of: dict[str, Any] = {}
    dicts: list[str] = []  # entries that are dicts
    unlike: dict[str, None] = {}  # entries of several types
    for position, info in infos:
        for key, value in info.items():
            cls = value.__class__
            if (entry := rows_of.get(key)) is None:
                rows_of[key] = only, rows, mask = *_rows_for(key, value, n), np.zeros(n, np.bool_)
                batched[key], batched[mask_name(key)] = rows, mask
                if only is dict:
                    dicts.append(key)
            else:
                only, rows, mask = entry
            mask[position] = True
            if only is None or (cls is only and (cls is not np.ndarray or _fits(value, rows))):
                try:
                    rows[position] = value
                except OverflowError:  # a large int
                    unlike[key] = None
            else:
                unlike[key] = None
    for key in dicts:
        batched[key] = _batch([*batched[key].items()], n)
    for key in unlike:
        batched[key] = _of_unlike([(position, info[key]) for position, info in infos if key in info], n)
    return batched


def _rows_for(key: str, value: Any, n: int) -> tuple[type | None, Any]:
    """The only class that these rows take (None: any), and the rows for values such as this one, as Gymnasium has
    them."""
    cls = value.__class__
    if key == "final_obs":
        return None, np.full(n, None)
    if cls in _NUMBERS or issubclass(cls, np.number):
        return cls, np.zeros(n, cls)
    if cls is np.ndarray:
        return cls, np.zeros((n, *value.shape), value.dtype)
    if issubclass(cls, dict | np.ndarray):  # a subclass of arrays goes to `_of_unlike`
        return dict, {}
    return np.bool_ if cls is np.bool_ else None, np.full(n, None)


_NUMBERS = {float, int, bool}


def _fits(value: Any, rows: Any) -> bool:
    """Whether this array has the dtype and the shape of a row of `rows` `[n, ...]`."""
    return bool(value.dtype == rows.dtype and value.shape == rows.shape[1:])


def _of_unlike(given: list[tuple[int, Any]], n: int) -> Any:
    """Values by position that have not all the same type, batched."""
    positions, values = zip(*given, strict=True)
    if all(isinstance(value, dict) for value in values):
        return _batch(given, n)
    if all(isinstance(value, np.ndarray | np.number | np.bool_ | int | float) for value in values):
        arrays = [np.asarray(value) for value in values]
        if (joined := _joined(positions, arrays, {array.shape for array in arrays}, n)) is not None:
            return joined
    return _filled(np.full(n, None), positions, values)


def _filled(batch: npt.NDArray[Any], positions: Iterable[Any], values: Iterable[Any]) -> npt.NDArray[Any]:
    for position, value in zip(positions, values, strict=True):
        batch[position] = value
    return batch


def _joined(places: Sequence[Any], arrays: Sequence[Any], shapes: set[tuple[int, ...]], n: int) -> Any:
    """One array of `n` rows, with `arrays` in these places, whose rows have these `shapes`. None if they have different
    ones, or no dtype that keeps all values."""
    if len(shapes) > 1 or (dtype := _common_dtype(arrays)) is None:
        return None
    shape = n, *shapes.pop()
    return _filled(np.full(shape, None) if dtype.hasobject else np.zeros(shape, dtype), places, arrays)


def _common_dtype(arrays: Sequence[Any]) -> np.dtype[Any] | None:
    dtypes: set[np.dtype[Any]] = {array.dtype for array in arrays}
    if len(dtypes) == 1:
        return dtypes.pop()
    kinds = {dtype.kind for dtype in dtypes}
    if len(kinds) > 1 and not kinds <= set("biufc"):  # numpy would turn numbers into texts or times
        return None
    try:
        dtype: np.dtype[Any] = np.result_type(*dtypes)
    except TypeError:
        return None
    large = 2**53  # up to here, each integer is a float64
    for array in arrays if dtype.kind in "fc" else ():
        if array.dtype.kind in "iu" and ((array > large) | (array < -large)).any():
            return None
    return dtype


# ---- of batched environments -------------------------------------------------------------------


def merged_batches(
    infos: Infos,
    groups: Sequence[range],
    rows: npt.NDArray[np.intp],
    ended: npt.NDArray[np.intp],
    final: Any,
    space: Any,
) -> dict[str, Any]:
    """The infos of several workers as one batch of the rows `rows`. `final`: the final observations, elements of
    `space`, of the rows that have `ended`. `groups`: the rows of each worker."""
    merged: dict[str, Any] = {}
    if infos:
        by_row, firsts = dict(infos), rows.searchsorted([group.start for group in groups]).tolist()
        parts = [
            (slice(at, at + len(group)), by_row.get(group.start, {}))
            for at, group in zip(firsts, groups, strict=True)
            if at < len(rows) and rows[at] == group.start
        ]
        merged = _merged(parts, len(rows))
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


def _merged(parts: Sequence[tuple[slice, Any]], n: int) -> Any:
    """Infos of some rows each, as one batch of `n` rows. Where an entry is missing, it is zero or None, and its mask is
    False."""
    if all(isinstance(part, Mapping) for _, part in parts):
        merged, keys = {}, dict.fromkeys(key for _, part in parts for key in part)
        for key in keys:
            mask, is_hidden = mask_name(str(key)), str(key).startswith("_")
            if is_hidden and str(key)[1:] in keys:
                continue  # the mask of another entry
            holders = [(rows, part) for rows, part in parts if key in part]
            merged[key] = _merged([(rows, part[key]) for rows, part in holders], n)
            if mask in keys or (len(holders) < len(parts) and not is_hidden):
                merged[mask] = _merged([(rows, part.get(mask, True)) for rows, part in holders], n)
        return merged
    first = parts[0][1]
    if all(isinstance(part, tuple) and len(part) == len(first) for _, part in parts):
        return tuple(_merged([(rows, part[i]) for rows, part in parts], n) for i in range(len(first)))
    places, arrays = zip(*((rows, _as_rows(part, rows.stop - rows.start)) for rows, part in parts), strict=True)
    joined = _joined(places, arrays, {array.shape[1:] for array in arrays}, n)
    if joined is None:
        joined = _filled(np.full(n, None), chain(*(range(n)[rows] for rows in places)), chain(*arrays))
    return joined


def _as_rows(value: Any, n: int) -> Any:
    """An array of `n` rows. A value without rows counts for each of them."""
    if isinstance(value, Mapping):
        return _filled(np.full(n, None), range(n), (info_of(value, b) for b in range(n)))
    try:
        array = np.asarray(value)
    except ValueError:  # its parts differ in length
        array = _filled(np.full(len(value), None), range(len(value)), value)
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
