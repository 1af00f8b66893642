"""Save and load: the same draws afterwards, another capacity, and a process that is killed while it saves."""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import ConfigError
from penstock.learning import Frames, Prioritized, Replay, Sequences, checkpoint

from ..children import exit_code_of_fork
from ..scale import scaled
from ..support import assert_same
from . import test_sequences, test_transitions
from .streams import DISCOUNT, Stream, storage_of

KINDS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "priorities": {"prioritized": Prioritized()},
    "frames": {"frames": Frames(3)},
    "sequences": {"sequences": Sequences(5, 1, 2), "prioritized": Prioritized()},
}
kinds = pytest.mark.parametrize("kind", KINDS)


def filled_replay(kind: str, n_batches: int = 12) -> tuple[Stream, Replay]:
    options = KINDS[kind]
    stream = Stream(0, 3, frames=options.get("frames"), nested="frames" not in options and "sequences" not in options)
    replay = Replay(3 * 50, 2, DISCOUNT, **options, max_truncations=99, seed=5)
    for _ in range(n_batches):
        replay.append(stream.batch(7))
    return stream, replay


def use(replay: Replay, rng: np.random.Generator) -> Any:
    batch = replay.sample(32)
    if replay.prioritized:
        replay.update(batch.index, rng.random(32))
    return batch


@kinds
@pytest.mark.parametrize("n_batches", [12, 3])
def test_after_load_the_draws_are_the_same(tmp_path: Path, kind: str, n_batches: int) -> None:
    stream, replay = filled_replay(kind, n_batches)
    rng = np.random.default_rng(0)
    for _ in range(20):
        use(replay, rng)
    replay.beta = 0.9
    replay.save(tmp_path / "replay")
    loaded = Replay.load(tmp_path / "replay")
    assert (loaded.n_steps, loaded.n_drawn, len(loaded)) == (replay.n_steps, replay.n_drawn, len(replay))
    assert (loaded.n_stale, loaded.beta) == (replay.n_stale, 0.9 if replay.prioritized else replay.beta)
    rngs = np.random.default_rng(1), np.random.default_rng(1)
    for itr in range(scaled(1000, 80)):
        assert_same(use(replay, rngs[0]), use(loaded, rngs[1]))
        if itr % 40 == 39:
            samples = stream.batch(7)
            for each in (replay, loaded):
                each.append(samples, continues=itr > 39)


def test_only_states_of_steps_that_are_kept_are_saved(tmp_path: Path) -> None:
    stream, replay = filled_replay("sequences", n_batches=11)
    replay.save(tmp_path)
    index = json.loads((tmp_path / "replay.json").read_text())
    first, end = index["first"], index["end"]
    assert (first, end) == (27, 77), "otherwise nothing is rounded"
    states = np.load(tmp_path / index["data"] / index["arrays"]["state"])
    assert states[:, 0, 0].tolist() == [row.number for row in stream.history[0][28:77:2]]


@pytest.mark.filterwarnings("ignore:more than max_truncations:RuntimeWarning")
@pytest.mark.parametrize("n_batches", [1, 12])
def test_only_final_observations_that_are_kept_are_saved(tmp_path: Path, n_batches: int) -> None:
    stream, replay, most = Stream(0, 3), Replay(3 * 50, 2, DISCOUNT, max_truncations=5), 5
    for _ in range(n_batches):
        replay.append(stream.batch(7))
    replay.save(tmp_path)
    n, index = stream.n_finals, json.loads((tmp_path / "replay.json").read_text())
    assert 0 < n < most if n_batches == 1 else n > 2 * most
    steps = np.load(tmp_path / index["data"] / index["arrays"]["final_step"])
    order = {row.final_order: step for rows in stream.history for step, row in enumerate(rows)}
    assert steps.tolist() == [order[k] for k in range(max(n - most, 0), n)]
    test_transitions.check_all(Replay.load(tmp_path), stream, 2, most)


def test_another_capacity_is_rounded_up(tmp_path: Path) -> None:
    _, replay = filled_replay("sequences")
    replay.save(tmp_path)
    # Three columns, and the recurrent state of every second row.
    assert [len(Replay.load(tmp_path, capacity=capacity)) for capacity in (60, 61, 66, 67)] == [60, 66, 66, 72]


