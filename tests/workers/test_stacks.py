"""A process's Python stack, read from outside. `process/test_faults.py` looks at the stacks of workers."""

import os
import subprocess

import pytest

from penstock.workers.handle import StackFile


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
    stacks.clear()
    assert stacks.read() == ""
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
