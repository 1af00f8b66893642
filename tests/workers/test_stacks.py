"""A process's Python stack, read from outside."""

import os
import subprocess
import sys
import textwrap

import pytest

from penstock.workers.handle import StackFile


def child(stacks: StackFile, body: str) -> "subprocess.Popen[str]":
    script = f"""
        import ctypes, os, signal, sys, threading, time
        from penstock.buffers.descriptors import InheritedFd
        from penstock.workers.handle import StackFile
        stacks = StackFile.__new__(StackFile)
        stacks.file = InheritedFd({stacks.file.fd})
        stacks.install()
        def deep_inside():
            print("there", flush=True)
            {body}
        deep_inside()
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        pass_fds=[stacks.file.fd],
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    ["while True: pass", "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(600)"],
    ids=["spins", "is stopped"],
)
def test_a_living_process_tells_where_it_is(body: str) -> None:
    """In other places, and after a crash, `process/test_faults.py` looks at the stacks of workers."""
    stacks = StackFile()
    process = child(stacks, body)
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    text = ""
    for _ in range(50):  # "there" came a moment before it was
        text = stacks.ask(process.pid)
        if "deep_inside" in text:
            break
    assert "in deep_inside" in text
    process.kill()
    process.wait()
    process.stdout.close()
    stacks.clear()
    assert stacks.read() == ""
    stacks.file.close()


def test_the_frames_below_the_loop_are_left_out() -> None:
    stacks = StackFile()
    os.write(
        stacks.file.fd,
        b'Current thread 0x02 (most recent call first):\n  File "env.py", line 3 in step\n'
        b'  File "/x/workers/process.py", line 5 in _run_commands\n  File "popen_fork.py", line 7 in _launch\n',
    )
    text = stacks.read()
    assert "step" in text
    assert text.endswith("in _run_commands")
    stacks.file.close()


@pytest.mark.parametrize("end", ['  File "/x/workers/process.py", line 5 in _run_commands\n', ""])
def test_a_process_may_stop_in_the_middle_of_a_line(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stacks, looks = StackFile(), 0
    text = f'Current thread 0x02 (most recent call first):\n  File "env.py", line 3 in step\n{end}'

    def look_again(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks in (5, 10):  # in between, it does not grow
            os.write(stacks.file.fd, text[:70].encode() if looks == 5 else text[70:].encode())

    monkeypatch.setattr("time.sleep", look_again)
    process = subprocess.Popen(["true"])
    process.wait()
    assert stacks.ask(process.pid) == text.strip()
    if end:
        assert looks == 10  # it waits no longer than it must
    stacks.file.close()


def test_one_that_is_gone_is_no_error() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    stacks = StackFile()
    assert stacks.ask(process.pid) == ""
    stacks.file.close()
