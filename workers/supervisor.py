"""The supervisor: one process that starts, reaps and ends workers, is their parent, and notices the end of the main
process.

Each worker has a control socket: a socket pair between the main process and the supervisor. Through it the supervisor
sends the process id with a pidfd, and later the exit code. The main process sends signals. When the main process shuts
its end, the supervisor kills the worker's group. So a start that is interrupted anywhere undoes itself.

- If the main process ends, the supervisor kills all groups, and then everything that it has inherited from them: it is
  a subreaper, so orphans become its children, those in sessions of their own too.
- If the supervisor ends, the kernel ends the workers. The main process reads the end of the control sockets.

Where the system has neither subreapers nor PDEATHSIG (system.py), each worker has a pipe that ends with the supervisor.
There, the supervisor finds by an environment variable what its workers have started.

Only the supervisor can free the process id of a worker, so an id that it signals never belongs to a stranger.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import importlib
import json
import logging
import multiprocessing
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from multiprocessing import resource_tracker, spawn
from typing import Any, NoReturn

from penstock import system
from penstock.buffers import descriptors
from penstock.buffers.descriptors import InheritedFd, anonymous_file
from penstock.workers.affinity import limit_threads
from penstock.workers.marking import marked, worker_environ

end_group_with_parent: Callable[[int], bool] | None
try:
    from penstock.buffers._native import end_group_with_parent
except ImportError:  # not compiled
    end_group_with_parent = None

#: The exit code of a worker whose supervisor has ended. No process can have it.
SUPERVISOR_ENDED = 256

_CHECK_SECONDS = 0.25
_END_SECONDS = 1.0
_LONGEST = 1e6  # seconds; the system has a limit too
# Ctrl-C must not reach the supervisor. But it stays in the session of the main process: the scheduler of Linux divides
# CPUs among sessions (autogroup), and a process that yields its CPU would not yield it to a process of another session.
_OWN_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": os.setpgrp}
_MOST_FILES = 65_536  # of the supervisor, two or three for each worker
_POLL_MS = 500  # how often a supervisor without a pidfd looks whether its parent has ended
# It blocks these and does not ignore them: one that is sent to a worker in its first moment must not be lost.
_BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# BLAS makes its threads when it is imported, and forks have none of them.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
# A new interpreter ends with its parent from its first moment, and imports nothing from the current folder.
_BOOT = f"""import json, os, sys
path, parent, name, arguments = json.loads(sys.argv[1])
{system.END_WITH_PARENT}
if os.getppid() != parent: os._exit(1)
sys.path[:] = path
from penstock.workers import supervisor
getattr(supervisor, name)(*arguments)"""


#: Supervisors that were dropped without `close`: when they have ended, somebody must collect their exit codes.
_dropped: list[int] = []


def _boot_command(name: str, arguments: Sequence[Any], parent: int) -> list[str]:
    path = [entry for entry in sys.path if isinstance(entry, str) and entry]
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [os.fsdecode(spawn.get_executable()), *flags, "-c", _BOOT, json.dumps([path, parent, name, arguments])]


# ---- in the main process -----------------------------------------------------------------------


class Supervisor:
    """The supervisor as the main process sees it.

    A new interpreter that imports `preload`, or a fork of this process: its workers see this process's memory as it is
    now. A fork of the main process owns no supervisor.
    """

    # At the end of the interpreter, modules may have been cleared before `__del__` runs.
    _getpid = staticmethod(os.getpid)

    def __init__(self, preload: Collection[str] = (), *, is_fork: bool = False) -> None:
        self._owner, self.has_started, self.pid = os.getpid(), False, 0
        self.preload, self.is_fork = frozenset(preload), is_fork
        _dropped[:] = [pid for pid in _dropped if not _has_exited(pid)]
        self.control, given = system.connection()
        self.control.setblocking(False)
        with given:  # it may be number 1 if standard output is closed: what is printed must not go there
            theirs = InheritedFd(fcntl.fcntl(given, fcntl.F_DUPFD_CLOEXEC, 3))
        self.pid = self._fork(theirs.fd) if is_fork else self._execute(theirs.fd, preload)
        theirs.close()

    def _execute(self, control_fd: int, preload: Collection[str]) -> int:
        process = subprocess.Popen(
            _boot_command("serve", [control_fd, self._owner, list(preload)], self._owner),
            pass_fds=[control_fd],
            stdin=subprocess.DEVNULL,
            cwd="/",
            env={**os.environ, **_ONE_THREAD, **system.pool_variables(self._owner, marked.variable)},
            **_OWN_GROUP,
        )
        process.returncode = 0  # `close` waits for it
        return process.pid

    def _fork(self, control_fd: int) -> int:
        _flush_standard_streams()  # otherwise the fork writes what is in the buffers again
        variables = system.pool_variables(self._owner, marked.variable)
        if (pid := os.fork()) == 0:
            try:
                os.environ.update(variables)
                self.control.close()
                os.setpgid(0, 0)
                serve(control_fd, self._owner)
            finally:
                os._exit(1)  # whatever a signal handler raises: this must not return to the caller
        return pid

    def add(self, names: Collection[str]) -> None:
        """Let it import further modules, before it starts the next worker."""
        for name in names:
            with contextlib.suppress(OSError):  # it has ended, or does not answer: the next start says so
                system.send(self.control, f"import {name}".encode())
        self.preload |= frozenset(names)

    @property
    def is_own(self) -> bool:
        """Whether this process has started it, and not the process that this one is a fork of."""
        return os.getpid() == self._owner

    def has_ended(self, within: float = 0.0) -> bool:
        """Whether it takes no more requests, or will not in so many seconds. It sends nothing through `control`."""
        return self.control.fileno() < 0 or _is_readable(self.control, within)

    def resume(self) -> None:
        """Let it continue if a signal has stopped it."""
        if self.is_own and not self.has_ended():
            with contextlib.suppress(ProcessLookupError):  # it has ended just now, and something else has waited for it
                os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End it, and with it all its workers; wait for its exit. Takes about a second at most. It may be repeated."""
        if self.is_own and self.control.fileno() >= 0:
            with contextlib.suppress(OSError):
                self.control.shutdown(socket.SHUT_WR)  # also where a fork holds a copy
            if not self.has_ended(_END_SECONDS):
                os.kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored, or something else has waited for it
                os.waitpid(self.pid, 0)
        self.control.close()

    def __del__(self) -> None:
        if hasattr(self, "control") and self.control.fileno() >= 0:
            is_own = self._getpid() == self._owner
            if is_own and self.pid:
                _dropped.append(self.pid)
            _hang_up(self.control, is_own)


