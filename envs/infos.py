"""What environments say in `info`: which entries can be recorded, and how a row of them is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from penstock.buffers.named import NamedArrays, as_named
from penstock.errors import ConfigError, SpaceError

__all__ = ["InfoWanted", "InfoWriter", "info_example", "mask_name"]

#: True for every entry that an example shows, names (nested ones with dots), or names with examples.
InfoWanted = bool | Sequence[str] | Mapping[str, Any]

Path = tuple[str, ...]


def mask_name(name: str) -> str:
    """The field that says where `name` was given: Gymnasium's convention for batched infos."""
    return f"_{name}"


def info_example(env: gym.Env[Any, Any], wanted: InfoWanted) -> tuple[NamedArrays, list[str]]:
    """An example of what is to be recorded of `info`, zeroed, from one reset and one step of `env`.

    Every entry `name` has a mask `_name` beside it, True where the environment gave it. Returns the
    example and the names of the entries that cannot be recorded (texts, objects).

    Raises `ConfigError` for a name that the example does not show and that has no example of its own.
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
            f"the example step that env_info is read from raised {type(error).__name__}: {error}. Give examples "
            "instead: env_info={'name': 0.0}"
        ) from error


def _leaves(info: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, value in info.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, str(key)))
        elif not str(key).startswith("_"):  # a mask already, as batched environments give them
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


def _as_numeric(value: Any) -> Any:
    try:
        array = np.asarray(value)
    except ValueError:  # ragged
        return None
    return array if array.dtype.kind in "fiub" else None


class InfoWriter:
    """Writes one info per environment into a row of `env_info` fields; what is missing is zero and masked."""

    def __init__(self, env_info: NamedArrays) -> None:
        self._paths = list(_recorded(env_info))

    def write(self, row: NamedArrays, infos: Sequence[Mapping[str, Any]], env_ranks: Sequence[int]) -> None:
        """Record `infos` into `row` `[B, ...]`.

        Raises `SpaceError` naming entry and environment if a value has another shape or kind than the example.
        """
        for path in self._paths:
            node: Any = row
            for parent in path[:-1]:
                node = node[parent]
            field, mask = node[path[-1]], node[mask_name(path[-1])]
            for b, info in enumerate(infos):
                value = _look_up(info, path)
                mask[b] = value is not None
                if value is None:
                    field[b] = 0
                    continue
                array = np.asarray(value)
                if array.shape != field.shape[1:] or not np.can_cast(array.dtype, field.dtype, "same_kind"):
                    raise SpaceError(
                        f"info[{'.'.join(path)!r}] of env_rank {env_ranks[b]} must have shape {field.shape[1:]} and "
                        f"dtype {field.dtype}, got {array.shape} {array.dtype}"
                    )
                field[b] = array


def _recorded(node: NamedArrays, path: Path = ()) -> Iterator[Path]:
    for name, value in node.items():
        if isinstance(value, NamedArrays):
            yield from _recorded(value, (*path, name))
        elif mask_name(name) in node:
            yield (*path, name)


def _look_up(info: Any, path: Sequence[str]) -> Any:
    for key in path:
        info = info.get(key) if isinstance(info, Mapping) else None
    return info
