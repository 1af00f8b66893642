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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("zmq", reason="the wire over sockets needs pyzmq")
pytest.importorskip("msgpack", reason="the wire over sockets needs msgpack")

from penstock.distributed import ControlPanel, PollResult, Status, TrainerWorker, Training, Worker, role

from ..starter import Program
from ..support import PROGRAMS
from .ray_support import our_processes, wait_for_none
from .support import need, note, wait_until
from .test_experiment import CountingTrainer, experiment, panel

__all__ = ["panel"]

pytestmark = pytest.mark.slow


def is_up(state: dict[str, Any]) -> bool:
    workers = [status for name, status in state.items() if "/" in name]
    return state["pid"] > 0 and set(workers) == {"RUNNING"}


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("starter")
@pytest.mark.parametrize(
    ("wire", "n_trainers", "n_policies"),
    [("zmq", 1, 1), pytest.param("ray", 1, 1, marks=pytest.mark.ray), pytest.param("ray", 2, 0, marks=pytest.mark.ray)],
)
def test_a_run_goes_on_after_its_panel_was_suspended_and_all_end_when_it_is_killed(
    wire: str, n_trainers: int, n_policies: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    need(wire, request)
    environ = dict(os.environ)
    if wire == "ray":
        environ["RAY_ADDRESS"] = request.getfixturevalue("ray_cluster").address
    before, path = our_processes(), tmp_path / "trainer.pt"
    command = [sys.executable, PROGRAMS / "suspended.py", wire, path, str(n_trainers), str(n_policies)]
    driver: Any
    if wire == "ray":
        driver = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    else:
        driver = Program(command[1:])
    states = list[dict[str, Any]]()

    def wait(condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The next state that the program prints for which this is true."""
        assert driver.stdout is not None
        for line in driver.stdout:
            if line.startswith("{"):
                states.append(json.loads(line))
                if condition(states[-1]):
                    return states[-1]
        raise AssertionError("the program has ended")

    try:
        state = wait(lambda s: is_up(s) and s["version"] >= 3)
        pid, n_lives = state["pid"], 0
        for _ in range(1 + (wire == "ray")):  # more often than max_restarts allows failures
            path.unlink(missing_ok=True)
            driver.send_signal(signal.SIGSTOP)
            time.sleep(6)  # longer than LOST_SECONDS
            assert path.exists(), "the trainer has saved itself"
            saved = torch.load(path, weights_only=True)["version"]
            driver.send_signal(signal.SIGCONT)
            n_lives += wire == "ray"
            # 30 steps take more than 1.5 s. By then, the panel would have restarted a worker that it took for lost.
            later = wait(lambda s: s["version"] > saved)["version"] + 30  # noqa: B023
            state = wait(
                lambda s: is_up(s) and s["version"] > later and s["restarts"]["actor/1"] == n_lives  # noqa: B023
            )
        others = [name for name in state["restarts"] if not name.startswith("trainer/")]
        assert state["restarts"] == dict.fromkeys(state["restarts"], 0) | dict.fromkeys(others, n_lives)
        versions = [each["version"] for each in states]
        assert versions == sorted(versions)
        assert {each["pid"] for each in states if each["version"] >= 3} <= {0, pid}
        assert not {each["trainer/0"] for each in states} & {"LOST", "ERROR"}
        driver.send_signal(signal.SIGSTOP)
        time.sleep(3)
        assert psutil.pid_exists(pid)
        driver.kill()
        began = time.monotonic()
        assert wait_for_none(before, 20) == {}
        note("all workers have ended after their suspended panel was killed [s]", time.monotonic() - began, 3.0)
    finally:
        driver.kill()
        driver.communicate()


class Going(Worker):
    def _poll(self) -> PollResult:
        return PollResult()


@pytest.mark.timeout(120)
def test_a_worker_of_another_machine_ends_when_its_panel_is_silent_and_a_trainer_saves_itself_and_waits_for_long(
    panel: ControlPanel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The limits are 2 s in place of 30, and 6 s. Such a worker does not end with the process of the panel."""
    monkeypatch.setattr(role, "ORPHAN_SECONDS", 2.0)
    path, ended = tmp_path / "trainer.pt", dict[str, Status]()
    training, plan = Training(CountingTrainer, checkpoint=path, panel_timeout=6.0), experiment(None).plan()
    workers: dict[str, Worker] = {"going/0": Going(), "trainer/0": TrainerWorker(training, plan)}

    def join(name: str) -> None:
        ended[name] = workers[name].run(panel.connection, name, ends_with_panel=False)

    going, trainer = threads = [threading.Thread(target=join, args=(name,)) for name in workers]
    for thread in threads:
        thread.start()
    panel.connect([*workers])
    for command in ("configure", "start"):
        assert all(response.is_ok for response in panel.group_request(command))
    workers["trainer/0"].names.timeout = 0.5  # so long it waits at its end to delete each name
    inboxes = panel.wire.inboxes
    table = inboxes.pop("names")  # it goes on to live, and nobody reaches it
    going.join(20)
    wait_until(path.exists, 20)
    inboxes["names"] = table
    wait_until(lambda: panel.stats(["trainer/0"])["trainer/0"]["status"] == "RUNNING")
    assert ended == {"going/0": Status.ERROR}
    path.unlink()
    del inboxes["names"]
    began = time.monotonic()
    trainer.join(40)
    assert time.monotonic() - began > 5
    assert ended["trainer/0"] is Status.ERROR
    assert torch.load(path, weights_only=True)["version"] == 1
    inboxes["names"] = table
    assert re.search(r"was silent for \d+ s: its control panel has ended", caplog.text)
    assert re.search(r"was silent for \d+ s, and this worker waits for 6 s: its control panel has", caplog.text)