class SupervisedProcess:
    """A worker as the main process sees it, with the names of multiprocessing's Process. Dropping it kills it.

    It calls `function(*arguments)`. Exit code: what this returns, or 0. Its id is that of its group too.
    """

    _getpid = staticmethod(os.getpid)  # as above
    pid = 0  # until it runs
    exitcode: int | None = None
    _control_socket: socket.socket | None = None
    _pidfd: InheritedFd | None = None

    def __init__(self, name: str, function: Callable[..., Any], *arguments: object, spawns: bool = False) -> None:
        self._name, self._function, self._spawns = name, partial(function, *arguments), spawns
        self._owner, self._lock = os.getpid(), threading.RLock()

    def start(self, supervisor: Supervisor, check: Callable[[float], None] = lambda _: None) -> None:
        """Start it. Meanwhile this calls `check` a few times a second, which may raise, with the seconds so far.

        Raises `EOFError` if the supervisor has ended, and `OSError` if the system allows no more processes or
        descriptors. Any exception leaves no process.
        """
        try:
            with contextlib.ExitStack() as sent:  # macOS may drop a descriptor that is closed before it arrives
                self._request(supervisor, sent)
                began = time.monotonic()
                while (answer := self._receive(_CHECK_SECONDS)) is None:
                    if supervisor.has_ended():
                        raise EOFError(f"the supervisor (pid {supervisor.pid}) has ended")
                    check(time.monotonic() - began)
            kind, value, fds = answer
            if kind == "refused":
                raise OSError(value, os.strerror(value))
            if kind != "started":
                raise EOFError(f"the supervisor (pid {supervisor.pid}) has ended")
            self._pidfd = InheritedFd(fds[0]) if fds else None
            self.pid, self._function = value, partial(int)
        except BaseException:
            self.close()
            raise

    def _request(self, supervisor: Supervisor, sent: contextlib.ExitStack) -> None:
        data, fds = descriptors.dumps(self._function)
        # A fork has the main process's resource tracker, if this has one.
        with _standard_fds_taken():
            trackers: Any = [] if supervisor.is_fork else [resource_tracker.getfd()]
        self._control_socket, theirs = system.connection()
        receiver, sender = socket.socketpair()
        for end in (theirs, receiver, sender):
            sent.enter_context(end)
        payload = sent.enter_context(contextlib.closing(anonymous_file("penstock-start")))
        with open(payload.fd, "wb", closefd=False) as file:
            pickle.dump((_surroundings(self._name), len(trackers)), file)
            file.write(data)
        fds = [payload.fd, *trackers, *fds]
        descriptors.send(sender, fds)
        request = f"{'spawn' if self._spawns else 'fork'} {len(fds)}".encode()
        try:
            system.send(supervisor.control, request, [theirs.fileno(), receiver.fileno()])
        except (BrokenPipeError, ConnectionError) as error:
            raise EOFError(f"the supervisor (pid {supervisor.pid}) has ended") from error

    def _receive(self, seconds: float | None) -> tuple[str, int, list[int]] | None:
        """The next message of the supervisor; None if none has come."""
        assert self._control_socket is not None
        if not _is_readable(self._control_socket, seconds):
            return None
        message, fds = system.receive(self._control_socket, 2)
        kind, value = message.split() if message else (b"ended", SUPERVISOR_ENDED)
        return kind.decode(), int(value), fds

    @property
    def sentinel(self) -> int:
        """Readable when the process has ended. A pidfd notices this even if the supervisor is stopped."""
        assert self._control_socket is not None
        return self._control_socket.fileno() if self._pidfd is None else self._pidfd.fd

    def signal(self, number: int) -> None:
        """Signal the process and its group. A fork of the main process does not."""
        if self._control_socket is None or self.exitcode is not None or self._getpid() != self._owner:
            return
        try:
            if self._pidfd is None:
                raise OSError(errno.ENOSYS, "no pidfd")
            system.signal_group(self._pidfd.fd, number)
        except ProcessLookupError:
            pass  # the whole group is gone
        except OSError:  # an older kernel
            with contextlib.suppress(OSError):  # if the supervisor is gone, the kernel has ended the worker
                system.send(self._control_socket, bytes([number]), flags=socket.MSG_DONTWAIT)

    def kill(self) -> None:
        """Kill the process and its group."""
        self.signal(signal.SIGKILL)

    def join(self, seconds: float | None = None) -> int | None:
        """Wait until `exitcode` is known, and return it. None: the supervisor has not answered, or this is a fork of
        the main process, which needs the answer. Any thread may wait."""
        control_socket = self._control_socket if self._getpid() == self._owner else None
        if self.exitcode is None and control_socket is not None and _is_readable(control_socket, seconds):
            with self._lock:
                answer = None if self.exitcode is not None else self._receive(0)
                if answer is not None and self.exitcode is None:  # no signal handler has taken it meanwhile
                    if answer[1] == SUPERVISOR_ENDED:
                        self.kill()  # what is left of the group
                    self.exitcode = answer[1]
        return self.exitcode

    def close(self) -> None:
        """Release it. If it runs, the supervisor kills it."""
        control_socket, self._control_socket = self._control_socket, None
        if control_socket is not None:
            _hang_up(control_socket, self._getpid() == self._owner)
        if self._pidfd is not None:
            self._pidfd.close()

    __del__ = close


