"""What environments return as `info`: which entries can be recorded, and how a row of them is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Discrete, MultiDiscrete

from penstock.buffers.named import NamedArrays, as_named
from penstock.buffers.native import put_cell
from penstock.buffers.reports import in_one_line
from penstock.buffers.tree import map_tree, snapshot
from penstock.envs.rows import ColumnError, as_dtype
from penstock.errors import ConfigError, brief

#: True for every numeric entry of an example step; or a list of names, where dots separate nested names; or a dict of
#: names and examples.
InfoWanted = bool | Sequence[str] | Mapping[str, Any]

Path = tuple[str, ...]


def mask_name(name: str) -> str:
    """The field that is True where `name` was given: Gymnasium's convention for batched infos."""
    return f"_{name}"


def info_example(env: gym.Env[Any, Any], wanted: InfoWanted) -> tuple[NamedArrays, list[str]]:
    """What to record of `info`: zeros for each entry `name`, and for its mask `_name`. Also returns the names of the
    entries that cannot be recorded (texts, objects).

    `wanted` is a mapping of names to examples, or a list of names, or True for every numeric entry. Without a mapping,
    the examples come from one reset and one step of `env`. Raises `ConfigError` for a name without an example.
    """
    if isinstance(wanted, Mapping):
        chosen = {tuple(name.split(".")): value for name, value in wanted.items()}
        return _with_masks(chosen), []
    shown = dict(_leaves(_step_once(env)))
    if wanted is True:
        numeric = {path: value for path, value in shown.items() if _as_numeric(value) is not None}
        return _with_masks(numeric), [".".join(path) for path in shown.keys() - numeric.keys()]
    by_name = {".".join(path): path for path in shown}
    for name in wanted or ():
        if name not in by_name:
            raise ConfigError(
                f"env_info asks for {name!r}; the info of an example step has {sorted(by_name) or 'nothing'}: give an "
                f"example of its value, env_info={{{name!r}: 0.0}}"
            )
    return _with_masks({by_name[name]: shown[by_name[name]] for name in wanted or ()}), []


def _step_once(env: gym.Env[Any, Any]) -> Any:
    try:
        env.reset(seed=0)
        env.action_space.seed(0)
        return env.step(env.action_space.sample())[4]
    except Exception as error:
        raise ConfigError(
            f"the example step that env_info is read from raised {in_one_line(error)}. Give examples "
            "instead: env_info={'name': 0.0}"
        ) from error


def possible_masks(info: Mapping[str, Any], action_space: gym.Space[Any]) -> list[str]:
    """The entries that may say which actions are legal: a 0 or 1 for each. The names of nested ones have dots."""
    if not isinstance(action_space, Discrete | MultiDiscrete):
        return []
    n = int(np.sum(action_space.nvec if isinstance(action_space, MultiDiscrete) else action_space.n))
    numeric = {".".join(path): _as_numeric(value) for path, value in _leaves(info)}
    return [
        name
        for name, array in numeric.items()
        if array is not None and array.shape == (n,) and ((array == 0) | (array == 1)).all()
    ]


def _leaves(info: Mapping[Any, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, value in info.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, str(key)))
        elif not str(key).startswith("_"):  # else it is a mask of a batched environment
            yield (*path, str(key)), value


def _with_masks(chosen: Mapping[Path, Any]) -> NamedArrays:
    fields: dict[str, Any] = {}
    for path, value in chosen.items():
        array = _as_numeric(value)
        if array is None:
            raise ConfigError(f"env_info cannot record {'.'.join(path)!r}: {value!r} is not numeric")
        node = fields
        for parent in path[:-1]:
            node = node.setdefault(parent, {})
        node[path[-1]], node[mask_name(path[-1])] = np.zeros_like(array), np.zeros((), np.bool_)
    named: NamedArrays = as_named(fields)
    return named


def _as_numeric(value: object) -> Any:
    try:
        array = np.asarray(value)
    except ValueError:  # ragged
        return None
    return array if array.dtype.kind in "fiub" else None


