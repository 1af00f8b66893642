"""The control panel and its workers, as threads and as processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from penstock import ClusterError, ConfigError, NameTableError, NoReplyError, PeerLostError, RequestError
from penstock.__main__ import main
from penstock.distributed import ControlPanel, PollResult, SampleProducer, Status, Worker, role
from penstock.distributed import names as names_module
from penstock.distributed.keys import Connection
from penstock.distributed.messages import BadMessageError
from penstock.distributed.names import NameClient, NameTable, pack_table, unpack_table

from ..process.support import is_running
from ..scale import FULL, scaled
from ..starter import Program
from ..support import PROGRAMS
from .ray_support import our_processes, wait_for_none
from .support import MAKES, need, needs_zmq, note, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("starter")]

PROCESSES = [make for make in MAKES if make != "local"]


class Counter(Worker):
    """Counts its polls, and fails or sleeps if its configuration says so."""

    def _configure(self, step: int = 1, fail_at: int | None = None, sleep: float = 0.0) -> None:
        if step < 0:
            raise ValueError("step must not be negative")
        self.step, self.fail_at, self.sleep, self.count = step, fail_at, sleep, 0
        self.register_handler("add", self.add)
        self.register_handler("count", lambda: self.count, urgent=True)
        self.register_handler("unplain", object)

    def _reconfigure(self, step: int) -> None:
        self.step = step

    def add(self, n: int) -> int:
        if n < 0:
            raise ValueError("n must not be negative")
        self.count += n
        return self.count

    def _poll(self) -> PollResult:
        if self.fail_at is not None and self.count >= self.fail_at:
            raise RuntimeError("the counter is full")
        if self.sleep:
            time.sleep(self.sleep)
        self.count += self.step
        return PollResult(self.step, 0)

    def _stats(self) -> dict[str, float]:
        return {"count": getattr(self, "count", 0), "status": 5.0}  # which hides no status in any test


@pytest.fixture
def new_interpreters() -> None:
    """The processes of this test are new interpreters, as those of users are."""


@pytest.fixture(params=MAKES)
def panel(request: pytest.FixtureRequest) -> Iterator[ControlPanel]:
    """Daily, its processes are forks, except in tests that ask for `new_interpreters`."""
    need(request.param, request)
    if request.param == "zmq" and not FULL and "new_interpreters" not in request.fixturenames:
        request.getfixturevalue("forked_workers")
    with ControlPanel("test", wire=request.param) as made:
        yield made


@pytest.fixture
def local() -> Iterator[ControlPanel]:
    with ControlPanel("test") as made:
        yield made


def started(panel: ControlPanel, count: int = 1, worker: type[Worker] = Counter, **config: Any) -> list[str]:
    names = panel.launch(worker, count)
    panel.connect(timeout=60)
    panel.group_request("configure", names=names, kwargs=config)
    assert all(response.is_ok for response in panel.group_request("start", names=names))
    return names


@pytest.mark.usefixtures("new_interpreters")
def test_a_worker_from_start_to_exit(panel: ControlPanel) -> None:
    assert panel.launch(Counter) == ["counter/0"]
    assert panel.connect(timeout=60) == ["counter/0"]
    assert panel.request("counter/0", "ping") == "pong"
    assert panel.get_worker_status("counter/0") is Status.READY
    assert panel.request("counter/0", "configure", step=2) == "READY"
    assert panel.request("counter/0", "start") == "RUNNING"
    wait_until(lambda: panel.request("counter/0", "count") > 4)
    assert panel.request("counter/0", "pause") in ("PAUSING", "PAUSED")
    wait_until(lambda: panel.get_worker_status("counter/0") is Status.PAUSED)
    assert panel.request("counter/0", "add", n=1) % 2 == 1
    assert panel.request("counter/0", "reconfigure", step=1) == "PAUSED"
    count = panel.request("counter/0", "count")
    wait_until(lambda: panel.stats()["counter/0"].items() >= {"status": "PAUSED", "count": count}.items())
    assert panel.request("counter/0", "start") == "RUNNING"
    wait_until(lambda: panel.stats()["counter/0"]["status"] == "RUNNING")
    assert "in _loop" in panel.request("counter/0", "stacks")
    assert panel.request("counter/0", "exit") == "COMPLETED"
    wait_until(lambda: panel.get_worker_status("counter/0") is Status.COMPLETED)
    assert "counter/0" in panel.table()


def test_errors_of_a_worker_reach_the_panel(panel: ControlPanel) -> None:
    started(panel)
    with pytest.raises(RequestError, match="there is no command 'nonsense'; the commands are add, configure"):
        panel.request("counter/0", "nonsense")
    with pytest.raises(RequestError, match="add raised ValueError: n must not be negative"):
        panel.request("counter/0", "add", n=-1)
    with pytest.raises(RequestError, match="add raised TypeError"):
        panel.request("counter/0", "add", m=1)
    with pytest.raises(RequestError, match="unplain raised BadMessageError: a value of type object cannot cross"):
        panel.request("counter/0", "unplain")
    with pytest.raises(RequestError, match="configured already"):
        panel.request("counter/0", "configure")
    with pytest.raises(RequestError, match="the worker is RUNNING, not READY or PAUSED"):
        panel.request("counter/0", "start")
    assert panel.get_worker_status("counter/0") is Status.RUNNING


def test_a_worker_that_could_not_be_configured_can_be_configured_again(local: ControlPanel) -> None:
    local.launch(Counter)
    local.connect()
    with pytest.raises(RequestError, match="send configure first"):
        local.request("counter/0", "start")
    with pytest.raises(RequestError, match="step must not be negative"):
        local.request("counter/0", "configure", step=-1)
    assert local.request("counter/0", "configure", step=1) == "READY"


def test_a_poll_that_raises_ends_the_worker_with_its_error(
    panel: ControlPanel, caplog: pytest.LogCaptureFixture
) -> None:
    started(panel, fail_at=3)
    wait_until(lambda: panel.get_worker_status("counter/0") is Status.ERROR)
    wait_until(lambda: panel.stats()["counter/0"].get("text") == "RuntimeError: the counter is full")


def test_urgent_requests_are_answered_while_a_poll_sleeps(panel: ControlPanel, request: pytest.FixtureRequest) -> None:
    # One poll must outlast all the requests. The test waits for a thread, but kills a process.
    is_thread = request.node.callspec.params["panel"] == "local"
    started(panel, sleep=scaled(30.0, 3.0 if is_thread else 30.0))
    wait_until(lambda: "time.sleep(self.sleep)" in panel.request("counter/0", "stacks"))
    answers, seconds = {}, []
    for command in ("ping", "status", "stats", "count", "pause", "exit"):
        began = time.monotonic()
        answers[command] = panel.request("counter/0", command)
        seconds.append(time.monotonic() - began)
    note("slowest answer while a poll sleeps [s]", max(seconds), 0.5)
    assert (answers["ping"], answers["status"], answers["pause"]) == ("pong", "RUNNING", "PAUSING")
    wait_until(lambda: panel.get_worker_status("counter/0") is Status.COMPLETED)
    # A process is killed when the panel closes. A thread ends with its poll.
    wait_until(lambda: all(thread.name != "counter/0" for thread in threading.enumerate()), scaled(60, 20))


def test_a_large_group(local: ControlPanel) -> None:
    n = scaled(200, 50)
    names = local.launch(Counter, n)
    hung = local.launch(Counter, 2, name="hung")
    local.connect(timeout=60)
    local.group_request("configure", names=hung, kwargs={"sleep": 1.5})
    local.group_request("start", names=hung)
    configured = local.group_request("configure", regex="counter/.*", kwargs=[{"step": i} for i in range(n)])
    assert [response.worker_name for response in configured] == names, "counter/10 comes after counter/9"
    assert [local.request(name, "add", n=0) for name in names[9:12]] == [0, 0, 0]
    assert local.worker_names == [*names, *hung]
    for known in (local.pulse(), local.stats(), local.autoconnect()):
        assert list(known) == [*names, *hung]
    shown = [line.split()[0] for line in local.table().splitlines()[1:]]
    assert shown == [*names, *hung]
    assert all(response.is_ok for response in configured)
    adds = local.group_request("add", names=names, kwargs=[{"n": i} for i in range(n)], timeout=20)
    assert [response.result for response in adds] == list(range(n))
    tens = local.group_request("ping", regex=r"counter/\d")
    assert [response.worker_name for response in tens] == [f"counter/{i}" for i in range(10)]
    wait_until(lambda: all("time.sleep" in local.request(name, "stacks") for name in hung))
    began = time.monotonic()
    late = local.group_request("add", names=[*hung, "counter/0"], kwargs={"n": 1}, timeout=0.4)
    note("two hung workers cost one deadline of 0.4 s [s]", time.monotonic() - began, 0.75)
    assert [response.timed_out for response in late] == [True, True, False]
    assert set(local.pulse(names).values()) == {Status.READY}


def test_requests_to_nobody(local: ControlPanel) -> None:
    with pytest.raises(PeerLostError, match="there is no worker 'nobody'"):
        local.request("nobody", "ping")
    (response,) = local.group_request("ping", names=["nobody"])
    assert response.lost
    assert local.get_worker_status("nobody") is Status.UNKNOWN
    with pytest.raises(NoReplyError, match=r"could not be reached within 0\.2 s: nobody"):
        local.connect(["nobody"], timeout=0.2)


def test_a_name_is_used_once_until_its_worker_was_interrupted(local: ControlPanel) -> None:
    local.launch(Counter)
    with pytest.raises(NameTableError, match="there is a worker 'counter/0' already"):
        local.launch(Counter)
    local.connect()
    assert local.request("counter/0", "interrupt") == "INTERRUPTED"
    wait_until(lambda: local.get_worker_status("counter/0") is Status.INTERRUPTED)
    wait_until(lambda: local.has_ended("counter/0"))
    local.launch(Counter)
    local.connect()
    assert local.get_worker_status("counter/0") is Status.READY


@pytest.mark.parametrize("make", PROCESSES)
def test_a_killed_worker_is_lost_within_a_second_and_the_others_answer(
    make: str, request: pytest.FixtureRequest
) -> None:
    need(make, request)
    with ControlPanel("test", wire=make) as panel:
        names = started(panel, 2, sleep=30.0)
        future = panel.async_request(names[0], "add", n=1)
        os.kill(panel.pid(names[0]), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(PeerLostError, match="killed by SIGKILL" if make == "zmq" else "actor"):
            future.result()
        assert panel.get_worker_status(names[0]) is Status.LOST
        note("a launched worker is LOST after [s]", time.monotonic() - began, 1.0)
        if make == "zmq":
            text = "was killed by SIGKILL (out of memory?)"
            wait_until(lambda: panel.stats()[names[0]] == {"status": "LOST", "text": text})
        lost, found = panel.group_request("ping")
        assert (lost.lost, found.result) == (True, "pong")


@pytest.mark.parametrize("make", MAKES)
def test_a_worker_that_cannot_start_is_reported_at_once(make: str, request: pytest.FixtureRequest) -> None:
    def fail() -> Worker:
        raise RuntimeError("no such worker")

    need(make, request)
    why = {"local": "its thread has ended: RuntimeError: no such worker", "zmq": "exited with code 1"}.get(
        make, "RuntimeError: no such worker"
    )
    with ControlPanel("test", wire=make) as panel:
        panel.launch(fail, name="failing")
        with pytest.raises(ClusterError, match=rf"has ended before it could be reached \({why}\)"):
            panel.connect(timeout=60)


@pytest.mark.ray
def test_a_second_panel_joins_a_trial_on_ray(ray_cluster: Any) -> None:
    with ControlPanel("test", wire="ray") as panel:
        started(panel, step=0)
        with ControlPanel.join(panel.connection) as second:
            assert second.connect(["counter/0"]) == ["counter/0"]
            assert second.request("counter/0", "add", n=2) == 2
            with pytest.raises(ConfigError, match="only the panel that began the trial launches workers"):
                second.launch(Counter)
        assert panel.request("counter/0", "count") == 2


@pytest.mark.ray
def test_a_worker_on_ray_has_the_resources_that_it_asks_for(ray_cluster: Any) -> None:
    with ControlPanel("test", wire="ray") as panel:
        panel.launch(Counter, resources={"CPU": 1000})
        with pytest.raises(NoReplyError, match="counter/0"):
            panel.connect(timeout=0.5)


@pytest.mark.parametrize(("make", "limit"), [("zmq", 2.0), pytest.param("ray", 2.0, marks=pytest.mark.ray)])
def test_launched_workers_end_with_a_panel_that_is_killed(
    make: str, limit: float, request: pytest.FixtureRequest
) -> None:
    need(make, request)
    environ = dict(os.environ)
    if make == "ray":
        environ["RAY_ADDRESS"] = request.getfixturevalue("ray_cluster").address
    before = our_processes()
    command = [sys.executable, PROGRAMS / "panel.py", make]
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in next(line for line in process.stdout if line[0].isdigit()).split()]
        assert len(pids) == 2
        workers = [psutil.Process(pid) for pid in pids]
        assert make == "ray" or len(our_processes().keys() - before) >= 6, "the panel, 2 workers, 3 of the first one"
        process.kill()
        began = time.monotonic()
        wait_until(lambda: not any(is_running(worker.pid) for worker in workers), timeout=20)
        assert wait_for_none(before, 20) == {}
        note("workers, and what they have started, have ended after their panel [s]", time.monotonic() - began, limit)


@needs_zmq
@pytest.mark.usefixtures("starter")
def test_a_worker_and_a_panel_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(PROGRAMS / "panel.py", tmp_path / "sleepers.py")
    file = tmp_path / "trial.json"
    with ControlPanel("test", wire="zmq", file=file) as panel:
        command = [sys.executable, "-m", "penstock", "worker", "sleepers:Sleeper/3", "--join", file]
        with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
            assert panel.connect(["sleeper/3"], timeout=60) == ["sleeper/3"]
            assert main(["top", "--join", str(file), "--once"]) == 0
            shown, errors = capsys.readouterr()
            assert errors == ""
            assert "sleeper/3               READY" in shown
            assert main(["top", "--join", str(file), "--once", "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["workers"]["sleeper/3"]["status"] == "READY"
            panel.request("sleeper/3", "exit")
            assert process.wait(20) == 0
            assert process.stderr is not None
            assert process.stderr.read() == "sleepers:Sleeper/3: COMPLETED\n"
        command = [PROGRAMS / "command.py", "worker", "sleepers:Sleeper", "--join", file]
        with Program(command, cwd=tmp_path) as process:
            panel.connect(["sleeper/0"], timeout=60)
            process.kill()
            process.wait()
            began = time.monotonic()
            wait_until(lambda: panel.get_worker_status("sleeper/0") is Status.LOST)
            wait_until(lambda: panel.names.find("workers") == {})
            note("a worker that was not launched here is LOST after [s]", time.monotonic() - began, 5.0)
        for wrong in ("json:dumps", "sleepers", "penstock.distributed:Worker/x"):
            assert main(["worker", wrong, "--join", str(file)]) == 2
            assert f"{wrong} is no subclass of penstock.distributed.Worker: give MODULE" in capsys.readouterr().err
        file.chmod(0o644)
        assert main(["top", "--join", str(file)]) == 2
        assert f"readable for you alone: chmod 600 {file}" in capsys.readouterr().err


@needs_zmq
def test_the_name_table_may_end_and_come_again() -> None:
    keys = Connection.make("test/names")
    first, mine, other = keys.wire(), keys.wire(), keys.wire()
    host = NameTable(lambda: first.clock).serve(first)
    port = int(first.address.rpartition(":")[2])
    names, others = NameClient(mine, first.address), NameClient(other, first.address)
    inbox = mine.open("inbox")
    names.announce("workers/mine", inbox)
    names.add("status/mine", "READY", lasting=True)
    peer = others.reach(others.get("workers/mine"))
    threading.Thread(target=lambda: [call.reply("here") for _ in range(2) if (call := inbox.receive(30))]).start()
    assert peer.ask("", 10).result() == "here"
    host.close()
    first.close()
    assert peer.ask("", 10).result() == "here"  # without the table
    second = keys.wire(port)
    host = NameTable(lambda: second.clock).serve(second)
    try:
        wait_until(lambda: sorted(others.find()) == ["status/mine", "workers/mine"])
    finally:
        mine.close()
        wait_until(lambda: sorted(others.find()) == ["status/mine"])  # its lease has run out
        host.close()
        other.close()
        second.close()


def test_waiting_for_a_name(local: ControlPanel) -> None:
    with contextlib.closing(local.connection.wire()) as wire:
        names = NameClient(wire, local.connection.address)
        with pytest.raises(NoReplyError, match=r"the name .late. was not added within 0\.1 s"):
            names.wait("late", 0.1)
        timer = threading.Timer(0.1, lambda: local.names.add("late", 5))
        timer.start()
        assert names.wait("late", 10) == 5
        timer.join()
        with pytest.raises(NameTableError, match="taken"):
            names.add("late", 6)


def test_a_worker_that_was_suspended_does_not_take_the_name_table_for_lost(local: ControlPanel) -> None:
    (name,) = started(local, sleep=0.05)
    tick, stood = local.wire._tick, threading.Event()

    def stand_still() -> None:
        if not stood.is_set():
            time.sleep(6)
            stood.set()
        tick()

    local.wire._tick = stand_still  # type: ignore[method-assign]
    stood.wait(20)
    assert local.names.silence <= 2.5
    assert local.stats()[name]["status"] in ("READY", "RUNNING")


def test_strange_syncs_do_not_end_the_name_table(local: ControlPanel) -> None:
    good: dict[str, Any] = {"owner": "x", "since": ["", -1], "roots": ["a"], "entries": {}}

    def beat(**strange: object) -> Any:
        kwargs = {**good, **strange}
        if isinstance(kwargs["entries"], dict):
            kwargs["entries"] = pack_table(kwargs["entries"])
        found = peer.ask({"command": "beat", "kwargs": kwargs}, 10).result()
        return {**found, "found": None if found.get("found") is None else unpack_table(found["found"])}

    with contextlib.closing(local.connection.wire()) as wire:
        peer = wire.reach(local.connection.address, "names")
        good["n_ended"] = beat()["n_ended"]
        assert beat()["found"] == {}
        for strange in (
            {"owner": [5], "entries": {"a": [b"", False]}},
            {"since": 5},
            {"since": [beat()["since"][0], "five"]},
            {"roots": [[]]},
            {"roots": 5},
            {"entries": {"a": 5}},
            {"entries": {5: 5}},
            {"entries": 5},
            {"entries": np.zeros(0, np.uint8)},
            {"entries": np.full(9, 0xDD, np.uint8)},
            {"entries": pack_table([5])},  # type: ignore[arg-type]
            {"more": 5},
        ):
            with pytest.raises((RequestError, BadMessageError)):
                beat(**strange)
        with pytest.raises(RequestError):
            peer.ask({"command": "expire", "kwargs": {}}, 10).result()
        assert beat(entries={"": [b"", False], "b": ["text", False], "c": [b"x" * 70_000, True]})["found"] == {}
        local.names.add("a", 1)
        assert local.names.find("a") == {"a": 1}


def test_a_worker_ends_although_an_urgent_handler_hangs(local: ControlPanel) -> None:
    begun, released = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        released.wait(60)

    class Hanging(Worker):
        def _configure(self) -> None:
            self.register_handler("hang", hang, urgent=True)

        def _poll(self) -> PollResult:
            if begun.is_set():
                raise RuntimeError("the end")
            return PollResult()

    started(local, worker=Hanging)
    local.async_request("hanging/0", "hang")
    try:
        wait_until(lambda: local.has_ended("hanging/0"))  # its status says only that it has failed
    finally:
        released.set()


def test_a_closed_panel_says_so(panel: ControlPanel) -> None:
    started(panel)
    panel.close()
    for call in (panel.pulse, panel.stats, panel.table, panel.connect, lambda: panel.request("counter/0", "ping")):
        with pytest.raises(ClusterError, match="this control panel was closed: make another one"):
            call()
    with pytest.raises(ClusterError, match="this control panel was closed: make another one"):
        panel.launch(Counter, name="another")


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (object(), "a value of type object cannot cross a wire"),
        ("x" * 100_000, "the value of the name 'figures/worse/0' has 100,"),
    ],
    ids=["object", "large"],
)
def test_a_worker_whose_figures_cannot_be_sent_is_not_lost(local: ControlPanel, value: Any, error: str) -> None:
    class Worse(Counter):
        def _stats(self) -> Any:
            return {"count": self.count, **({"loss": value} if self.count > 5 else {})}

    started(local, worker=Worse, sleep=0.02)
    wait_until(lambda: "text" in local.stats()["worse/0"])
    facts = local.stats()["worse/0"]
    assert facts["status"] == "RUNNING"
    assert f"stats raised BadMessageError: {error}" in facts["text"]
    local.request("worse/0", "pause")
    wait_until(lambda: local.pulse() == {"worse/0": Status.PAUSED})
    wait_until(lambda: local.stats()["worse/0"]["status"] == "PAUSED")


def test_who_sees_that_a_worker_is_paused_finds_all_that_it_has_done(panel: ControlPanel) -> None:
    started(panel, sleep=0.01)
    for _ in range(10):
        time.sleep(0.05)
        panel.request("counter/0", "pause")
        wait_until(lambda: panel.get_worker_status("counter/0") is Status.PAUSED)
        facts, count = panel.stats(["counter/0"])["counter/0"], panel.request("counter/0", "count")
        assert (facts["status"], facts["count"], facts["samples"]) == ("PAUSED", count, count)
        panel.request("counter/0", "start")


@needs_zmq
@pytest.mark.usefixtures("forked_workers")
def test_a_request_to_a_suspended_worker_waits_and_is_run_once() -> None:
    with ControlPanel("test", wire="zmq") as panel:
        started(panel, step=0)
        worker = psutil.Process(panel.pid("counter/0"))
        worker.suspend()
        future = panel.async_request("counter/0", "add", timeout=60, n=1)
        time.sleep(9)  # longer than heartbeats and its lease
        assert panel.get_worker_status("counter/0") is Status.UNRESPONSIVE
        assert not future.done()
        worker.resume()
        assert future.result(30) == 1
        assert panel.request("counter/0", "count") == 1
        wait_until(lambda: panel.get_worker_status("counter/0") is Status.RUNNING)


def test_no_worker_ends_although_the_name_table_answers_seldom(
    local: ControlPanel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with very many workers: at most one beat a second in place of 150, and all times are shorter."""
    assert 3 * names_module._LONGEST_SECONDS <= role.ORPHAN_SECONDS
    monkeypatch.setattr(names_module, "_MOST_BEATS", 1)
    monkeypatch.setattr(names_module, "_LONGEST_SECONDS", 1.0)
    monkeypatch.setattr(role, "ORPHAN_SECONDS", 3.0)
    names = started(local, 5, sleep=0.05)
    time.sleep(8)
    assert local.pulse() == dict.fromkeys(names, Status.RUNNING)
    assert all(facts["age"] < 10 for facts in local.stats().values())