@kinds
@pytest.mark.parametrize("capacity", [3 * 20, 3 * 90])
def test_the_capacity_may_change(tmp_path: Path, kind: str, capacity: int) -> None:
    stream, replay = filled_replay(kind)
    first, rng = replay.n_steps // 3 - 50, np.random.default_rng(0)
    for _ in range(20):
        use(replay, rng)
    replay.save(tmp_path)
    loaded = Replay.load(tmp_path, capacity=capacity)
    if loaded.prioritized:
        draws: list[Any] = [storage_of(each).draw for each in (replay, loaded)]
        newest = draws[1].leaves()
        assert len(newest) == min(len(draws[0].leaves()), draws[1].high - draws[1].low) > 10
        assert len(set(newest)) > 5
        assert newest.tolist() == draws[0].leaves()[len(draws[0].leaves()) - len(newest) :].tolist()
    assert loaded.n_steps == replay.n_steps
    assert len(loaded) == min(len(replay), capacity)
    assert len(storage_of(loaded).ring.arrays.final_step[0]) == 99 * (capacity // 3) // 50
    check: Any = test_sequences if loaded.sequences else test_transitions
    if capacity < 150:
        check.check_all(loaded, stream, 2)
    else:  # rows that were overwritten before the save are missing
        assert loaded.contents.index.tolist() == replay.contents.index.tolist()
        assert loaded.sample(500).index.min() // 3 >= first
    for _ in range(40):
        loaded.append(stream.batch(7), continues=False)
        stream.batch(1, lost=True)
    assert loaded.sample(500).index.min() > replay.n_steps


@pytest.mark.filterwarnings("ignore:more than max_truncations:RuntimeWarning")
def test_in_a_larger_ring_lost_final_observations_stay_lost(tmp_path: Path) -> None:
    stream, replay = Stream(0, 3), Replay(3 * 50, 2, DISCOUNT, max_truncations=5)
    for _ in range(6):
        replay.append(stream.batch(7))
    assert stream.n_finals > 10
    replay.save(tmp_path)
    loaded = Replay.load(tmp_path, capacity=3 * 100)
    assert loaded.contents.index.tolist() == replay.contents.index.tolist()
    before = stream.n_finals
    while stream.n_finals == before:
        loaded.append(stream.batch(1), continues=False)
    assert loaded.n_without_final == replay.n_without_final, "there is room for more now"


def test_a_new_sampler_does_not_continue_the_saved_episodes(tmp_path: Path) -> None:
    stream, replay = filled_replay("uniform")
    replay.save(tmp_path)
    loaded = Replay.load(tmp_path)
    stream.batch(3, lost=True)
    loaded.append(stream.batch(9))
    test_transitions.check_all(loaded, stream, 2)


@pytest.mark.parametrize("n_bytes", [0, 50, None], ids=["empty", "cut off", "missing"])
def test_a_damaged_checkpoint_names_the_file(tmp_path: Path, n_bytes: int | None) -> None:
    filled_replay("priorities", 3)[1].save(tmp_path)
    index = json.loads((tmp_path / "replay.json").read_text())
    files = [f"{index['data']}/{index['arrays'][name]}" for name in ("priorities", "flags")]
    for path in (tmp_path / "replay.json", *(tmp_path / file for file in files)):
        whole = path.read_bytes()
        path.unlink()
        if n_bytes is not None:
            path.write_bytes(whole[:n_bytes])
        with pytest.raises(ConfigError, match=path.name):
            Replay.load(tmp_path)
        path.write_bytes(whole)
    Replay.load(tmp_path)


# ---- damaged folders -------------------------------------------------------------------------------


@cache
def saved_files(kind: str) -> dict[str, bytes]:
    """The names and contents of the files of a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        filled_replay(kind)[1].save(folder)
        return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def draws_of(files: dict[str, bytes]) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).parent.mkdir(exist_ok=True)
            (Path(folder) / name).write_bytes(content)
        replay = Replay.load(folder)
        return [replay.sample(64) for _ in range(3)]


def change_json(value: Any, data: st.DataObject) -> Any:
    """`value` with one change, at any depth."""
    if isinstance(value, dict | list) and value and data.draw(st.integers(0, 9)):
        key = data.draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
        if data.draw(st.integers(0, 4)) == 0:
            del value[key]
        else:
            value[key] = change_json(value[key], data)
        return value
    if isinstance(value, int | float) and data.draw(st.booleans()):
        return value + data.draw(st.sampled_from([1, -1, 5, 10**9, 0.5]))
    return data.draw(st.sampled_from([None, [], {}, [value], {"a": value}, "", "x", 0, -1, 1e400, True]))


def change_array(content: bytes, data: st.DataObject) -> bytes:
    """The array of a .npy file, of another shape or dtype, or with another element."""
    array, file = np.load(io.BytesIO(content)), io.BytesIO()
    how = data.draw(st.sampled_from(["rows", "B", "dtype", "bytes", "value", "no array"]))
    if how == "no array":
        np.savez(file, array)
    else:
        changed: dict[str, Any] = {
            "rows": array[: data.draw(st.integers(0, len(array) - 1))],
            "B": np.concatenate([array, array], min(1, array.ndim - 1)),
            "dtype": array.astype(data.draw(st.sampled_from([np.float16, np.int32, np.bool_]))),
            "bytes": array.astype("S3"),
            "value": np.where(np.arange(array.size).reshape(array.shape) == 3, array + 1, array),
        }
        np.save(file, changed[how])
    return file.getvalue()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of numbers that do not fit into the new dtype
@kinds
@given(data=st.data())
def test_a_damaged_folder_gives_an_error_or_the_right_batches(kind: str, data: st.DataObject) -> None:
    files = dict(saved_files(kind))
    name = data.draw(st.sampled_from(sorted(files)))
    content = files[name]
    how = data.draw(st.sampled_from(["cut off", "longer", "byte", "content", "missing", "other file"]))
    at = data.draw(st.integers(0, len(content) - 1))
    if how == "cut off":
        files[name] = content[:at]
    elif how == "longer":
        files[name] = content[:at] + b"0" + content[at:]
    elif how == "byte":
        files[name] = content[:at] + bytes([content[at] ^ data.draw(st.integers(1, 255))]) + content[at + 1 :]
    elif how == "other file":
        files[name] = files[data.draw(st.sampled_from(sorted(files)))]
    elif how == "missing":
        del files[name]
    elif name.endswith(".json"):
        files[name] = json.dumps(change_json(json.loads(content), data)).encode()
    else:
        files[name] = change_array(content, data)
    try:
        found = draws_of(files)
    except ConfigError:
        return
    for ours, theirs in zip(found, draws_of(saved_files(kind)), strict=True):
        assert_same(ours, theirs)


# ---- saves that fail ---------------------------------------------------------------------------


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """No file may become larger than `limit` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names_in(folder: Path) -> set[str]:
    return {"data" if path.name.startswith("data-") else path.name for path in folder.iterdir()}


def test_a_save_that_fails_leaves_nothing_and_names_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, replay = filled_replay("priorities", 3)
    replay.save(tmp_path / "replay")
    n_steps = replay.n_steps
    for _ in range(9):
        replay.append(stream.batch(7))
    text = (
        rf"could not be saved in {tmp_path}/replay: .*An earlier checkpoint .*needs [\d,]+ bytes, and [\d,]+ are free"
    )
    for free in (10**15, 10):
        advice = ": free some, or choose a folder on another disk" if free == 10 else "$"
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        with small_files(1000), pytest.raises(ConfigError, match=f"{text} on this disk{advice}"):
            replay.save(tmp_path / "replay")
        assert names_in(tmp_path / "replay") == {"replay.json", "data"}
        assert len(list((tmp_path / "replay").iterdir())) == 2
        assert Replay.load(tmp_path / "replay").n_steps == n_steps
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"could not be saved in {tmp_path}/file/in: .*Not a directory"):
        replay.save(tmp_path / "file" / "in")
    replay.save(tmp_path / "replay")
    assert Replay.load(tmp_path / "replay").n_steps == replay.n_steps


