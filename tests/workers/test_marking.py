"""Programs that environments start end with the main process, in whatever session they are, and no others."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from penstock.workers.marking import MarkedProcess, marked

from ..children import exit_code_of_fork
from ..process.support import SLACK, gone_after
from ..support import until

# Prints the process ids of marked programs, then those of others; ends when its input ends.
START = """
    import os, signal, subprocess, threading
    from penstock.workers.marking import MarkedProcess, marked
    def program(**how):
        return subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, **how)
    with marked, marked:  # as where an environment makes a sampler
        games = [program(), program(start_new_session=True)]
        # A daemon: its parent has ended.
        games.append(subprocess.run(["setsid", "sh", "-c", "sleep 600 >/dev/null & echo $!"], stdout=subprocess.PIPE))
        if os.fork() == 0:  # a fork of the main process that an environment uses
            os.write(1, b"%d " % program().pid)
            os._exit(0)
        os.wait()
        others = [program(env={"PATH": os.environ["PATH"]})]
    others.append(program())
    games.append(MarkedProcess(["sleep", "600"], stdout=subprocess.DEVNULL))
    ids = [int(game.stdout) if isinstance(game, subprocess.CompletedProcess) else game.pid for game in games]
    print(*ids, *[other.pid for other in others], flush=True)
    os.read(0, 1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_marked_programs_end_with_the_main_process_and_others_stay(end: str) -> None:
    script = textwrap.dedent(START) + end
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, start_new_session=True) as owner:
        assert owner.stdout is not None
        programs = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        assert len(programs) == 7
        try:
            assert all(map(is_running, programs))
            owner.communicate(b"x", timeout=30)
            gone_after([program.pid for program in programs[:5]], time.monotonic(), 5 * SLACK)
            assert [is_running(program) for program in programs] == [False] * 5 + [True] * 2
        finally:
            for program in filter(is_running, programs):
                program.kill()


def is_running(program: psutil.Process) -> bool:
    return program.is_running() and program.status() != psutil.STATUS_ZOMBIE


def test_a_program_that_another_thread_starts_later_is_not_marked() -> None:
    with marked:
        (inside,) = (name for name, value in os.environ.items() if name.startswith("PENSTOCK_PROCESS_") and value)
    assert os.environ[inside] == ""


def test_the_shell_is_no_child_of_the_main_process() -> None:
    before = psutil.Process().children()
    with marked:
        assert psutil.Process().children() == before


def test_the_main_process_goes_on_without_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.workers import marking

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(marking.subprocess, "run", refuse)
    new = marking._Marking()
    with new:
        assert os.environ[new.variable()] == "1"
    os.close(new._pipe)


@pytest.mark.slow
def test_a_fork_has_programs_of_its_own() -> None:
    """What a fork of the main process starts does not end with the main process."""
    script = """
        import os
        from penstock.workers.marking import marked
        with marked:
            pass
        if child := os.fork():
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        with marked:
            names = [name for name, value in os.environ.items() if name.startswith("PENSTOCK_PROCESS_") and value]
        assert [name.split("_")[2] for name in names] == [str(os.getpid())]
        os._exit(0)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=30, check=False).returncode == 0


def test_a_program_that_hides_is_ended_and_a_fork_does_not_end_it(tmp_path: Path) -> None:
    """It clears its variables, and ignores SIGTERM."""
    ignores = tmp_path / "ignores"
    script = f"trap '' TERM; : > {ignores}; while :; do /bin/sleep 1; done"
    program = MarkedProcess(["env", "-i", "sh", "-c", script])
    until(ignores.exists, "the trap")
    assert exit_code_of_fork(program.end) == 0
    assert program.members() == [program.pid]
    assert program.end(0.05) == []
    assert program.exit_text() == "SIGKILL"
