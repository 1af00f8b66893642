"""What Linux has and another POSIX system may lack, in one place. Only the package's `__init__` also asks which system
this is, to refuse Windows.

Each function has a twin for macOS beside what Linux does. `PENSTOCK_PORTABLE=1` selects the twins on Linux too, so that
Linux runs and tests the code that macOS runs. So no twin uses what only macOS has, and none reads /proc.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import importlib
import math
import mmap
import os
import re
import resource
import secrets
import select
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

#: Whether the twins are in use. Below, `sys.platform` stands beside it, since mypy understands that.
PORTABLE = sys.platform != "linux" or os.environ.get("PENSTOCK_PORTABLE") == "1"
#: Why no worker should be a fork, or empty. Empty on Linux, so that the tests with PENSTOCK_PORTABLE take half as long.
WHY_NO_FORK = "Apple's Accelerate may crash in a fork (CPython issue 33725)" if sys.platform == "darwin" else ""

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_PIDFD_SIGNAL_PROCESS_GROUP = 4  # since Linux 6.9
_PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_PF_EXITING = 0x4
_MAP_FIXED = 0x10  # of Linux and macOS; Python's module lacks it
_COPIED = 2**24  # bytes: the most that a fork of a worker copies
_EPHEMERAL = (49_152, 65_535)  # IANA's range for outgoing connections (RFC 6335)
_POOL = "PENSTOCK_POOL_"

FRAME = 256  #: bytes: the longest message of `send`
DESCRIPTORS = "/dev/fd" if PORTABLE else "/proc/self/fd"  #: the folder that lists the descriptors of this process
OWN_CGROUPS = os.devnull if PORTABLE else "/proc/self/cgroup"  #: the file that names the cgroups of this process
WAKE_UP_FDS = 2 if PORTABLE else 1  #: how many descriptors a wake-up has
OPENS_OTHERS = not PORTABLE  #: whether a process can open what another process of its user has open

# ---- memory and files --------------------------------------------------------------------------


def anonymous_file(name: str) -> int:
    """An empty file without a path, in memory where the system allows it. `name` is for tools such as lsof."""
    folder = None
    if sys.platform == "linux" and not PORTABLE:
        with contextlib.suppress(AttributeError, OSError):  # a sandbox
            return os.memfd_create(name, os.MFD_CLOEXEC)
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())


@contextlib.contextmanager
def _without_handlers() -> Iterator[None]:
    """Signals wait. Their handlers may raise: the name of a new file would stay."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def anonymous_memory(name: str) -> int:
    """An empty file without a path. `reserve` gives it its size, and then it is mapped: macOS allows no other use."""
    if not PORTABLE:
        return anonymous_file(name)
    shm, path = importlib.import_module("_posixshmem"), f"/{name}-{secrets.token_hex(8)}"
    with _without_handlers():
        fd: int = shm.shm_open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        shm.shm_unlink(path)
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def reserve(fd: int, nbytes: int) -> None:
    """Give an empty file its size. Linux takes the pages now: otherwise the first write beyond a limit is a SIGBUS."""
    if sys.platform == "linux" and not PORTABLE:
        os.posix_fallocate(fd, 0, nbytes)
    else:
        os.ftruncate(fd, nbytes)


