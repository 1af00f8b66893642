"""The guardian: a shell that kills the workers' process groups when the main process is gone.

Each worker has a thread that watches the main process. That thread cannot run while C code holds the interpreter lock.
The kernel's parent-death signal reaches the worker, but not the processes that its environments have started. The
guardian depends on neither of these two. It reads from a pipe whose other end the main process holds, so it notices the
end of the main process, whatever the reason.

At first the guardian waits half a second: the watchdogs of the workers also release lock files. During this time it
keeps the fork server alive, because the exit of the fork server triggers the parent-death signal.
"""

from __future__ import annotations

import contextlib
import os
import subprocess

from penstock.workers.forks import abandon_in_forks

# Lines "+pid" and "-pid" add and remove a process group; "done" ends the shell. The argument of the script is the
# process id of the fork server, if there is one.
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
    """Watches processes and their groups. If no shell can be started, only the watchdogs of the workers watch."""

    def __init__(self, fork_server: tuple[int, int] | None = None) -> None:
        """`fork_server`: its process id, and the descriptor that keeps it alive."""
        self._shell: subprocess.Popen[bytes] | None = None
        argument, kept = ([str(fork_server[0])], fork_server[1:]) if fork_server else ([], ())
        with contextlib.suppress(OSError):
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT, "guardian", *argument],
                pass_fds=kept,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # Ctrl-C must not reach it
                bufsize=0,
            )
        abandon_in_forks(self)

    def watch(self, pid: int) -> None:
        """Note a worker that has been started."""
        self._write_line(f"+{pid}")

    def forget(self, pid: int) -> None:
        """Forget a worker whose group is gone: the system may give its process id to another process."""
        self._write_line(f"-{pid}")

    def close(self) -> None:
        """End the shell."""
        shell, self._shell = self._shell, None
        if shell is not None:
            try:
                shell.communicate(b"done\n", _END_SECONDS)  # ignores a shell that was killed
            except subprocess.TimeoutExpired:
                shell.kill()
                shell.wait()

    def _write_line(self, line: str) -> None:
        if self._shell is not None and self._shell.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # the shell was killed; the watchdogs still work
                os.write(self._shell.stdin.fileno(), f"{line}\n".encode())

    def abandon(self) -> None:
        """In a fork of the main process: close the pipe. The guardian must see its end when the main process ends."""
        shell, self._shell = self._shell, None
        if shell is not None and shell.stdin is not None:
            shell.stdin.close()
            shell.returncode = 0  # it is not this process's child, so there is nothing to wait for
