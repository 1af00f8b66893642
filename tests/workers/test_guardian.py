"""The guardian kills what it watches when the main process's end of the pipe is gone, and nothing else."""

import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

from penstock.workers.guardian import Guardian

pytestmark = pytest.mark.slow


def sleeper() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["sleep", "600"], start_new_session=True)


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_the_end_of_its_owner_is_the_end_of_the_groups_it_watches(end: str) -> None:
    groups = [sleeper() for _ in range(3)]
    script = f"""
        import os, signal
        from penstock.workers.guardian import Guardian
        guardian = Guardian()
        for pid in {[group.pid for group in groups]}:
            guardian.watch(pid)
        guardian.forget({groups[1].pid})
        guardian.forget(99)  # never watched
        os.{"_exit(0)" if end == "exit" else "kill(os.getpid(), signal.SIGKILL)"}
    """
    try:
        subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=30, check=False)
        assert [groups[i].wait(5) for i in (0, 2)] == [-signal.SIGKILL] * 2
        assert groups[1].poll() is None
    finally:
        for group in groups:
            group.kill()
            group.wait()


def test_dismissed_it_kills_nobody() -> None:
    group = sleeper()
    guardian = Guardian()
    guardian.watch(group.pid)
    (shell,) = [
        p for p in psutil.Process().children() if p.pid != group.pid and "read -r line" in " ".join(p.cmdline())
    ]
    guardian.close()
    guardian.close()
    assert not shell.is_running()
    assert group.poll() is None
    group.kill()
    group.wait()


def test_a_fork_of_its_owner_does_not_keep_it_waiting() -> None:
    group = sleeper()
    script = f"""
        import os, time
        from penstock.workers.guardian import Guardian
        guardian = Guardian()
        guardian.watch({group.pid})
        if os.fork() == 0:
            print("child", flush=True)
            time.sleep(600)
        os.read(0, 1)
        os._exit(0)
    """
    owner = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert owner.stdout is not None
        assert owner.stdin is not None
        assert owner.stdout.readline() == b"child\n"
        owner.stdin.write(b"x")
        owner.stdin.close()
        owner.wait(10)
        assert group.wait(5) == -signal.SIGKILL, "although the fork lives on"
    finally:
        os.killpg(owner.pid, signal.SIGKILL)
        owner.stdout.close()
        group.kill()
        group.wait()


def test_its_own_death_is_no_error() -> None:
    guardian = Guardian()
    assert guardian._shell is not None
    guardian._shell.kill()
    guardian._shell.wait()
    guardian.watch(os.getpid())
    guardian.close()


def test_a_process_id_that_was_given_to_a_stranger_is_not_signalled() -> None:
    """The stranger has another start time than the worker."""
    stranger, worker = sleeper(), sleeper()
    script = f"""
        import os, signal
        from penstock.workers import guardian
        real = guardian.start_time_of
        guardian.start_time_of = lambda pid: "1" if pid == {stranger.pid} else real(pid)
        guardian = guardian.Guardian()
        guardian.watch({stranger.pid})
        guardian.watch({worker.pid})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    try:
        subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=30, check=False)
        assert worker.wait(5) == -signal.SIGKILL
        assert stranger.poll() is None
    finally:
        for group in (stranger, worker):
            group.kill()
            group.wait()


def test_what_is_left_of_a_group_is_killed_when_its_leader_is_gone() -> None:
    """A worker has exited and was reaped, but a process that its environment has started lives on."""
    leader = subprocess.Popen(
        ["/bin/sh", "-c", "sleep 600 > /dev/null & echo $!; read line"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert leader.stdout is not None
    child = psutil.Process(int(leader.stdout.readline()))
    script = f"""
        import os, signal
        from penstock.workers.guardian import Guardian
        Guardian().watch({leader.pid})
        os.write(1, b"x")
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdin=-1, stdout=-1) as owner:
        assert owner.stdout is not None
        assert owner.stdout.read(1) == b"x"
        leader.communicate(b"\n")
        assert child.is_running()
        owner.communicate(b"x")
    child.wait(5)