def make_private(buffer: mmap.mmap, nbytes: int, fd: int) -> None:
    """Put private memory in the place of the shared mapping of the file `fd`: no other process sees what is written.

    Linux copies no page before it is written. The twin copies all. What is larger than 16 MiB becomes read-only there.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    where, size = ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
    protection, flags, kept = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED, b""
    if PORTABLE:  # macOS maps such memory as shared only
        if nbytes > _COPIED:
            _libc.mprotect(where, size, mmap.PROT_READ)
            return
        kept, flags, fd = buffer[:nbytes], flags | mmap.MAP_ANON, -1
    _libc.mmap.restype = ctypes.c_void_p
    if _libc.mmap(where, size, protection, flags, fd, ctypes.c_long(0)) != address:
        raise OSError(ctypes.get_errno(), "shared memory cannot be made private")
    ctypes.memmove(address, kept, len(kept))


def sealed_memory(name: str, nbytes: int) -> tuple[int, str] | None:
    """A file in memory whose size nobody can change, and the path at which other processes of this user open it as long
    as this one keeps it. None: the system has none."""
    if sys.platform == "linux" and not PORTABLE:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(fd)
            raise
        return fd, f"/proc/{os.getpid()}/fd/{fd}"
    return None


def punch(fd: int, nbytes: int) -> bool:
    """Free the space of the first bytes of a file, whose size stays. Returns whether the system has done it."""
    if sys.platform == "linux" and not PORTABLE:
        return bool(_libc.fallocate(fd, _PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(nbytes)) == 0)
    return False


def umask() -> int:
    """The umask. `os.umask` would change it for a moment, for other threads too."""
    if sys.platform == "linux" and not PORTABLE:
        with contextlib.suppress(OSError), open("/proc/self/status") as status:
            for line in status:
                if line.startswith("Umask:"):
                    return int(line.split()[1], 8)
    # A new file shows it.
    path = os.path.join(tempfile.gettempdir(), f"penstock-{secrets.token_hex(8)}")
    with _without_handlers():
        fd = os.open(path, os.O_CREAT | os.O_EXCL, 0o777)
        os.unlink(path)
    try:
        return 0o777 & ~os.fstat(fd).st_mode
    finally:
        os.close(fd)


def allow_files(needed: int) -> float:
    """Let this process open so many files, or as many as its hard limit allows. Returns the soft limit, inf if there is
    none. On macOS it is 256 at first."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in limits)
    if (wanted := min(needed, hard)) > soft:
        with contextlib.suppress(OSError, ValueError):  # a sandbox
            resource.setrlimit(resource.RLIMIT_NOFILE, (int(wanted), limits[1]))
            return wanted
    return soft


def open_descriptors() -> dict[int, str]:
    """The open descriptors of this process that are not penstock's shared memory, and what each is."""
    found, paths = {}, dict[int, str]()
    if PORTABLE:
        import psutil

        paths = {each.fd: each.path for each in psutil.Process().open_files()}
    for name in os.listdir(DESCRIPTORS) if os.path.isdir(DESCRIPTORS) else ():
        with contextlib.suppress(OSError):  # that of the listing itself
            if sys.platform == "linux" and not PORTABLE:
                if not (what := os.readlink(f"{DESCRIPTORS}/{name}")).startswith("/memfd:penstock"):
                    found[int(name)] = what
            else:
                status = os.fstat(int(name))
                # Shared memory of macOS has no kind.
                if status.st_nlink or stat.S_IFMT(status.st_mode) not in (0, stat.S_IFREG):
                    found[int(name)] = paths.get(int(name), f"{stat.filemode(status.st_mode)}, inode {status.st_ino}")
    return found


# ---- wake-ups and messages ---------------------------------------------------------------------


def wake_up() -> tuple[int, int]:
    """Reader and writer of what wakes a process that polls the reader. They may be one descriptor."""
    if sys.platform == "linux" and not PORTABLE:
        with contextlib.suppress(AttributeError, OSError):  # a sandbox
            fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            return fd, fd
    return nonblocking_pipe()


def nonblocking_pipe() -> tuple[int, int]:
    """Reader and writer of a pipe, neither of which ever waits. `os.pipe2` is not on macOS."""
    ends = os.pipe()
    for fd in ends:
        os.set_blocking(fd, False)
    return ends


