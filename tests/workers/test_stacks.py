"""A process's Python stack, read from outside. `process/test_faults.py` looks at the stacks of workers."""

import os
import subprocess

import pytest

from penstock.workers.handle import StackFile


def test_the_frames_below_the_loop_are_left_out() -> None:
    stacks = StackFile()
    os.write(
        stacks.file.fd,
        b"Fatal Python error: Segmentation fault\n\n"
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


ANSWER = '{} thread 0x02 (most recent call first):\n  File "env.py", line {} in step\n{}'
LOOP = '  File "/x/workers/process.py", line 5 in _run_commands\n'


def test_an_earlier_answer_does_not_end_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may have asked: `penstock top --stacks` does."""
    stacks, looks = StackFile(), 0
    os.write(stacks.file.fd, ANSWER.format("Current", 3, LOOP).encode())

    def look_again(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 5:
            os.write(stacks.file.fd, ANSWER.format("Current", 4, LOOP).encode())

    monkeypatch.setattr("time.sleep", look_again)
    assert stacks.answer_to(lambda: None) == ANSWER.format("Current", 4, LOOP).strip()
    assert looks == 5
    stacks.file.close()


def test_what_was_asked_for_is_no_crash() -> None:
    """A worker that is killed later has no stack; if it crashes, the crash is found, however much is before it."""
    stacks = StackFile()
    for line in range(300):
        os.write(stacks.file.fd, ANSWER.format("Current", line, LOOP).encode())
    assert stacks.read() == ""
    crash = "Fatal Python error: Aborted\n\n" + ANSWER.format("Current", 7, LOOP)
    os.write(stacks.file.fd, crash.encode())
    assert stacks.read() == crash.strip().replace("\n\n", "\n")
    stacks.file.close()


def test_one_that_is_gone_is_no_error() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    stacks = StackFile()
    assert stacks.ask(process.pid) == ""
    stacks.file.close()
