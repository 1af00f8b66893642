"""Save a replay to a folder, whole or not at all, and read it again.

The arrays go into a new folder inside it. Then the file `replay.json`, which names it, is replaced in one step.
A process that is killed in between leaves the earlier checkpoint, and a folder that the next save removes.
`replay.json` contains the checksums of all files, and a checksum of its own content.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import uuid
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.buffers import NamedArrays
from penstock.buffers.named import ArrayTree, as_named
from penstock.buffers.tree import map_tree
from penstock.errors import ConfigError
from penstock.learning.replay_batches import of_one_writer
from penstock.learning.ring import NOWHERE, Ring, Shape

_INDEX, _FORMAT = "replay.json", 2


def write_checkpoint(folder: Path, ring: Ring, facts: dict[str, Any], priorities: npt.NDArray[Any] | None) -> None:
    """Write the steps that are in the ring, oldest first, with `facts`, which JSON must be able to hold."""
    arrays, n_finals, max_finals = of_one_writer(ring)
    shape, first, end = ring.shape, ring.first, ring.end
    fields = dict(_saved_fields(arrays, shape.state_every, first, end, n_finals))
    if priorities is not None:
        fields["priorities"] = [priorities]
    examples = {"observation": shape.observation, "action": shape.action, "state": shape.state, "more": shape.more}
    index = {
        "format": _FORMAT,
        "data": f"data-{uuid.uuid4().hex}",
        "shape": {**{name: _describe(tree) for name, tree in examples.items()}, "B": shape.B, "T": shape.T},
        "state_every": shape.state_every,
        "max_finals": max_finals,
        "first": first,
        "end": end,
        "n_finals": n_finals,
        **facts,
    }
    try:
        try:
            _write_files(folder, index, fields)
        finally:
            with suppress(OSError):  # what stays, the next save removes
                _remove_incomplete(folder)
    except OSError as error:
        raise _not_written(folder, sum(piece.nbytes for field in fields.values() for piece in field), error) from error


def _write_files(folder: Path, index: dict[str, Any], fields: dict[str, list[Any]]) -> None:
    """Write all arrays, and then `replay.json`."""
    _remove_incomplete(folder)  # before anything is written, so that there is space for it
    data = folder / index["data"]
    data.mkdir(parents=True)
    index["arrays"] = files = {name: f"{i:02d}.npy" for i, name in enumerate(fields)}
    index["checksums"] = {name: _write_array(data / files[name], pieces) for name, pieces in fields.items()}
    _sync(data)
    new = folder / f"{_INDEX}.new"
    with new.open("x", encoding="utf-8") as file:  # `_remove_incomplete` has removed an old one, or a link
        json.dump({**index, "checksum": _checksum(index)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / _INDEX)
    _sync(folder)


def _remove_incomplete(folder: Path) -> None:
    """Remove what was left by saves that failed or were killed, and earlier checkpoints: all that `replay.json` does
    not name."""
    try:
        complete = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["data"]
    except (FileNotFoundError, ValueError, LookupError, TypeError):  # missing, or so damaged that it cannot be loaded
        complete = None
    (folder / f"{_INDEX}.new").unlink(missing_ok=True)
    for data in folder.glob("data-" + 32 * "[0-9a-f]"):
        if data.name != complete:
            shutil.rmtree(data)


def _not_written(folder: Path, n_bytes: int, error: OSError) -> ConfigError:
    """What `save` raises. The incomplete checkpoint has been removed."""
    text = f"the replay could not be saved in {folder}: {error}. An earlier checkpoint in this folder is still there"
    with suppress(OSError):  # perhaps there is no folder
        free = shutil.disk_usage(folder).free
        text += f". The new one needs {n_bytes:,} bytes, and {free:,} are free on this disk"
        text += ": free some, or choose a folder on another disk" if free < n_bytes else ""
    return ConfigError(text)


def _checksum(index: dict[str, Any]) -> int:
    """The checksum of all that `index` contains."""
    return zlib.crc32(json.dumps(index, sort_keys=True).encode())


def read_index(folder: Path) -> dict[str, Any]:
    """What `replay.json` says. Raises `ConfigError` if there is no checkpoint, or it cannot be read."""
    path = folder / _INDEX
    try:
        index: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no saved replay: there is no {_INDEX}") from None
    except NotADirectoryError:
        raise ConfigError(f"{folder} is a file, not a folder into which a replay was saved") from None
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error
    if not isinstance(index, dict):
        raise _damaged(path, "it is no dict")
    if index.get("format") != _FORMAT:
        raise ConfigError(f"{folder} was saved in format {index.get('format')}, this version reads {_FORMAT}")
    if index.pop("checksum", None) != _checksum(index):
        raise _damaged(path, "its checksum differs")
    return index


def _damaged(path: Path, why: object) -> ConfigError:
    return ConfigError(f"{path} is damaged or cannot be read: {why}. Load another checkpoint of the replay")


def saved_shape(index: dict[str, Any], T: int) -> Shape:
    """The shape of the ring that was saved, with T rows."""
    of = index["shape"]
    return Shape(
        T=T,
        B=of["B"],
        observation=_example(of["observation"]),
        action=_example(of["action"]),
        state=None if of["state"] is None else _example(of["state"]),
        more=None if of.get("more") is None else _example(of["more"]),
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


def _pieces(field: npt.NDArray[Any], first: int, end: int) -> list[Any]:
    """Rows `first` to `end` of a ring, which may wrap once."""
    low, count = first % len(field), end - first
    fits = min(count, len(field) - low)
    return [field[low : low + fits], field[: count - fits]]


def _write_array(path: Path, pieces: list[Any]) -> int:
    """Write the pieces as one .npy file, without joining them in memory. Returns the checksum of the file."""
    shape = (sum(len(piece) for piece in pieces), *pieces[0].shape[1:])
    description = {"descr": np.lib.format.dtype_to_descr(pieces[0].dtype), "fortran_order": False, "shape": shape}
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, description)
    checksum = zlib.crc32(header.getvalue())
    with path.open("wb") as file:
        file.write(header.getvalue())
        file.flush()
        for piece in pieces:
            piece.tofile(file)
            checksum = zlib.crc32(piece, checksum)
        os.fsync(file.fileno())
    return checksum


def _read_array(folder: Path, index: dict[str, Any], name: str) -> Any:
    path = folder / index["data"] / index["arrays"][name]
    try:
        if zlib.crc32(np.memmap(path, np.uint8, "r").data) != index["checksums"][name]:
            raise ValueError("its checksum differs")
        return np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise _damaged(path, error) from error


def _describe(tree: ArrayTree | None) -> Any:
    """Names, shapes and dtypes of `tree`, for JSON."""
    if isinstance(tree, NamedArrays):
        return {name: _describe(part) for name, part in tree.items()}
    return None if tree is None else [list(tree.shape), np.dtype(tree.dtype).str]


def _example(described: object) -> Any:
    return as_named(map_tree(lambda leaf: np.zeros(leaf[0], leaf[1]), described))


def _sync(folder: Path) -> None:
    """Make the names in `folder` survive a crash of the machine."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
