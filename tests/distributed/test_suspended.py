"""Panels that are silent although they live: real programs that are suspended, over sockets and on Ray."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("zmq", reason="the wire over sockets needs pyzmq")
pytest.importorskip("msgpack", reason="the wire over sockets needs msgpack")

from penstock import RandomAgent
from penstock.distributed import PollResult, TrainerWorker, Training, Worker, role
from penstock.distributed.keys import Connection
from penstock.distributed.launched import LaunchedProcess

from ..support import PROGRAMS
from .ray_support import our_processes, wait_for_none
from .support import need, note, wait_until
from .test_experiment import experiment

pytestmark = pytest.mark.slow


class Driver:
    """The program tests/programs/suspended.py, and what it has printed."""

    def __init__(self, *arguments: object, environ: dict[str, str]) -> None:
        command = [sys.executable, str(PROGRAMS / "suspended.py"), *map(str, arguments)]
        self.process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
        self.states: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.states.append(json.loads(line))

    def wait(self, condition: Callable[[dict[str, Any]], bool], timeout: float = 90.0) -> dict[str, Any]:
        """The first state from now on for which this is true."""
        first = len(self.states)
        wait_until(lambda: any(map(condition, self.states[first:])), timeout)
        return next(filter(condition, self.states[first:]))

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._reader.join()


def is_up(state: dict[str, Any]) -> bool:
    workers = [status for name, status in state.items() if "/" in name]
    return state["pid"] > 0 and set(workers) == {"RUNNING"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("wire", "n_trainers", "n_policies"),
    [
        ("zmq", 1, 1),
        pytest.param("ray", 1, 1, marks=pytest.mark.ray),
        pytest.param("ray", 2, 0, marks=pytest.mark.ray),
    ],
)
def test_a_run_goes_on_after_its_panel_was_suspended_and_all_end_when_it_is_killed(
    wire: str, n_trainers: int, n_policies: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    need(wire, request)
    environ = dict(os.environ)
    if wire == "ray":
        environ["RAY_ADDRESS"] = request.getfixturevalue("ray_cluster").address
    before, path = our_processes(), tmp_path / "trainer.pt"
    driver = Driver(wire, path, n_trainers, n_policies, environ=environ)
    try:
        state = driver.wait(lambda s: is_up(s) and s["version"] >= 3)
        pid, n_lives = state["pid"], 0
        for _ in range(2):  # more often than max_restarts allows failures
            path.unlink(missing_ok=True)
            driver.process.send_signal(signal.SIGSTOP)
            time.sleep(7)
            assert path.exists(), "the trainer has saved itself"
            saved = torch.load(path, weights_only=True)["version"]
            driver.process.send_signal(signal.SIGCONT)
            n_lives += wire == "ray"
            state = driver.wait(
                lambda s: is_up(s) and s["version"] > saved + 3 and s["restarts"]["actor/1"] == n_lives  # noqa: B023
            )
        others = [name for name in state["restarts"] if not name.startswith("trainer/")]
        assert state["restarts"] == dict.fromkeys(state["restarts"], 0) | dict.fromkeys(others, n_lives)
        versions = [each["version"] for each in driver.states]
        assert versions == sorted(versions)
        assert {each["pid"] for each in driver.states if each["version"] >= 3} <= {0, pid}
        assert not {each["trainer/0"] for each in driver.states} & {"LOST", "ERROR"}
        driver.process.send_signal(signal.SIGSTOP)
        time.sleep(4)
        assert psutil.pid_exists(pid)
        driver.process.kill()
        began = time.monotonic()
        assert wait_for_none(before, 20) == {}
        note("all workers have ended after their suspended panel was killed [s]", time.monotonic() - began, 3.0)
    finally:
        driver.close()


PANEL = """
import sys
from penstock.distributed import ControlPanel
with ControlPanel("test", wire="zmq", file=sys.argv[1]) as panel:
    name, = panel.connect([sys.argv[2]], timeout=60)
    panel.request(name, "configure")
    panel.request(name, "start")
    while True:
        print(panel.stats()[name]["status"], flush=True)
        sys.stdin.readline()
"""


@contextmanager
def joined(make: Callable[[], Worker], name: str, file: Path) -> Iterator[tuple[Any, LaunchedProcess]]:
    """A program with a panel, and a worker that joins it and has begun to run."""
    command = [sys.executable, "-c", PANEL, str(file), name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as panel:
        assert panel.stdout is not None
        wait_until(file.exists, 60)
        worker = LaunchedProcess(make, Connection.read(file), name, has_joined=True)
        try:
            assert panel.stdout.readline() in ("READY\n", "RUNNING\n")
            yield panel, worker
        finally:
            worker.kill()
            panel.kill()


class Idle:
    def __init__(self, agent: Any) -> None:
        pass

    def step(self, batch: Any) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Going(Worker):
    def _poll(self) -> PollResult:
        time.sleep(0.01)
        return PollResult(1)


def short_lived() -> Worker:
    role.ORPHAN_SECONDS = 3.0
    return Going()


@pytest.mark.usefixtures("forked_workers")
def test_a_worker_that_has_joined_ends_when_its_killed_panel_was_silent_for_long(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The limit is 3 s in place of 30."""
    with joined(short_lived, "going/0", tmp_path / "trial.json") as (panel, worker):
        panel.kill()
        began = time.monotonic()
        assert worker.wait(40)
        assert 2 < time.monotonic() - began < 20  # it also tries to report its end
        assert worker.ending() == "exit code 1"
    assert "the name table was silent for 3 s: its control panel has ended" in capfd.readouterr().err


def patient(path: Path, panel_timeout: float, plan: Any) -> Worker:
    role.ORPHAN_SECONDS = 1.0
    return TrainerWorker(Training(Idle, checkpoint=path, panel_timeout=panel_timeout), plan)


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("forked_workers")
def test_a_trainer_that_is_not_its_panels_own_saves_itself_waits_and_ends_after_panel_timeout(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trainer.pt"
    make = partial(patient, path, 9.0, experiment(agent=RandomAgent).plan())
    with joined(make, "trainer/0", tmp_path / "trial.json") as (panel, trainer):
        panel.send_signal(signal.SIGSTOP)
        wait_until(path.exists, 20)
        time.sleep(3)
        panel.send_signal(signal.SIGCONT)
        time.sleep(1.5)
        panel.stdin.write("\n")
        panel.stdin.flush()
        assert panel.stdout.readline() == "RUNNING\n", "it has waited"
        path.unlink()
        panel.kill()
        began = time.monotonic()
        assert trainer.wait(40)
        assert time.monotonic() - began > 8
        assert trainer.ending() == "exit code 1"
        assert torch.load(path, weights_only=True)["version"] == 1
    errors = capfd.readouterr().err
    found = re.search(r"was silent for (\d+) s, and this worker waits for 9 s: its control panel has ended or", errors)
    assert found, errors
    assert int(found[1]) >= 9
