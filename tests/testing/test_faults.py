"""Every fault has its effect. test_faulty.py injects them into environments, agents and collectors."""

import faulthandler
import os
import pickle
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

from penstock import ConfigError
from penstock.testing import HOWS, Fault, InjectedFault, Trigger, UnpicklableFault, UnprintableFault

from ..support import until

CONTINUED = 7  # the exit code of a child that did not fail
BOUND = 20.0  # seconds that a wait may take before the test fails


@contextmanager
def forked(body: Callable[[], object]) -> Iterator[psutil.Process]:
    """A child that runs `body` and then exits with `CONTINUED`; killed and reaped at the end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads, from Python 3.12 on
        pid = os.fork()
    if not pid:
        try:
            body()
            os._exit(CONTINUED)
        finally:
            os._exit(99)
    child = psutil.Process(pid)
    try:
        yield child
    finally:
        with suppress(psutil.NoSuchProcess):  # it has ended, and its exit code is known
            child.kill()
        child.wait()


def exit_code_of(body: Callable[[], object]) -> int:
    """The exit code of a child that runs `body`, or minus its signal."""
    with forked(body) as child:
        return int(child.wait(BOUND))


@contextmanager
def beating(fault: Fault) -> Iterator[tuple[psutil.Process, Callable[[float], bool]]]:
    """A child with the fault, whose other thread goes on to write; and whether it writes within some seconds."""
    read, write = os.pipe()

    def beat() -> None:
        while True:
            os.write(write, b".")
            time.sleep(0.001)

    def body() -> None:
        threading.Thread(target=beat, daemon=True).start()
        fault.fire()

    def beats(seconds: float) -> bool:
        return bool(select.select([read], [], [], seconds)[0] and os.read(read, 2**16))

    try:
        with forked(body) as child:
            yield child, beats
    finally:
        os.close(read)
        os.close(write)


# ---- wrong arguments -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"how": "explode"}, "how must be one of raise, .*stop, got 'explode'"),
        ({"how": "raise", "at": 0}, "at must be an integer of at least 1, got 0"),
        ({"how": "raise", "at": True}, "got True"),
        ({"how": "raise", "at": 1.5}, "got 1.5"),
        ({"how": "delay", "seconds": float("inf")}, "seconds must be a finite number of at least 0, got inf"),
        ({"how": "delay", "seconds": -1}, "got -1"),
        ({"how": "raise", "marker": "/no/such/folder/marker"}, "folder that does not exist"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Fault(**arguments)


@pytest.mark.parametrize("how", HOWS)
def test_a_fault_and_its_trigger_pickle(how: str) -> None:
    trigger = cloudpickle.loads(cloudpickle.dumps(Trigger(Fault(how, at=3))))
    assert trigger.fault == Fault(how, at=3)


# ---- exceptions ----------------------------------------------------------------------------


def test_raise() -> None:
    with pytest.raises(InjectedFault, match="a fault was injected: raise at call 4") as caught:
        Fault("raise", at=4).fire()
    assert type(pickle.loads(pickle.dumps(caught.value))) is InjectedFault


def test_unpicklable() -> None:
    with pytest.raises(UnpicklableFault, match="a fault was injected") as caught:
        Fault("unpicklable").fire()
    for dumps in (pickle.dumps, cloudpickle.dumps):
        with pytest.raises(TypeError, match="cannot be pickled"):
            dumps(caught.value)


def test_unprintable() -> None:
    with pytest.raises(UnprintableFault) as caught:
        Fault("unprintable").fire()
    for words in (str, repr):
        with pytest.raises(RuntimeError, match="no text"):
            words(caught.value)
    assert len(caught.value.args[0]) > 900_000


def test_system_exit() -> None:
    with pytest.raises(SystemExit, match="a fault was injected"):
        Fault("system exit").fire()


# ---- exits ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "code"), [("kill", -signal.SIGKILL), ("exit", 0), ("segfault", -signal.SIGSEGV)])
def test_exits(how: str, code: int, tmp_path: Path) -> None:
    def body() -> None:
        faulthandler.disable()  # pytest's, which would print the crash
        os.chdir(tmp_path)
        Fault(how).fire()

    assert exit_code_of(body) == code
    assert not list(tmp_path.iterdir()), "a segfault leaves no core file"
    assert exit_code_of(lambda: Fault(how, spare_pid=os.getpid()).fire()) == CONTINUED


# ---- delays --------------------------------------------------------------------------------


def test_delay_continues_after_its_time() -> None:
    began = time.monotonic()
    Fault("delay", seconds=0.05).fire()
    assert time.monotonic() - began >= 0.05
    Fault("delay", seconds=0).fire()


def test_hang_does_not_stop_other_threads() -> None:
    with beating(Fault("hang")) as (child, beats):
        assert all(beats(BOUND) for _ in range(20))
        until(lambda: child.status() == psutil.STATUS_SLEEPING, seconds=BOUND)
        assert child.cpu_times().user < 1


def test_spin_uses_cpu_time() -> None:
    with beating(Fault("spin")) as (child, beats):
        until(lambda: child.cpu_times().user >= 0.05, seconds=BOUND)
        assert beats(BOUND), "other threads get the interpreter lock"


def test_hold_the_gil_stops_all_threads() -> None:
    with beating(Fault("hold the gil")) as (child, beats):
        until(lambda: not beats(0.3), seconds=BOUND)
        assert child.status() == psutil.STATUS_SLEEPING
        assert not beats(0.1)


def test_stop_lasts_until_sigcont() -> None:
    with forked(Fault("stop").fire) as child:
        assert os.waitpid(child.pid, os.WUNTRACED)[1] == (signal.SIGSTOP << 8) | 0x7F
        child.resume()
        assert child.wait(BOUND) == CONTINUED


# ---- when ----------------------------------------------------------------------------------


def fired(trigger: Trigger, n: int) -> list[int]:
    """At which of n calls it fired."""
    at = []
    for call in range(1, n + 1):
        try:
            trigger.call()
        except InjectedFault:
            at.append(call)
    return at


def test_a_trigger_fires_only_at_its_call() -> None:
    assert fired(Trigger(Fault("raise")), 5) == [1]
    assert fired(Trigger(Fault("raise", at=3)), 5) == [3]
    assert fired(Trigger(Fault("raise", at=9)), 5) == []


def test_only_one_process_creates_the_marker(tmp_path: Path) -> None:
    fault = Fault("raise", at=2, marker=str(tmp_path / "marker"))
    assert fired(Trigger(fault), 5) == [2]
    assert fired(Trigger(fault), 5) == []
    assert exit_code_of(Fault("exit", marker=str(tmp_path / "other")).fire) == 0
    assert exit_code_of(Fault("exit", marker=str(tmp_path / "other")).fire) == CONTINUED


def test_a_spared_process_does_not_create_the_marker(tmp_path: Path) -> None:
    fault = Fault("exit", marker=str(tmp_path / "marker"), spare_pid=os.getpid())
    fault.fire()
    assert not (tmp_path / "marker").exists()
    assert exit_code_of(fault.fire) == 0
