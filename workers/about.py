"""How `penstock top` finds a pool: other processes of this user can open its control block. A description follows
in the same file, as JSON.

On Linux the control block is a memfd: /proc/PID/fd lists it as long as a process has it open, and the kernel lets only
this user and root look there. Elsewhere it is a file in a folder that only this user can open; `close` removes it, and
the next process that starts a pool removes what killed ones have left. The run does nothing else for it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock import system
from penstock.buffers.descriptors import InheritedFd
from penstock.buffers.named import NamedArrays
from penstock.buffers.shared import ArraySpec, NamedMemory
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.workers.claims import Claim
    from penstock.workers.plan import WorkerPlan

FORMAT = 1  #: of the control block: raise it when a word or an array gets another meaning
RUN, STACKS = "penstock-run", "penstock-stack"  #: the names of control blocks, and of files with stacks
_KIND = "run"
_MOST, _MOST_ARRAYS = 1 << 22, 1 << 32  # bytes of JSON and of arrays that are read
_numbers = itertools.count()


class _RunFile(InheritedFd):
    """The file of a control block, where a process cannot open what another one has open. A claim says that its process
    lives: a file without one was left behind."""

    _claim: Claim | None = None

    def __init__(self) -> None:
        from penstock.workers.claims import Claim, claim, lock_folder

        number = f"{os.getpid()}{next(_numbers):06}"
        own = claim(_KIND, int(number))  # the first one removes the claims of killed processes
        if not isinstance(own, Claim):
            raise PermissionError(f"another process has the claim {number}")
        self._claim, self._path = own, lock_folder(_KIND) / number
        for path in self._path.parent.glob("*.penstock-*"):
            with contextlib.suppress(OSError):
                if not path.with_suffix(".lock").exists():
                    path.unlink()
        super().__init__(self.new(RUN))

    def new(self, name: str) -> int:
        """The descriptor of a new file beside this one."""
        return os.open(self._path.with_suffix(f".{name}"), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        if self._claim is not None and self._claim.is_active:  # not in a fork
            for path in self._path.parent.glob(f"{self._path.name}.penstock-*"):
                path.unlink(missing_ok=True)
            self._claim.release()
        super().close()


class RunMemory(NamedMemory):
    """The memory of a control block."""

    def _new_file(self) -> InheritedFd:
        if not system.OPENS_OTHERS:
            with contextlib.suppress(OSError, RuntimeError):  # no such folder, or no locks: `top` does not see this run
                return _RunFile()
        return InheritedFd(system.anonymous_memory(RUN))

    def new_stacks(self, rank: int) -> int:
        """The descriptor of a new file for the stacks of one worker."""
        if isinstance(self._descriptor, _RunFile):
            with contextlib.suppress(OSError):
                return self._descriptor.new(f"{STACKS}{rank}")
        return system.anonymous_file(STACKS)

    def announce(self, kind: str, batch_T: int, plans: Sequence[WorkerPlan], stacks: Sequence[int]) -> None:
        """Write what this pool is behind the arrays. `stacks`: the inodes of the stack files."""
        from penstock.workers.tracing import describe

        assert self._descriptor is not None
        about = {
            **describe(kind, batch_T, plans),
            "format": FORMAT,
            "began": time.monotonic(),
            "command": " ".join(" ".join(sys.orig_argv).split())[:1000],  # python -c takes several lines
            "plans": [(plan.server_name, plan.env_ranks.start, plan.env_ranks.stop, plan.cpus) for plan in plans],
            "stacks": stacks,
            "nbytes": self.nbytes,
            "layout": {name: (spec.offset, spec.shape, spec.dtype.str) for name, spec in self._layout.items()},
        }
        with contextlib.suppress(OSError):  # no memory is left: the run matters more
            os.pwrite(self._descriptor.fd, b"\0" + json.dumps(about).encode(), self.nbytes)

    @classmethod
    def read(cls, path: str) -> tuple[dict[str, Any], RunMemory]:
        """What the control block at this path is, and its arrays, for reading only. Raises `ConfigError` if it has
        another format, and many other errors if it cannot be read, or not yet."""
        fd, memory = os.open(path, os.O_RDONLY | os.O_CLOEXEC), cls.__new__(cls)
        try:
            about = json.loads(os.pread(fd, _MOST, max(0, os.fstat(fd).st_size - _MOST)).rpartition(b"\0")[2])
            if about["format"] != FORMAT:
                raise ConfigError(
                    f"process {about['pid']} runs penstock {about['version']}. Its control block has format "
                    f"{about['format']}, and this version reads {FORMAT}: use `penstock top` of that Python"
                )
            specs = {name: ArraySpec(tuple(of[1]), np.dtype(of[2]), of[0]) for name, of in about["layout"].items()}
            memory.nbytes, memory._layout = min(about["nbytes"], _MOST_ARRAYS), NamedArrays(specs)
            memory._access = mmap.ACCESS_READ
            memory._map(fd)
            return about, memory
        finally:
            os.close(fd)


def files_of(pid: int, name: str = RUN) -> list[str]:
    """The paths at which this process can open the files of this name that another one has open. Raises `OSError` if
    that has ended, or is another user's, and `ConfigError` if the folder of such files is."""
    if system.OPENS_OTHERS:
        return system.files_of(pid, name)
    from penstock.workers.claims import lock_folder

    os.kill(pid, 0)  # looks only
    try:
        return [str(path) for path in lock_folder(_KIND).glob(f"{pid}??????.{name}*")]
    except OSError as error:
        raise ConfigError(f"no run can be seen here: {error}") from error