@contextlib.contextmanager
def _standard_fds_taken() -> Iterator[None]:
    """Inside, no new descriptor has a number below 3, where standard input, output or error is closed. A resource
    tracker that had its pipe there would end at once, or keep its own pipe open and never end."""
    fds = [os.open(os.devnull, os.O_RDWR)]
    try:
        while fds[-1] < 3:
            fds.append(os.open(os.devnull, os.O_RDWR))
        yield
    finally:
        for fd in fds:
            os.close(fd)


def import_all(names: Collection[str]) -> None:
    """Import what workers will use, so that they share it."""
    for name in names:
        with contextlib.suppress(ImportError):  # the workers will say what is missing
            importlib.import_module(name)


def _has_exited(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # it is the parent's, or something else has waited for it
        return True


def _hang_up(connection: socket.socket, is_own: bool) -> None:
    try:
        if is_own:
            connection.shutdown(2)  # in both directions, also where a fork of this process holds a copy
    except OSError:
        pass  # the supervisor has ended
    connection.close()


def _surroundings(name: str) -> dict[str, Any]:
    """What a worker gets from this process. The supervisor has older values, from when it was started."""
    return {
        "name": name,
        "folder": os.getcwd(),
        "path": sys.path,
        "argv": sys.argv,
        "environ": worker_environ(),
        "umask": system.umask(),
        "log_levels": _log_levels(),
        "file_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "cpus": system.cpu_mask(),
        "start_method": multiprocessing.get_start_method(allow_none=True),
        "authkey": bytes(multiprocessing.current_process().authkey),
    }


def _log_levels() -> tuple[int, dict[str, int]]:
    """What `logging.disable` has set, and the levels of the loggers that have one. The root logger is ""."""
    loggers = list(logging.root.manager.loggerDict.items())  # other threads may add some
    levels = {name: level for name, logger in loggers if (level := getattr(logger, "level", logging.NOTSET))}
    return logging.root.manager.disable, {"": logging.root.level, **levels}


# ---- in the supervisor -------------------------------------------------------------------------


def serve(control_fd: int, main: int, preload: Sequence[str] | None = None) -> NoReturn:
    """The supervisor, from its start to its exit. A fork of the main process has no `preload`."""
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, _BLOCKED)
        system.allow_files(_MOST_FILES)  # the main process may raise its limit later
        system.name_process(b"penstock-start")  # if all processes called python are killed, it ends what they leave
        while (fd := os.open(os.devnull, os.O_RDWR)) < 3:
            os.set_inheritable(fd, True)  # no descriptor of a worker may take the place of standard output
        os.close(fd)
        import_all(preload or ())
        if preload is not None:
            limit_threads(1)  # workers inherit what it has found out, which takes a millisecond
        gc.freeze()  # a garbage collection in a worker would copy the memory that all share
        if preload is not None:
            # It was for the time of the imports. If a thread has started this process, it counts the thread's end.
            system.end_with_parent(False)
        service = _Service(socket.socket(fileno=control_fd), main, is_fork=preload is None)
        service.run()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