@needs_zmq
@pytest.mark.usefixtures("forked_workers")
def test_many_workers_have_the_descriptors_that_they_need_or_are_refused() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ControlPanel("test", wire="zmq") as panel:
        few = psutil.Process().num_fds() + 5
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
            names = panel.launch(Counter, 3)
            panel.connect(timeout=60)
            assert panel.pulse(timeout=10) == dict.fromkeys(names, Status.READY)
            with pytest.raises(ConfigError, match=r"more workers need \d+ file descriptors .* whose limit is"):
                panel.launch(Counter, hard, first=3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@needs_zmq
def test_a_worker_that_joins_finds_descriptors_in_the_panel_or_says_that_there_are_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = [0, 0]

    def set_limits(kind: int, values: Any) -> None:
        limits[:] = values

    with ControlPanel("test", wire="zmq") as panel:
        limits[:] = [few := psutil.Process().num_fds() + 45, few + 500]
        monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(limits))
        monkeypatch.setattr(resource, "setrlimit", set_limits)
        first = threading.Thread(target=Counter().run, args=(panel.connection, "counter/0"))
        first.start()
        panel.connect(["counter/0"])
        assert limits == [pytest.approx(few + 30, abs=30), few + 500], "the soft limit has grown"
        limits[1] = few
        assert Counter().run(panel.connection, "counter/1") is Status.ERROR
        panel.request("counter/0", "exit")
        first.join()
    assert re.search(r"with worker counter/1, which wants to join, its panel needs \d+ file descriptors", caplog.text)