def connection() -> tuple[socket.socket, socket.socket]:
    """The two ends of a connection for `send` and `receive`."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM if PORTABLE else socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: bytes, fds: Iterable[int] = (), flags: int = 0) -> None:
    """Send a message with descriptors. It has at most `FRAME` bytes, and does not end with a zero."""
    fds = list(fds)
    if PORTABLE:  # a stream does not say where a message ends
        message = message[:FRAME].ljust(FRAME, b"\0")
    n = socket.send_fds(end, [message], fds, flags) if fds else end.send(message, flags)
    while n < len(message):
        poll = select.poll()
        poll.register(end, select.POLLOUT)
        poll.poll()
        with contextlib.suppress(BlockingIOError):
            n += end.send(message[n:])


def receive(end: socket.socket, most_fds: int) -> tuple[bytes, list[int]]:
    """The next message and its descriptors; empty at the end."""
    message, fds = b"", list[int]()
    with contextlib.suppress(ConnectionResetError):
        message, fds = receive_fds(end, FRAME, most_fds)
        while PORTABLE and message and len(message) < FRAME:
            part = end.recv(FRAME - len(message))
            message = message + part if part else b""
    return message.rstrip(b"\0") if PORTABLE else message, fds


def receive_fds(end: socket.socket, n_bytes: int, most_fds: int) -> tuple[bytes, list[int]]:
    """What has come, and its descriptors. No child inherits them."""
    if sys.platform == "linux" and not PORTABLE:
        return socket.recv_fds(end, n_bytes, most_fds, socket.MSG_CMSG_CLOEXEC)[:2]
    try:
        message, fds, _, _ = socket.recv_fds(end, n_bytes, most_fds)
    except OSError as error:
        if error.errno != errno.EMSGSIZE:  # macOS: they are more than this process may open, and are lost
            raise
        return end.recv(n_bytes), []
    for fd in fds:
        os.set_inheritable(fd, False)
    return message, fds


# ---- the end of a process ----------------------------------------------------------------------


def watch_end(pid: int) -> int | None:
    """A descriptor that is readable when the process has ended. None: its parent must say so."""
    if sys.platform == "linux" and not PORTABLE:
        with contextlib.suppress(AttributeError, OSError):  # a sandbox, or an old kernel
            return os.pidfd_open(pid)
    return None


def signal_group(watch: int, number: int) -> None:
    """Signal the group of a process with a descriptor of `watch_end`. Raises `OSError` on an older kernel."""
    if sys.platform == "linux" and not PORTABLE:
        signal.pidfd_send_signal(watch, number, None, _PIDFD_SIGNAL_PROCESS_GROUP)


def name_process(name: bytes) -> None:
    """Set the name by which `ps` and `killall` know this process."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_NAME, name)


def end_with_parent(ends: bool) -> None:
    """Set whether the kernel kills this process when its parent ends. Workers of the twin have a `life_line` instead."""
    if sys.platform == "linux" and not PORTABLE:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if ends else 0)
    else:  # stop the timer of END_WITH_PARENT
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


#: The same in a new interpreter, from its first moment, before it can import this module. The twin looks ten times a
#: second, until `end_with_parent` is called.
END_WITH_PARENT = (
    "import signal\n"
    "signal.signal(signal.SIGALRM, lambda *_: os.getppid() == parent or os._exit(1))\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)"
    if PORTABLE
    else f"import ctypes; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {signal.SIGKILL:d})"
)


def life_line() -> list[int]:
    """The two ends of a pipe. A worker reads from the first. Only the supervisor has the second, so the worker reads the
    end of the file when the supervisor has ended. Empty on Linux, which needs none."""
    return list(os.pipe()) if PORTABLE else []


