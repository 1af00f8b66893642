"""The guardian: a shell that kills the workers' process groups when the main process is gone.

A worker watches the main process itself, from a thread. That thread cannot run while C code holds the interpreter lock.
The kernel's parent-death signal reaches the worker, but not the processes that its environments have started. The
guardian needs neither. It reads from a pipe whose other end the main process holds, so it notices the end of the main
process, whatever the reason.

The guardian waits half a second for the workers' watchdogs, which also release what their processes hold. Until then it
keeps the fork server alive, since its exit triggers the parent-death signal.
"""

from __future__ import annotations

import contextlib
import os
import subprocess

from penstock.workers.forks import abandon_in_forks
from penstock.workers.launch import Starter

# Lines "+pid" and "-pid" add and remove a process group; "done" ends the shell. Its argument is the process id of the
# fork server, if there is one.
_SCRIPT = """
groups=" "
while read -r line; do
    pid=${line#?}
    case $line in
        done) exit 0 ;;
        +*) groups="$groups-$pid " ;;
        -*) case $groups in *" -$pid "*) groups="${groups%% -$pid *} ${groups#* -$pid }" ;; esac ;;
    esac
done
for seconds in 0.05 0.05 0.1 0.1 0.2; do
    left=
    for group in $groups; do
        kill -s 0 -- "$group" || kill -s 0 -- "${group#-}" && left=some
    done
    [ "$left" ] || exit 0
    sleep "$seconds"
done
for group in $groups ${1:+"-$1"}; do
    # A worker that has only just started has no process group yet.
    kill -s KILL -- "$group" || kill -s KILL -- "${group#-}"
done
"""
_END_SECONDS = 1.0


class Guardian:
    """Watches processes and their groups. Without a shell only the workers' watchdogs work."""

    def __init__(self, starter: Starter | None = None) -> None:
        self._shell: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT, "guardian", *([str(starter.pid)] if starter else [])],
                pass_fds=[starter.alive_fd] if starter else [],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # Ctrl-C must not reach it
                bufsize=0,
            )
        abandon_in_forks(self)

    def watch(self, pid: int) -> None:
        """A worker has been started."""
        self._say(f"+{pid}")

    def forget(self, pid: int) -> None:
        """A worker and its group are gone: another process may get the number."""
        self._say(f"-{pid}")

    def close(self) -> None:
        """End the shell."""
        if self._shell is None:
            return
        shell, self._shell = self._shell, None
        assert shell.stdin is not None
        with contextlib.suppress(OSError):
            shell.stdin.write(b"done\n")
        with contextlib.suppress(OSError):
            shell.stdin.close()
        try:
            shell.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            shell.kill()
            shell.wait()

    def _say(self, line: str) -> None:
        if self._shell is not None and self._shell.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # the shell was killed; the watchdogs still work
                os.write(self._shell.stdin.fileno(), f"{line}\n".encode())

    def abandon(self) -> None:
        """In a fork of the main process: close the pipe, whose end only the main process may hold."""
        shell, self._shell = self._shell, None
        if shell is not None and shell.stdin is not None:
            shell.stdin.close()
            shell.returncode = 0  # it is not this process's child, so there is nothing to wait for
