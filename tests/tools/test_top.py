"""What `penstock top` reads and shows. `process/test_top.py` looks at runs of other processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import system
from penstock.__main__ import main
from penstock.tools import top
from penstock.workers import ControlBlock, WorkerPlan, about
from penstock.workers.control import ARRIVED, BEGUN, HEARTBEAT, PHASE, PID, Phase, T

from ..children import exit_code_of_fork
from ..scale import scaled

PLANS = [WorkerPlan(worker_rank=i, columns=range(2 * i, 2 * i + 2), env_ranks=range(2 * i, 2 * i + 2)) for i in (0, 1)]


@contextmanager
def own_run() -> Iterator[ControlBlock]:
    """A pool of this process that has no workers but says that it has."""
    block = ControlBlock(len(PLANS), 4, shared=True)
    block.memory.announce("Fake", 4, PLANS, [0, 0])
    for rank in range(len(PLANS)):
        block.memory.arrays.n_results[rank, PID] = os.getpid()
    try:
        yield block
    finally:
        block.memory.close()


def run_of(block: ControlBlock) -> top.Run:
    (run,) = [run for run in top.Runs([os.getpid()]).found if run.what["kind"] == "Fake"]
    return run


def test_whatever_is_in_the_memory_is_no_error() -> None:
    """A worker that crashes may write anything anywhere."""
    generator = np.random.default_rng(0)
    with own_run() as block:
        run = run_of(block)
        for _ in range(scaled(2_000, 200)):
            for name, array in block.memory.arrays.items():
                if name != "words":
                    array.view(np.uint8)[...] = generator.integers(0, 256, array.view(np.uint8).shape, np.uint8)
            small = generator.random(block.memory.arrays.progress.shape) < 0.5
            block.memory.arrays.progress[small] %= 20
            found = run.look()
            json.dumps(found)
            assert "Fake pid" in top.frame([found])
        block.memory.arrays.progress[0, PHASE] = 77
        assert run.look()["workers"][0]["doing"].startswith("doing what cannot be read, since a crash has written")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": 1}',
        '{"format": 1, "layout": {"words": [0, [16], "<i8"]}, "nbytes": 128, "pid": 0}',
        '{"format": 1, "layout": {"words": [0, [16], "O"]}, "nbytes": 128, "pid": 0}',
        '{"format": 1, "layout": {"words": [1000000000, [16], "<i8"]}, "nbytes": 128, "pid": 0}',
        '{"format": 1, "layout": {"words": [0, [1000000000000], "<i8"]}, "nbytes": 8000000000000, "pid": 0}',
        '{"format": 1, "layout": {}, "nbytes": 1000000000000000000000, "pid": 0}',
        "[" * 100_000,
    ],
)
def test_a_description_that_is_not_whole_is_no_run(text: str) -> None:
    with own_run() as block:
        written = b"\0" * 100_000 + text.replace('"pid": 0', f'"pid": {os.getpid()}').encode()
        assert block.memory._descriptor is not None
        os.pwrite(block.memory._descriptor.fd, written, block.memory.nbytes)
        assert not has_fake()


def has_fake() -> bool:
    runs = top.Runs([])
    runs.look()
    return "Fake" in [run.what["kind"] for run in runs.found if run.pid == os.getpid()]


def test_arrays_of_terabytes_are_not_read() -> None:
    """A copy of them would use up the memory."""
    with own_run() as block:
        what, nbytes = run_of(block).what, 1 << 41
        assert has_fake()
        what["layout"]["records"][1] = [2, 1 << 33, 16]
        assert block.memory._descriptor is not None
        os.ftruncate(block.memory._descriptor.fd, nbytes)
        os.pwrite(block.memory._descriptor.fd, b"\0" + json.dumps({**what, "nbytes": nbytes}).encode(), nbytes)
        assert not has_fake()


def test_rates_shares_and_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the time since the last look. A worker that is in the middle of a row makes progress from environment to
    environment; one that waits is not marked."""
    with own_run() as block:
        now = run_of(block).what["began"]
        monkeypatch.setattr("time.monotonic", lambda: now)
        run = run_of(block)
        first, second = (block.progress(rank) for rank in (0, 1))
        for words in (first.words, second.words):
            words[HEARTBEAT] = int((now := now + 10.0) * 1e9)
        first.words[PHASE], first.words[T] = Phase.STEPPING, 3
        second.words[PHASE] = Phase.WAITING
        run.look()
        now += 4.0
        first.at_env(1)
        found = run.look()["workers"]
        assert [row["silent"] for row in found] == [0.0, 0.0]
        assert found[1]["shares"] == {"acting": 0.0, "stepping": 0.0, "idle": 1.0}
        now += 5.0
        block.opened[0] = first.words[BEGUN] = 1
        run.look()
        now += 5.0
        shown = top.frame([run.look()])
        assert re.search(r"^ +0 .* 0 to 1 .*stepping env_rank 1, t=3 for 10\.0 s  <- NO PROGRESS$", shown, re.MULTILINE)
        assert re.search(r"^ +1 .* 2 to 3 .*100% .*waiting for the next command$", shown, re.MULTILINE)
        assert "main process: waits for 1 of 2 workers" in shown
        first.words[ARRIVED], first.words[PHASE] = 1, Phase.WAITING
        assert "main process: has the results of all 2 workers" in top.frame([run.look()])