def follow(life_line: int) -> None:
    """End this process and its group when the other end of the life line is closed. The compiled part does so while C
    code holds the interpreter lock too."""

    def look(*_: object) -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(life_line, 1):
                os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGIO, look)
    fcntl.fcntl(life_line, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life_line, fcntl.F_SETFL, fcntl.fcntl(life_line, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    look()


def adopt_orphans() -> None:
    """Become the parent of all that children of this process leave. The twin finds them by `pool_variables`."""
    if sys.platform == "linux" and not PORTABLE:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_children(main: int) -> None:
    """In the supervisor of process `main`: kill its children, and every orphan that becomes one, until none is left."""
    if sys.platform == "linux" and not PORTABLE:
        with contextlib.suppress(OSError):  # no child is left, or the system does not list them
            while True:
                with open(f"/proc/self/task/{os.getpid()}/children") as file:
                    for pid in map(int, file.read().split()):
                        with contextlib.suppress(PermissionError):  # it runs as another user
                            os.kill(pid, signal.SIGKILL)
                os.waitpid(-1, 0)
        return
    # If `main` is a worker itself, this process has the variable of its supervisor too, whose workers must live on.
    names = [name for name in os.environ if name.startswith(f"{_POOL}{main}_")]
    for name in 2 * names:  # what is killed may start something meanwhile
        for pid in set(marked_with(name)) - {os.getpid()}:
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def pool_variables(main: int, mark: Callable[[], str]) -> dict[str, str]:
    """Environment variables for a supervisor of process `main`. By the first, the supervisor finds what its workers have
    started. By `mark()`, the shell of marking.py finds the supervisor and its forks. Empty on Linux, which needs none."""
    return {f"{_POOL}{main}_{secrets.token_hex(8)}": "1", mark(): "1"} if PORTABLE else {}


def kept_variables() -> set[str]:
    """The variables of its supervisors, which a worker must keep."""
    return {name for name in os.environ if name.startswith(_POOL)} if PORTABLE else set()


# ---- other processes ---------------------------------------------------------------------------

#: A real-time signal where the system has them: libraries and job schedulers use SIGUSR1 and SIGUSR2.
if sys.platform == "linux" and not PORTABLE:
    ASK_STACKS = int(signal.SIGRTMAX) - 3
else:
    ASK_STACKS = int(signal.SIGURG)  # a process without a handler ignores it

#: Lines of a shell that kill each process whose environment variable "$1" is 1. The shell itself has the name alone as
#: an argument, since `ps` shows arguments too, and it has no `grep` yet when it calls `ps`.
KILL_MARKED = (
    """
        found=$(ps axeww -o pid= -o command=)
        for pid in $(printf '%s\\n' "$found" | grep -F -- "$1=1" | sed 's/^ *\\([0-9]*\\).*/\\1/'); do
            kill -s KILL "$pid"
        done"""
    if PORTABLE
    else """
        for file in $(grep -lszxF -- "$1=1" /proc/[0-9]*/environ); do
            pid=${file#/proc/}
            kill -s KILL "${pid%/environ}"
        done"""
)


def marked_with(name: str) -> list[int]:
    """The ids of all processes whose environment variable `name` is 1. A zombie has no variables."""
    found = []
    if sys.platform == "linux" and not PORTABLE:
        entry = f"\0{name}=1\0".encode()
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:  # ended, or another user's
                if entry in b"\0" + file.read():
                    found.append(int(pid))
        return found
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(name) == "1":
                found.append(process.pid)
    return found


def with_descendants(pids: Iterable[int]) -> set[int]:
    """These processes, their children, and so on."""
    left, found = list(pids), set[int]()
    children: dict[int, list[int]] = {}
    if PORTABLE:
        import psutil

        for process in psutil.process_iter(["ppid"]):
            children.setdefault(process.info["ppid"], []).append(process.pid)
    while left:
        if (pid := left.pop()) in found:
            continue
        found.add(pid)
        left += children.get(pid, ())
        if sys.platform == "linux" and not PORTABLE:
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
                left += map(int, file.read().split())
    return found


def files_of(pid: int, name: str) -> list[str]:
    """The paths at which this process can open each `anonymous_file(name)` that another one has open. Raises `OSError`
    if that has ended, or is another user's."""
    folder, found = f"/proc/{pid}/fd", []
    for fd in os.listdir(folder):
        with contextlib.suppress(OSError):  # it was closed
            if os.readlink(path := f"{folder}/{fd}").startswith(f"/memfd:{name} "):
                found.append(path)
    return found


def ask_stacks(pid: int) -> None:
    """Send ASK_STACKS to a process of this user. Raises `OSError` if it has ended, or has no handler: then the signal
    would kill it. That of the twin kills nobody."""
    if sys.platform == "linux" and not PORTABLE:
        watch = os.pidfd_open(pid)  # the signal comes to the process whose handlers are read here, or to none
        try:
            with open(f"/proc/{pid}/status") as file:
                handlers = int(file.read().partition("SigCgt:")[2].split()[0], 16)
            if not handlers >> (ASK_STACKS - 1) & 1:
                raise OSError("it has no handler of the signal that asks for its stack: it may have just started")
            signal.pidfd_send_signal(watch, ASK_STACKS)
        finally:
            os.close(watch)
    else:
        os.kill(pid, ASK_STACKS)


def rss(pid: int) -> int:
    """How many bytes of memory a process uses; 0 if it has ended."""
    if sys.platform == "linux" and not PORTABLE:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return 0
    import psutil

    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0


def is_dying(pid: int) -> bool:
    """Whether the process has been killed but still exists. False where the system does not say."""
    if sys.platform == "linux" and not PORTABLE:
        with contextlib.suppress(OSError, ValueError):
            with open(f"/proc/{pid}/stat") as file:  # fields 3 and 9 of proc_pid_stat(5): state and flags
                state, _, _, _, _, _, flags, *_ = file.read().rpartition(")")[2].split()
            if int(flags) & _PF_EXITING or state in "ZX":
                return True
            with open(f"/proc/{pid}/status") as file:
                masks = re.findall(r"^(?:SigPnd|ShdPnd):\s*(\w+)", file.read(), re.MULTILINE)
            return any(int(mask, 16) >> (signal.SIGKILL - 1) & 1 for mask in masks)
    return False


# ---- ports -------------------------------------------------------------------------------------


def ephemeral_ports() -> tuple[int, int]:
    """The first and the last port that the kernel gives to outgoing connections."""
    if sys.platform == "linux" and not PORTABLE:
        with contextlib.suppress(OSError), open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            low, high = file.read().split()
            return int(low), int(high)
    return _EPHEMERAL


def users_of(port: int, protocol: str, members: Callable[[], Iterable[int]]) -> list[tuple[int | None, str]]:
    """Process id and state of each socket at this port. The twin sees those of the processes `members()` alone: on
    macOS, only root sees others."""
    import psutil

    found: list[tuple[int | None, Any]] = []
    if sys.platform == "linux" and not PORTABLE:
        tables = ""  # of the kernel: they say much faster whether there is one
        for name in (protocol, f"{protocol}6"):
            with contextlib.suppress(OSError), open(f"/proc/net/{name}") as file:
                tables += file.read()
        if re.search(rf"^ *\d+: \w+:{port:04X} ", tables, re.MULTILINE):
            found = [(each.pid, each) for each in psutil.net_connections(protocol)]
    else:
        for pid in members():
            with contextlib.suppress(psutil.Error):
                process: Any = psutil.Process(pid)
                own = getattr(process, "net_connections", None) or process.connections  # its name before psutil 6
                found += [(pid, each) for each in own(protocol)]
    return [(pid, each.status) for pid, each in found if each.laddr and each.laddr[1] == port]


# ---- CPUs --------------------------------------------------------------------------------------


def cpu_mask() -> set[int]:
    """The CPUs that this thread may run on; empty where nothing can be pinned."""
    if sys.platform == "linux" and not PORTABLE:
        return os.sched_getaffinity(0)
    return set()


def set_cpu_mask(cpus: Iterable[int]) -> None:
    """Run on these CPUs only. The twin does nothing."""
    if sys.platform == "linux" and not PORTABLE:
        os.sched_setaffinity(0, cpus)


# ---- for `penstock doctor` ---------------------------------------------------------------------


def means() -> dict[str, str]:
    """What is in use on this system, by purpose, with the reason if it is not the best."""
    if sys.platform == "linux" and not PORTABLE:
        return {
            "shared memory": _which(lambda: os.memfd_create("penstock"), "anonymous (memfd)", "a temporary file"),
            "wake-ups": _which(lambda: os.eventfd(0), "eventfd", "pipe"),
            "death of a process": _which(lambda: os.pidfd_open(os.getpid()), "pidfd", "sentinel"),
        }
    return {"shared memory": "anonymous (shm_open)", "wake-ups": "pipe", "death of a process": "the supervisor says it"}


def _which(open_one: Callable[[], int], preferred: str, fallback: str) -> str:
    """`preferred` if the system opens such a descriptor, and otherwise `fallback` with the reason."""
    try:
        os.close(open_one())
    except (AttributeError, OSError) as error:
        return f"{fallback} ({error})"
    return preferred
