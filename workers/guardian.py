"""The guardian: a shell that kills the workers' process groups when the main process is gone.

Each worker has a thread that watches the main process. That thread cannot run while C code holds the interpreter lock.
The kernel's parent-death signal reaches the worker, but not the processes that its environments have started. The
guardian depends on neither of these two. It reads from a pipe whose other end the main process holds, so it notices the
end of the main process, whatever the reason.

It kills the workers at once. If the main process is gone half a second later, it also kills the fork server, and
removes its socket and the folder of the socket. Until then it keeps the fork server alive, because the exit of the fork
server triggers the parent-death signal.
"""

from __future__ import annotations

import contextlib
import os
import subprocess

from penstock.workers.forks import abandon_in_forks
from penstock.workers.handle import start_time_of
from penstock.workers.launch import ForkServer
from penstock.workers.marking import path_alone

# Lines "+pid:start" and "-pid:start" add and remove a worker; "done" ends the shell. `start` is the start time of the
# worker: if the process has another one, the system has given the process id to a stranger, who must not be killed.
# The system gives no id away that is still the id of a group. So if no process has the id, a group with this id is
# almost surely the worker's.
# The arguments of the script are "pid:start" of the main process and of the fork server, and the path of the socket of
# the fork server. The last two are empty without a fork server.
# "exists pid:start" is true if this process exists. It sets $state to the state of the process (field 3 of its stat);
# field 22 is the start time. `set` puts "$1" before the fields from 3 on, so these are $2 and ${21}.
# "end pid:start" kills the group of a worker, or a process without a group.
_SCRIPT = """
exists() {
    read -r stat < "/proc/${1%:*}/stat" || return
    set -- "$1" ${stat##*) }
    state=$2
    [ "${21}" = "${1#*:}" ]
}
end() {
    pid=${1%:*}
    if exists "$1"; then
        # A worker that has only just started has no process group yet.
        kill -s KILL -- "-$pid" || kill -s KILL -- "$pid"
    elif ! [ -e "/proc/$pid" ]; then
        kill -s KILL -- "-$pid"
    fi
}
workers=" "
while read -r line; do
    worker=${line#?}
    case $line in
        done) exit 0 ;;
        +*) workers="$workers$worker " ;;
        -*) case $workers in *" $worker "*) workers="${workers%% $worker *} ${workers#* $worker }" ;; esac ;;
    esac
done
for worker in $workers; do
    end "$worker"
done
# The pipe is also closed if an exception ends `close`. Then the main process needs its fork server. A process that ends
# closes its pipes shortly before it seems to have ended.
sleep 0.5
exists "$1" && [ "$state" != Z ] && exit
# While it imports modules, the fork server does not notice the end of the main process.
[ "$2" ] && end "$2"
if [ "$3" ]; then
    rm -f -- "$3"
    rmdir -- "${3%/*}"
fi
"""
_END_SECONDS = 1.0


def _identity(pid: int) -> str:
    return f"{pid}:{start_time_of(pid)}"


class Guardian:
    """Watches processes and their groups. If no shell can be started, only the watchdogs of the workers watch."""

    def __init__(self, fork_server: ForkServer | None = None, *, is_needed: bool = True) -> None:
        self._shell: subprocess.Popen[bytes] | None = None
        self._watched: dict[int, str] = {}  # the line that the shell has got, by process id
        abandon_in_forks(self)
        if not is_needed:  # a supervisor does its work
            return
        arguments = [_identity(fork_server.pid), fork_server.address] if fork_server else ["", ""]
        with contextlib.suppress(OSError):
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT, "guardian", _identity(os.getpid()), *arguments],
                pass_fds=[fork_server.alive_fd] if fork_server else [],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=path_alone(),
                start_new_session=True,  # Ctrl-C must not reach it
                bufsize=0,
            )

    def watch(self, pid: int) -> None:
        """Note a worker that has been started."""
        self._watched[pid] = _identity(pid)
        self._write_line(f"+{self._watched[pid]}")

    def forget(self, pid: int) -> None:
        """Forget a worker whose group is gone."""
        self._write_line(f"-{self._watched.pop(pid, pid)}")

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