def test_a_narrow_terminal_has_fewer_columns_and_many_workers_fewer_rows() -> None:
    with own_run() as block:
        found: dict[str, Any] = run_of(block).look()
    heads = [top.frame([found], width).splitlines()[2].split() for width in (100, 99)]
    assert set(heads[0]) - set(heads[1]) == {"pid", "MiB", "restarts"}
    found["workers"] = [{**found["workers"][0], "worker": i, "silent": i / 10} for i in range(50)]
    lines = top.frame([found]).splitlines()
    assert len(lines) == 3 + 40 + 1
    assert lines[3].split()[0] == "49", "those that hang are shown"
    assert lines[-1] == "... and 10 more, which made progress later"
    assert top.frame([]) == "no sampler or vector environment of this user has workers on this machine"


@pytest.mark.parametrize("terminal", ["xterm", "dumb"])
def test_the_live_view_ends_with_the_run(
    terminal: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", terminal)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr(top.Run, "_has_ended", lambda *_: True)
    with own_run():
        assert main(["top", str(os.getpid()), "--interval", "0.01"]) == 0
    shown = capsys.readouterr().out
    assert f"Fake pid {os.getpid()} T=4 B=4  itr 0  has ended" in shown
    assert shown.startswith("\x1b[H\x1b[J") == (terminal == "xterm")
    assert terminal == "xterm" or "\x1b" not in shown


def test_a_reader_that_ends_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as file:
        monkeypatch.setattr("sys.stdout", file)
        assert main(["top", "--json", "--interval", "0.01"]) == 141


@pytest.mark.parametrize("arguments", [[], ["--stacks"], ["--trace", "x.json"], ["--interval", "inf"]])
def test_ctrl_c_at_any_moment(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: float) -> None:
        if arguments not in ((0.5,),):  # the second sleep
            assert all(seconds < threading.TIMEOUT_MAX for seconds in arguments)
            raise KeyboardInterrupt

    if arguments[:1] in (["--stacks"], ["--trace"]):
        monkeypatch.setattr(top.Runs, "look", lambda _: interrupt())
    else:
        monkeypatch.setattr("time.sleep", interrupt)
    assert main(["top", *arguments]) == 130


def test_a_fork_does_not_remove_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a process cannot open what another one has open, the control block has a name."""
    folder = tmp_path / "runs"
    monkeypatch.setenv("PENSTOCK_RUN_FOLDER", str(folder))
    monkeypatch.setattr(system, "OPENS_OTHERS", False)
    with own_run() as block:
        assert sorted(path.suffix for path in folder.iterdir()) == [".lock", ".penstock-run"]
        assert exit_code_of_fork(block.memory.close) == 0
        assert len([*folder.iterdir()]) == 2
        assert run_of(block).look()["kind"] == "Fake"
    assert [*folder.iterdir()] == []


def test_a_folder_that_others_can_open_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run goes on without a name there."""
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setenv("PENSTOCK_RUN_FOLDER", str(tmp_path / "link"))
    monkeypatch.setattr(system, "OPENS_OTHERS", False)
    with own_run():
        assert main(["top", "--once"]) == 1
        assert main(["top", str(os.getpid())]) == 2
    for text in capsys.readouterr():
        assert f"no run can be seen here: {tmp_path}/link is not a folder that only this user can open" in text
    assert [*tmp_path.iterdir()] == [tmp_path / "link"]


def test_what_else_is_in_the_folder_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a later run is seen whose file has the number of an earlier one on the disk."""
    folder = tmp_path / "runs"
    folder.mkdir(mode=0o700)
    (folder / "0.penstock-run").mkdir()
    (folder / f"{os.getpid()}999999.penstock-run").symlink_to(folder / "nowhere")
    monkeypatch.setenv("PENSTOCK_RUN_FOLDER", str(folder))
    monkeypatch.setattr(system, "OPENS_OTHERS", False)
    with own_run():
        runs = top.Runs([os.getpid()])
        assert [run.what["kind"] for run in runs.found] == ["Fake"]
        before = os.stat(about.files_of(os.getpid())[0])
    with own_run():
        (path,) = about.files_of(os.getpid())
        stat = os.stat
        monkeypatch.setattr("os.stat", lambda at, **options: before if at == path else stat(at, **options))
        runs.look()
        assert [run.what["kind"] for run in runs.found] == ["Fake"] * 2


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        try:
            with pytest.raises(OSError, match="has no handler") if system.OPENS_OTHERS else nullcontext():
                system.ask_stacks(sleeper.pid)
            assert main(["top", str(sleeper.pid)]) == 2
            assert f"process {sleeper.pid} has no sampler or vector environment" in capsys.readouterr().err
            assert sleeper.poll() is None
        finally:
            sleeper.kill()
    assert main(["top", str(sleeper.pid)]) == 2
    assert f"there is no process {sleeper.pid}" in capsys.readouterr().err
    assert main(["top", str(10**30)]) == 2
    assert f"there is no process {10**30}" in capsys.readouterr().err
    assert main(["top", "--interval", "0"]) == 2
    assert "interval" in capsys.readouterr().err
    assert main(["top", "--join", "nothing.json", "--once"]) == 2
