"""How `penstock top` finds a pool: other processes of this user can open its control block. What it is stands behind
it, as JSON.

On Linux the control block is a memfd: /proc/PID/fd lists it as long as a process has it open, and the kernel lets only
this user and root look there. Elsewhere it is a file in a folder that only this user can open; `close` removes it, and
the next process that starts a pool removes those of killed ones. The run does nothing else for it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock import system
from penstock.buffers.descriptors import InheritedFd
from penstock.buffers.named import NamedArrays
from penstock.buffers.shared import ArraySpec, NamedMemory

if TYPE_CHECKING:
    from penstock.workers.plan import PoolOptions, WorkerPlan

FORMAT = 1  #: of the control block: raise it when a word or an array gets another meaning
_NAME, _KIND = "penstock-run", "run"
_MOST = 1 << 22  # bytes of JSON
_numbers = itertools.count()


class _RunFile(InheritedFd):
    """The file of a control block, where a process cannot open what another one has open. A claim says that its process
    lives: a file without one was left behind."""

    def __init__(self) -> None:
        from penstock.workers.claims import Claim, claim, lock_folder

        number = os.getpid() * 10**6 + next(_numbers)
        own = claim(_KIND, number)  # the first one removes the claims of killed processes
        if not isinstance(own, Claim):
            raise PermissionError(f"another process has the run {number}")
        self._claim, self._path = own, lock_folder(_KIND) / f"{number}.{_KIND}"
        for path in self._path.parent.glob(f"*.{_KIND}"):
            if not path.with_suffix(".lock").exists():
                path.unlink(missing_ok=True)
        super().__init__(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))

    def close(self) -> None:
        if self._claim.is_active:  # not in a fork
            with contextlib.suppress(OSError):
                self._path.unlink()
            self._claim.release()
        super().close()


def run_file() -> InheritedFd:
    """The empty file of a control block."""
    if not system.OPENS_OTHERS:
        with contextlib.suppress(OSError, RuntimeError):  # no such folder, or no locks: `top` does not see this run
            return _RunFile()
    return InheritedFd(system.anonymous_memory(_NAME))


def announce(
    memory: NamedMemory, plans: Sequence[WorkerPlan], options: PoolOptions, stacks: Sequence[InheritedFd]
) -> None:
    """Write what this pool is behind the arrays of its control block."""
    workers = [
        {
            "rank": plan.worker_rank,
            "columns": [plan.columns.start, plan.columns.stop],
            "env_ranks": [plan.env_ranks.start, plan.env_ranks.stop],
            "cpus": list(plan.cpus),
            "server": plan.server_name,
            "stacks": os.fstat(file.fd).st_ino,
        }
        for plan, file in zip(plans, stacks, strict=True)
    ]
    about = {
        "format": FORMAT,
        "version": sys.modules["penstock"].__version__,
        "kind": options.kind,
        "pid": os.getpid(),
        "batch_T": options.batch_T,
        "batch_B": sum(len(plan.env_ranks) for plan in plans),
        "began": time.monotonic(),
        "command": " ".join(sys.orig_argv)[:1000],
        "nbytes": memory.nbytes,
        "layout": {name: [spec.offset, spec.shape, spec.dtype.str] for name, spec in memory.layout.leaves()},
        "workers": workers,
    }
    with contextlib.suppress(OSError):  # no memory is left: the run matters more
        memory.append(b"\0" + json.dumps(about).encode())


def paths(pid: int | None = None) -> Iterator[tuple[int, str]]:
    """The control blocks of this process, or of all of this user: the process, and the path at which it can be opened.
    Raises `OSError` if this one process has ended, or is another user's."""
    if not system.OPENS_OTHERS:
        from penstock.workers.claims import lock_folder

        for path in sorted(lock_folder(_KIND).glob(f"*.{_KIND}")):
            if pid in (None, owner := int(path.stem) // 10**6):
                yield owner, str(path)
        return
    for one in system.own_processes() if pid is None else [pid]:
        with contextlib.suppress(OSError) if pid is None else contextlib.nullcontext():
            yield from ((one, path) for path in system.files_of(one, _NAME))


def read(path: str) -> tuple[dict[str, Any], NamedMemory | None]:
    """What the control block at this path is, and its arrays, for reading only; None if it has another format. Raises
    `OSError` or `ValueError` if it cannot be read, or not yet."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        about = json.loads(os.pread(fd, _MOST, max(0, os.fstat(fd).st_size - _MOST)).rpartition(b"\0")[2])
        if about["format"] != FORMAT:
            return about, None
        layout = {name: ArraySpec(tuple(of[1]), np.dtype(of[2]), of[0]) for name, of in about["layout"].items()}
        return about, NamedMemory.read_only(fd, NamedArrays(layout), about["nbytes"])
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"what is behind the arrays is no description: {error!r}") from error
    finally:
        os.close(fd)