@needs_zmq
@pytest.mark.usefixtures("forked_workers")
def test_long_errors_and_many_figures_do_not_end_the_panel() -> None:
    class Fails(Counter):
        def _poll(self) -> PollResult:
            raise ValueError("these values are wrong: " + "0.123456, " * 8000)

        def _stats(self) -> dict[str, float]:
            return {f"loss_of_part_{i:04}": i + 0.5 for i in range(1500)}

    with ControlPanel("test", wire="zmq") as panel:
        names = panel.launch(Fails, 4)
        panel.connect(timeout=60)
        panel.group_request("configure")
        wait_until(lambda: all("loss_of_part_1499" in facts for facts in panel.stats().values()))
        with ControlPanel.join(panel.connection) as other:  # it gets all of them at once: 147 KB
            assert all("loss_of_part_1499" in facts for facts in other.stats().values())
        panel.group_request("start")
        wait_until(lambda: all(facts["status"] == "ERROR" for facts in panel.stats().values()))
        for facts in panel.stats(names).values():
            assert facts["text"].startswith("ValueError: these values are wrong: 0.123456")
            assert "characters: see its log)" in facts["text"]
            assert len(facts["text"]) < 5000
        assert panel.pulse() == dict.fromkeys(names, Status.ERROR)


@needs_zmq
def test_a_client_may_have_many_names() -> None:
    with ControlPanel("test", wire="zmq") as panel, ControlPanel.join(panel.connection) as other:
        for i in range(5000):
            other.names.write(f"many/{i:04}/{'x' * 60}", i)
        wait_until(lambda: len(panel.names.find("many")) == 5000)
        panel.names.clear("many")
        wait_until(lambda: len(panel.names.find("many")) == 5000)  # the client adds again what is missing


