"""Save a replay to a folder, whole or not at all, and read it again.

The arrays go into a new folder inside it. Then the file `replay.json`, which names it, is replaced in one step.
A process that is killed in between leaves the earlier checkpoint, and a folder that the next save removes.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.buffers import NamedArrays
from penstock.errors import ConfigError
from penstock.replays.moving import of_one_writer
from penstock.replays.ring import NOWHERE, Ring, Shape

_INDEX, _FORMAT = "replay.json", 1


def write_checkpoint(folder: Path, ring: Ring, facts: dict[str, Any], priorities: npt.NDArray[Any] | None) -> None:
    """Write the steps that are in the ring, oldest first, with `facts`, which JSON must be able to hold."""
    data = folder / f"data-{uuid.uuid4().hex}"
    data.mkdir(parents=True)
    first, end = ring.first, ring.end
    arrays, n_finals, max_finals = of_one_writer(ring)
    fields = _saved_fields(arrays, ring.shape.state_every, first, end, n_finals)
    names = {}
    for i, (name, pieces) in enumerate(fields):
        names[name] = f"{i:02d}.npy"
        _write_array(data / names[name], pieces)
    if priorities is not None:
        names["priorities"] = "priorities.npy"
        _write_array(data / names["priorities"], [priorities])
    shape = ring.shape
    examples = {"observation": shape.observation, "action": shape.action, "state": shape.state}
    index = {
        "format": _FORMAT,
        "data": data.name,
        "arrays": names,
        "shape": {**{name: _describe(tree) for name, tree in examples.items()}, "B": shape.B, "T": shape.T},
        "state_every": shape.state_every,
        "max_finals": max_finals,
        "first": first,
        "end": end,
        "n_finals": n_finals,
        **facts,
    }
    _sync(data)
    new = folder / f"{_INDEX}.new"
    with new.open("w", encoding="utf-8") as file:
        json.dump(index, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / _INDEX)
    _sync(folder)
    for other in folder.glob("data-*"):
        if other.name != data.name:
            shutil.rmtree(other)


def read_index(folder: Path) -> dict[str, Any]:
    """What `replay.json` says. Raises `ConfigError` if there is no checkpoint, or it cannot be read."""
    try:
        index: dict[str, Any] = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no saved replay: there is no {_INDEX}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / _INDEX} cannot be read: {error}") from error
    if index.get("format") != _FORMAT:
        raise ConfigError(f"{folder} was saved in format {index.get('format')}, this version reads {_FORMAT}")
    return index


def saved_shape(index: dict[str, Any], T: int) -> Shape:
    """The shape of the ring that was saved, with T rows."""
    of = index["shape"]
    return Shape(
        T=T,
        B=of["B"],
        observation=_example(of["observation"]),
        action=_example(of["action"]),
        state=None if of["state"] is None else _example(of["state"]),
        state_every=index["state_every"],
        max_finals=max(index["max_finals"] * T // of["T"], 1),
    )


def read_steps(folder: Path, index: dict[str, Any], ring: Ring) -> None:
    """Fill `ring` with the newest of the saved steps."""
    end, n_finals = index["end"], index["n_finals"]
    for name, field in _rows_of(ring.arrays):
        every = ring.shape.state_every if name.split(".")[0] == "state" else 1
        saved = _read_array(folder, index, name)
        count = min(len(saved), len(field))
        step = -(-end // every) - count + np.arange(count)
        field[step % len(field)] = saved[len(saved) - count :]
    # This ring may keep more final observations than the saved one. But those that were lost before stay lost.
    ring.arrays.final_step[...] = NOWHERE
    ring.final[ring.final < n_finals - index["max_finals"]] = NOWHERE
    for name, field in _finals_of(ring.arrays):
        saved = _read_array(folder, index, name)
        count = min(len(saved), ring.shape.max_finals)
        field[0, np.arange(n_finals - count, n_finals) % ring.shape.max_finals] = saved[len(saved) - count :]
    ring.resume(index["first"], end, [n_finals], index["n_without_final"])


def read_priorities(folder: Path, index: dict[str, Any]) -> npt.NDArray[np.float64]:
    """The leaves that were saved, oldest first."""
    return np.array(_read_array(folder, index, "priorities"))


def _saved_fields(
    arrays: NamedArrays, state_every: int, first: int, end: int, n_finals: int
) -> Iterator[tuple[str, list[Any]]]:
    """Each array with the pieces of it to save, oldest first."""
    for name, field in _rows_of(arrays):
        every = state_every if name.split(".")[0] == "state" else 1
        yield name, _pieces(field, -(-first // every), -(-end // every))
    for name, field in _finals_of(arrays):
        yield name, _pieces(field[0], max(n_finals - field.shape[1], 0), n_finals)


def _rows_of(arrays: NamedArrays) -> Iterator[tuple[str, Any]]:
    for name, field in arrays.leaves():
        if name.split(".")[0] not in ("final_obs", "final_step", "begun", "done"):
            yield name, field


def _finals_of(arrays: NamedArrays) -> Iterator[tuple[str, Any]]:
    for name, field in arrays.leaves():
        if name.split(".")[0] in ("final_obs", "final_step"):
            yield name, field


def _pieces(field: Any, first: int, end: int) -> list[Any]:
    """Rows `first` to `end` of a ring, which may wrap once."""
    low, count = first % len(field), end - first
    fits = min(count, len(field) - low)
    return [field[low : low + fits], field[: count - fits]]


def _write_array(path: Path, pieces: list[Any]) -> None:
    """Write the pieces as one .npy file, without joining them in memory."""
    shape = (sum(len(piece) for piece in pieces), *pieces[0].shape[1:])
    header = {"descr": np.lib.format.dtype_to_descr(pieces[0].dtype), "fortran_order": False, "shape": shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.flush()
        for piece in pieces:
            piece.tofile(file)
        os.fsync(file.fileno())


def _read_array(folder: Path, index: dict[str, Any], name: str) -> Any:
    path = folder / index["data"] / index["arrays"][name]
    try:
        return np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"the replay saved in {folder} is damaged, {path.name} cannot be read: {error}") from error


def _describe(tree: Any) -> Any:
    """Names, shapes and dtypes of `tree`, for JSON."""
    if isinstance(tree, NamedArrays):
        return {name: _describe(part) for name, part in tree.items()}
    return None if tree is None else [list(tree.shape), np.dtype(tree.dtype).str]


def _example(described: Any) -> Any:
    if isinstance(described, dict):
        return NamedArrays({name: _example(part) for name, part in described.items()})
    return np.zeros(described[0], described[1])


def _sync(folder: Path) -> None:
    """Make the names in `folder` survive a crash of the machine."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