class InfoWriter:
    """Writes infos into the arrays `[T, B, ...]` of `env_info`. A missing entry is zero, and its mask is False."""

    def __init__(self, env_info: NamedArrays) -> None:
        #: Each entry that is written: its path, its array `[T, B, ...]`, and its mask `[T, B]`.
        self._entries = [(path, *_arrays_of(env_info, path)) for path in _recorded(env_info)]
        # An entry that is not nested is found by its key, which is faster.
        self._keys = [(path[0] if len(path) == 1 else "", path) for path, _, _ in self._entries]

    def kept(self, info: Mapping[str, Any]) -> list[Any]:
        """The entries of `info` that are written; None where it has none. They are copies of what can be changed."""
        return [snapshot(info.get(key) if key else _look_up(info, path)) for key, path in self._keys]

    def write(self, t: int, infos: Sequence[Sequence[Any]]) -> None:
        """Write row t. `infos` has what `kept` has returned for each column.

        Raises `ColumnError` with the entry if a value has another shape than the example, or would change in its dtype.
        """
        for b, values in enumerate(infos):
            self.write_one(t, b, values)

    def write_one(self, t: int, b: int, values: Sequence[Any]) -> None:
        """As `write`, for one column."""
        for (path, field, mask), value in zip(self._entries, values, strict=True):
            if value is None:
                field[t, b], mask[t, b] = 0, False
                continue
            mask[t, b] = True
            if put_cell(field, t, b, value):
                continue
            array = np.asarray(value)
            fitting = as_dtype(array, field.dtype) if array.shape == field.shape[2:] else None
            if fitting is None:
                problem = (
                    f"must have shape {field.shape[2:]} and dtype {field.dtype}, as the example, got {array.shape} "
                    f"{array.dtype} {brief(value)}"
                )
                raise ColumnError(b, f"info[{'.'.join(path)!r}]", problem)
            field[t, b] = fitting

    def write_batched(self, t: int, infos: Mapping[str, Any], idle: Sequence[int]) -> None:
        """Write row t from the infos of a batched environment, for all columns at once. Columns that are `idle` have no
        info. Where an episode ended, the infos from before the reset are written.
        """
        for path, field, mask in self._entries:
            if not _write_entry(field[t], mask[t], infos, path):
                self.write(t, [self.kept(info_of(infos, b)) for b in range(mask.shape[1])])
                break
        if idle:
            for _, field, mask in self._entries:
                field[t, idle], mask[t, idle] = 0, False


def _arrays_of(env_info: NamedArrays, path: Path) -> tuple[Any, Any]:
    """The array of an entry, and its mask."""
    node: Any = env_info
    for parent in path[:-1]:
        node = node[parent]
    return node[path[-1]], node[mask_name(path[-1])]


def _write_entry(field: npt.NDArray[Any], mask: npt.NDArray[Any], infos: Mapping[str, Any], path: Path) -> bool:
    """Write one entry for all columns. Returns False if the entry is not an array that fits."""
    field[...], mask[...] = 0, False
    if not _write_where(field, mask, infos, path, np.ones(len(mask), np.bool_)):
        return False
    if "final_info" not in infos:
        return True
    ended = np.asarray(infos["_final_info"])
    field[ended], mask[ended] = 0, False
    return _write_where(field, mask, infos["final_info"], path, ended)


def _write_where(
    field: npt.NDArray[Any], mask: npt.NDArray[Any], infos: object, path: Path, where: npt.NDArray[Any]
) -> bool:
    """Write the entry where `where` is True and the environment returned it. Returns False if it does not fit."""
    for key in path:
        if not isinstance(infos, Mapping) or key not in infos:
            return True
        where = where & infos.get(mask_name(key), True)
        infos = infos[key]
    array = np.asarray(infos)
    fitting = as_dtype(array, field.dtype) if array.shape == field.shape else None
    if fitting is None:
        return False
    field[where], mask[where] = fitting[where], True
    return True


# ---- the infos of batched environments -----------------------------------------------------


def element(batched: object, b: int) -> Any:
    """Element b of a batch, nested as the batch is. None stays None."""
    return map_tree(lambda leaf: None if leaf is None else leaf[b], batched)


def info_of(infos: Mapping[str, Any], b: int) -> dict[str, Any]:
    """The info of environment b. Where its episode ended, the info of the episode's last step."""
    if "final_info" in infos and infos["_final_info"][b]:
        return info_of(infos["final_info"], b)
    info = {}
    for key, value in infos.items():
        mask = infos.get(mask_name(key))
        if key.startswith("_") or key in ("final_obs", "final_info") or not (mask is None or mask[b]):
            continue
        info[key] = info_of(value, b) if isinstance(value, Mapping) else value[b]
    return info


def _recorded(node: NamedArrays, path: Path = ()) -> Iterator[Path]:
    for name, value in node.items():
        if isinstance(value, NamedArrays):
            yield from _recorded(value, (*path, name))
        elif mask_name(name) in node:
            yield (*path, name)


def _look_up(info: Mapping[str, Any], path: Sequence[str]) -> Any:
    value: Any = info
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    if value is None and len(path) > 1:
        return info.get(".".join(path))  # a key may contain dots: "TimeLimit.truncated"
    return value