def test_what_a_killed_save_has_left_is_removed_before_the_next_one_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, replay = filled_replay("uniform", 3)
    replay.save(tmp_path)
    left, other = tmp_path / f"data-{'0a' * 16}", tmp_path / "data-of-the-user"
    left.mkdir()
    other.mkdir()
    (left / "00.npy").write_bytes(bytes(1000))
    (tmp_path / "replay.json.new").write_text("{")
    write = checkpoint._write_array  # what a save has removed before it shows only here

    def check_and_write(*args: Any) -> int:
        assert not left.exists()
        return write(*args)

    monkeypatch.setattr(checkpoint, "_write_array", check_and_write)
    replay.append(stream.batch(7))
    replay.save(tmp_path)
    assert other.exists()
    assert len(list(tmp_path.iterdir())) == 3, "the first one is removed"
    assert Replay.load(tmp_path).n_steps == replay.n_steps


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_save_that_is_interrupted_or_killed_leaves_one_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    stream, replay = filled_replay("priorities", 3)
    replay.save(tmp_path)
    sync, n_calls, found = os.fsync, 0, set()

    def interrupted(fd: int) -> None:
        nonlocal left
        left -= 1
        if left == 0 and is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        elif left == 0:
            raise KeyboardInterrupt
        sync(fd)

    def save() -> bool:
        """Whether nothing came in between."""
        if is_killed:
            return exit_code_of_fork(lambda: replay.save(tmp_path)) == 0
        with suppress(KeyboardInterrupt):
            replay.save(tmp_path)
            return True
        return False

    monkeypatch.setattr(os, "fsync", interrupted)
    is_saved = False
    while not is_saved:
        n_calls += 1
        left, before = n_calls, Replay.load(tmp_path).n_steps
        replay.append(stream.batch(7))
        is_saved = save()
        assert is_killed or len(list(tmp_path.iterdir())) == 2
        loaded = Replay.load(tmp_path)
        assert loaded.n_steps in (before, replay.n_steps)
        assert loaded.sample(8).weight.isfinite().all()
        if not is_saved:
            found.add(loaded.n_steps > before)
    assert n_calls > 10
    assert found == {False, True}, "the last interruption comes after the new checkpoint is complete"


def test_folders_without_a_checkpoint_say_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no saved replay"):
        Replay.load(tmp_path)
    _, replay = filled_replay("uniform")
    replay.save(tmp_path)
    index = json.loads((tmp_path / "replay.json").read_text())
    (tmp_path / "replay.json").write_text(json.dumps({**index, "format": 99}))
    with pytest.raises(ConfigError, match="format 99"):
        Replay.load(tmp_path)
    with pytest.raises(ConfigError, match=r"replay\.json is a file, not a folder into which a replay was saved"):
        Replay.load(tmp_path / "replay.json")
    for call in (Replay.load, replay.save):
        with pytest.raises(ConfigError, match="folder must be the path of a folder, got 3"):
            call(3)  # type: ignore[arg-type, operator]