class _Service:
    """Starts workers as the main process requests, until the main process ends or closes `control`."""

    def __init__(self, control: socket.socket, main: int, *, is_fork: bool) -> None:
        self._control, self._main, self._is_fork = control, main, is_fork
        self._control_sockets: dict[int, socket.socket] = {}  # by process id
        self._pids: dict[int, int] = {}  # by descriptor of the control socket
        self._life_lines: dict[int, InheritedFd] = {}  # by process id
        self._spare: list[int] = []  # room for the two descriptors of a request, which would be lost without it
        self._wake, wake_writer = system.nonblocking_pipe()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        self._own_fds = [control.fileno(), self._wake, wake_writer]  # workers must not have these
        self._poll = select.poll()
        for fd in (control.fileno(), self._wake):
            self._poll.register(fd, select.POLLIN)
        self._main_fd, self._poll_ms = -1, _POLL_MS
        if (main_fd := system.watch_end(main)) is not None:
            self._main_fd, self._poll_ms = main_fd, -1
            self._own_fds.append(self._main_fd)
            self._poll.register(self._main_fd, select.POLLIN)
        system.adopt_orphans()

    def run(self) -> None:
        """Serve, and at last end the workers; when the main process has ended, everything."""
        while os.getppid() == self._main:
            ready = {fd for fd, _ in self._poll.poll(self._poll_ms)}
            if self._main_fd in ready:
                break
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
                self._reap()
            for fd in ready & self._pids.keys():
                self._obey(fd)
            if self._control.fileno() in ready and not self._take():
                break
        for pid in self._control_sockets:
            _signal_group(pid, signal.SIGKILL)
        if not self._is_fork or os.getppid() != self._main:  # the orphans of one pool may serve others: see marking.py
            system.kill_children(self._main)

    def _take(self) -> bool:
        """Do what the main process requests. False: nothing more will come."""
        while self._spare:
            os.close(self._spare.pop())
        message, fds = system.receive(self._control, 2)
        if message.startswith(b"import "):
            import_all([message.decode().split()[1]])
            gc.freeze()
        elif len(fds) == 2:  # always, as long as nobody lowers the limit of this process
            self._start(message, fds)
        with contextlib.suppress(OSError):  # no room is left
            while len(self._spare) < 2:
                self._spare.append(os.dup(self._wake))
        return bool(message)

    def _obey(self, fd: int) -> None:
        pid = self._pids[fd]
        message, _ = system.receive(self._control_sockets[pid], 2)
        _signal_group(pid, message[0] if message else signal.SIGKILL)
        if not message:  # nothing more will come
            self._poll.unregister(fd)
            del self._pids[fd]

    def _reap(self) -> None:
        """Kill what is left of the groups of workers that have ended, and send their exit codes."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                control_socket = self._control_sockets.pop(found[0], None)
                if control_socket is None:  # it was an orphan
                    continue
                # No other process gets the id of a group that has members.
                _signal_group(found[0], signal.SIGKILL)
                if self._pids.pop(control_socket.fileno(), None) is not None:
                    self._poll.unregister(control_socket.fileno())
                _answer(control_socket, "ended", os.waitstatus_to_exitcode(found[1]))
                control_socket.close()
                if (life_line := self._life_lines.pop(found[0], None)) is not None:
                    life_line.close()

    def _start(self, message: bytes, fds: list[int]) -> None:
        how, n_fds = message.split()
        control_socket, receiver = (socket.socket(fileno=fd) for fd in fds)
        parcel, life_line = list[InheritedFd](), list[InheritedFd]()
        try:
            if _is_readable(control_socket, 0):
                raise OSError(errno.ECANCELED, "the main process does not want it any more")
            # Here, and not in the worker: once this process has answered, no descriptor is on its way.
            parcel += map(InheritedFd, descriptors.receive(receiver, int(n_fds)))
            receiver.close()
            life_line += map(InheritedFd, system.life_line())
            me, pid = os.getpid(), os.fork()
            if pid == 0:
                others = [
                    *self._own_fds,
                    *(other.fileno() for other in self._control_sockets.values()),
                    *(other.fd for other in (*self._life_lines.values(), *life_line[1:])),
                    control_socket.detach(),
                ]
                reader = life_line[0].fd if life_line else -1
                _become_worker(how == b"spawn", [fd.fd for fd in parcel], reader, others, me)
        except OSError as error:
            _answer(control_socket, "refused", error.errno or errno.EAGAIN)
            control_socket.close()
            for fd in life_line:
                fd.close()
            return
        finally:
            for fd in parcel:
                fd.close()
            receiver.close()
        if life_line:
            life_line[0].close()
            self._life_lines[pid] = life_line[1]
        with contextlib.suppress(OSError):  # it may execute another program already, and has done this itself
            os.setpgid(pid, pid)
        self._control_sockets[pid], self._pids[control_socket.fileno()] = control_socket, pid
        self._poll.register(control_socket, select.POLLIN)
        if (pidfd := system.watch_end(pid)) is None:
            _answer(control_socket, "started", pid)
        else:
            _answer(control_socket, "started", pid, [pidfd])
            os.close(pidfd)


def _flush_standard_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it may be closed, broken or None
            stream.flush()


def _is_readable(connection: socket.socket, seconds: float | None) -> bool:
    poll = select.poll()  # `select` fails for descriptors above 1023
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(None if seconds is None else min(seconds, _LONGEST) * 1000))


def _answer(control_socket: socket.socket, kind: str, value: int, fds: Sequence[int] = ()) -> None:
    with contextlib.suppress(OSError):  # the main process has closed it
        system.send(control_socket, f"{kind} {value}".encode(), fds, socket.MSG_DONTWAIT)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


# ---- in a worker -------------------------------------------------------------------------------


def _become_worker(spawns: bool, fds: list[int], life_line: int, others: Sequence[int], parent: int) -> NoReturn:
    try:
        os.setpgid(0, 0)  # the main process can kill this process together with its children
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for fd in others:
            os.close(fd)
        system.name_process(b"python")
        system.end_with_parent(True)
        if os.getppid() != parent:
            os._exit(1)
        if spawns:
            for fd in fds if life_line < 0 else (*fds, life_line):
                os.set_inheritable(fd, True)
            command = _boot_command("work", [fds, life_line], parent)
            os.execv(command[0], command)
        work(fds, life_line)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def work(fds: list[int], life_line: int) -> NoReturn:
    """A worker: call the function that came in the file `fds[0]`, with the other descriptors."""
    code = 1
    try:
        if end_group_with_parent is not None:  # also what the environments have started
            end_group_with_parent(life_line)
        elif life_line >= 0:
            system.follow(life_line)
        if life_line >= 0:
            system.end_with_parent(False)  # the life line does it from now on
        for fd in fds if life_line < 0 else (*fds, life_line):  # programs must not have them
            os.set_inheritable(fd, False)
        payload, *fds = fds
        with open(payload, "rb") as file:
            file.seek(0)
            surroundings, n_trackers = pickle.load(file)
            _adopt(surroundings)
            # Named shared memory of a worker that is killed is removed when the main process ends.
            for tracker in fds[:n_trackers]:
                resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
            del fds[:n_trackers]
            function = descriptors.loads(file.read(), fds)
        code = function() or 0
        _flush_standard_streams()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _adopt(surroundings: dict[str, Any]) -> None:
    """Use what `_surroundings` has found."""
    os.chdir(surroundings["folder"])
    sys.path[:], sys.argv[:] = surroundings["path"], surroundings["argv"]
    environ: dict[str, str] = surroundings["environ"]
    for name in os.environ.keys() - environ.keys() - system.kept_variables():
        del os.environ[name]
    for name, value in environ.items():
        if os.environ.get(name) != value:  # to set one takes long
            os.environ[name] = value
    os.umask(surroundings["umask"])
    logging.disable(surroundings["log_levels"][0])
    for name, level in surroundings["log_levels"][1].items():
        logging.getLogger(name).setLevel(level)
    if system.cpu_mask() != surroundings["cpus"]:
        with contextlib.suppress(OSError):  # a sandbox
            system.set_cpu_mask(surroundings["cpus"])
    with contextlib.suppress(ValueError):  # above its hard limit, or none (macOS)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (surroundings["file_limit"], hard))
    process = multiprocessing.current_process()
    process.name, process.authkey = surroundings["name"], surroundings["authkey"]
    if surroundings["start_method"] in multiprocessing.get_all_start_methods():  # joblib has one of its own
        multiprocessing.set_start_method(surroundings["start_method"], force=True)