@needs_zmq
def test_an_error_in_a_thread_of_the_wire_fails_its_call_only(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(call: Any) -> None:
        raise KeyError("no such thing")

    with ControlPanel("test", wire="zmq") as panel:
        panel.wire.open("refusing", refuse)
        panel.wire.on_tick.append(lambda now: 1 / 0)
        with contextlib.closing(panel.connection.wire()) as wire:
            peer = wire.reach(panel.connection.address, "refusing")
            with pytest.raises(RequestError, match="KeyError: 'no such thing'"):
                peer.ask({}, 10).result()
        wait_until(lambda: "division by zero" in caplog.text)
        panel.wire.on_tick.pop()
        panel.names.add("a", 1)
        assert panel.names.find("a") == {"a": 1}


def test_arguments_of_a_request_are_checked(local: ControlPanel) -> None:
    names = local.launch(Counter, 2)
    local.connect()
    wrong: list[Any] = ["a", 0, -1.0, float("nan"), None]
    for timeout in wrong:
        with pytest.raises(ConfigError, match="timeout must be a positive number of seconds"):
            local.request(names[0], "ping", timeout=timeout)
    with pytest.raises(ConfigError, match="1 kwargs for 2 workers: counter/0, counter/1"):
        local.group_request("ping", kwargs=[{}])
    for wrong in (5, "ab", [{}, 5], {1, 2}):
        with pytest.raises(ConfigError, match="kwargs must be a dict, or a list with one dict for each worker"):
            local.group_request("ping", kwargs=wrong)  # type: ignore[arg-type]
    for wrong, error in (("(", "is no regular expression: missing"), ("*", "is no regular expression"), (3, "must be")):
        with pytest.raises(ConfigError, match=f"regex.*{error}"):
            local.group_request("ping", regex=wrong)  # type: ignore[arg-type]
    for call in (local.pulse, local.stats, local.connect, lambda names: local.group_request("ping", names=names)):
        with pytest.raises(ConfigError, match=r"names must be a list of names, got 'a/0': write \['a/0'\]"):
            call("a/0")
        for wrong in (5, [5]):
            with pytest.raises(ConfigError, match=r"names must be a list of names, got 5|a name must be text, got 5"):
                call(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"name": 3}, "name must be a name such as 'worker', got 3"),
        ({"name": ""}, "name must be a name such as 'worker', got ''"),
        ({"name": "a//b"}, "name must be a name such as"),
        ({"first": -1}, "first must be an integer of at least 0, got -1"),
        ({"first": "0"}, "first must be an integer"),
        ({"count": 1.0}, "count must be an integer"),
        ({"resources": 3}, "resources must be a dict such as"),
    ],
)
def test_arguments_of_launch_are_checked(local: ControlPanel, option: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        local.launch(Counter, **option)
    assert local.worker_names == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"file": 3}, "file must be the path of a file, got 3"),
        ({"file": ""}, "file must be the path of a file, got ''"),
        ({"host": 3}, "host must be an address of this machine, got 3"),
        ({"experiment": 3}, "experiment must be a name, got 3"),
        ({"experiment": ""}, "experiment must be a name, got ''"),
        ({"trial": None}, "trial must be a name, got None"),
    ],
)
def test_arguments_of_a_panel_are_checked(arguments: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        ControlPanel(**{"experiment": "test", "wire": "zmq", **arguments})


def test_names_with_strange_values_concern_nobody(local: ControlPanel) -> None:
    """Somebody has written them with the key, or by mistake: a worker, a figure, a status, a consumer of a stream."""
    (name,) = started(local)
    with ControlPanel.join(local.connection) as other, contextlib.closing(local.connection.wire()) as wire:
        names = NameClient(wire, local.connection.address)
        producer = SampleProducer(wire, names, "train")
        names.announce("streams/train/b", wire.open("streams/train/b"))
        arrays = {"status": "RUNNING", "a": np.zeros(3)}  # no worker sends figures like these
        values: list[Any] = [
            5,
            None,
            [],
            ["a", "b"],
            [1, 2, 3],
            {"x": 1},
            {"status": 5},
            {"status": []},
            arrays,
            "text",
            [5, 5],
            ["READY", 5],
            ["?", "?"],
        ]
        for root in ("workers", "figures", "status", "streams/train"):
            for i, value in enumerate(values):
                other.names.add(f"{root}/strange/{i}", value)
            local.names._own.add(f"{root}/strange/none", b"\xc1", "stranger")  # type: ignore[union-attr]
        other.names.add(f"{root}/{name}/below", 5)
        wait_until(lambda: len(other.names.keys("status")) == len(values) + 1)
        assert producer.put("piece", 10)
        for panel in (local, other):
            assert panel.autoconnect() == [name]
            assert panel.connect([name]) == [name]
            assert panel.pulse() == {name: Status.RUNNING}
            assert panel.get_worker_status("strange/11") is Status.UNKNOWN
            assert panel.stats()[name]["status"] == "RUNNING"
            assert name in panel.table()
            assert panel.names.find("status/strange/none") == panel.names.followed("status/strange/none") == {}
            with pytest.raises(NameTableError, match="there is no name 'status/strange/none'"):
                panel.names.get("status/strange/none")


def test_a_worker_with_a_strange_status_is_unresponsive(local: ControlPanel) -> None:
    with contextlib.closing(local.connection.wire()) as wire:
        names = NameClient(wire, local.connection.address)
        answers: list[Any] = ["?", None, np.zeros(3), ["READY"]]
        inbox = wire.open("strange", lambda call: call.reply(answers[0]))
        names.announce("workers/strange", inbox)
        while answers:
            assert local.pulse() == {"strange": Status.UNRESPONSIVE}
            answers.pop(0) if len(answers) > 1 else answers.clear()


def test_mistakes_of_a_worker_are_named(local: ControlPanel, caplog: pytest.LogCaptureFixture) -> None:
    class Mistaken(Counter):
        def _configure(self, word: Any = "mine", handler: Any = print) -> None:  # type: ignore[override]
            self.register_handler(word, handler)

        def _poll(self) -> Any:
            return 5

    for wrong in (int, Counter(), 5):
        with pytest.raises(ConfigError, match="launch needs a subclass of Worker"):
            local.launch(wrong)  # type: ignore[arg-type]
    local.launch(Mistaken)
    local.connect()
    with pytest.raises(RequestError, match="every worker has the command 'status'"):
        local.request("mistaken/0", "configure", word="status")
    with pytest.raises(RequestError, match="a handler is the name of a command and a function, got 5"):
        local.request("mistaken/0", "configure", word=5)
    with pytest.raises(RequestError, match="a function, got 'mine' and 5"):
        local.request("mistaken/0", "configure", handler=5)
    local.request("mistaken/0", "configure")
    local.request("mistaken/0", "start")
    text = "ConfigError: _poll must return a PollResult or None, got 5"
    wait_until(lambda: local.stats()["mistaken/0"] == {"status": "ERROR", "text": text})
    assert "mistaken/0 has failed" in caplog.text


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("data_\udcff"), r"ValueError: data_\udcff"),
        (Unprintable(), "Unprintable: (its message could not be formatted: RuntimeError)"),
        (SystemExit("data_\udcff"), r"SystemExit: data_\udcff"),
    ],
    ids=["surrogate", "unprintable", "exit"],
)
def test_an_error_whose_text_cannot_be_sent_or_made_ends_no_server_and_shows(
    local: ControlPanel, caplog: pytest.LogCaptureFixture, error: BaseException, text: str
) -> None:
    caplog.set_level("CRITICAL")  # pytest-xdist cannot send a log with this text
    closed = list[bool]()

    class Fails(Counter):
        def _configure(self) -> None:  # type: ignore[override]
            super()._configure(fail_at=5)
            for urgent in (True, False):
                self.register_handler(f"fail {urgent}", self.fail, urgent=urgent)

        def fail(self) -> None:
            raise error

        _poll = fail  # type: ignore[assignment]

        def _close(self) -> None:
            closed.append(True)

    local.launch(Fails)
    local.connect()
    local.request("fails/0", "configure")
    for urgent in (True, False) if isinstance(error, Exception) else (True,):
        with pytest.raises(RequestError) as caught:
            local.request("fails/0", f"fail {urgent}")
        assert text in str(caught.value)
    assert local.request("fails/0", "status") == "READY"
    local.request("fails/0", "start")
    wait_until(lambda: local.stats()["fails/0"]["status"] == "ERROR")
    assert local.stats()["fails/0"]["text"].endswith(text)
    assert closed == [True]


@needs_zmq
def test_a_panel_that_has_ended_is_named() -> None:
    keys = Connection.make("test/names")
    with contextlib.closing(keys.wire()) as ended:
        address = ended.address
    error = rf"no control panel has answered at {address} for 0\.2 s"
    with contextlib.closing(keys.wire()) as mine, pytest.raises(NoReplyError, match=error):
        names = NameClient(mine, address)
        names.timeout = 0.2
        names.find()


@needs_zmq
@pytest.mark.parametrize(
    ("wire", "option", "error"),
    [
        ("carrier pigeon", {}, "wire must be one of local, zmq, ray"),
        ("local", {"file": "trial.json"}, 'host, port and file are for wire="zmq"'),
        ("zmq", {"port": 99_999}, "port must be at most 65,535, got 99999"),
        ("zmq", {"port": -1}, "port must be an integer of at least 0, got -1"),
        ("zmq", {"file": "/no such folder/trial.json"}, "the connection file /no such folder/trial.json cannot be"),
    ],
)
def test_a_wrong_wire_port_or_file_is_refused(wire: Any, option: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        ControlPanel("test", wire=wire, **option)
