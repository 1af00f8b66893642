"""The control panel of a trial: it starts workers, commands them, and shows their statuses."""

from __future__ import annotations

import contextlib
import logging
import re
import resource
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import psutil

from penstock.arguments import integer, one_of, seconds
from penstock.distributed.closing import Closing
from penstock.distributed.keys import Connection
from penstock.distributed.launched import LaunchedProcess, LaunchedThread, load_worker, snake
from penstock.distributed.names import LEASE_SECONDS, NameClient, NameTable
from penstock.distributed.role import Worker, clock
from penstock.distributed.statuses import Status
from penstock.distributed.wire import LOST_SECONDS, Node, Peer
from penstock.errors import ClusterError, ConfigError, NameTableError, NoReplyError, PeerLostError

if TYPE_CHECKING:
    from typing_extensions import Self

    from penstock.distributed.launch_ray import LaunchedActor

    Launched: TypeAlias = LaunchedThread | LaunchedProcess | LaunchedActor

_log = logging.getLogger("penstock")

WireName = Literal["local", "zmq", "ray"]
_SUSPENDED_SECONDS = 5.0  # no look at the clock for so long
# Of this process for each worker: its pipe, its stacks, and two connections; or in a thread, all of its node.
_DESCRIPTORS, _DESCRIPTORS_OF_THREAD = 5, 24
_WATCH_SECONDS = 0.1  # how often the panel checks whether a launched worker has ended


@dataclass(frozen=True)
class Response:
    """One worker's answer in a `group_request`: a result, or an error."""

    worker_name: str
    result: Any = None
    error: str | None = None
    timed_out: bool = False  #: it did not answer in time
    lost: bool = False  #: it has ended, or cannot be reached

    @property
    def is_ok(self) -> bool:
        """Whether there is a result."""
        return self.error is None


class ControlPanel(Closing):
    """Commands the workers of one trial. It has the name table, in which workers find each other, so a trial ends with
    its panel.

    Args:
        experiment, trial: names of this run.
        wire: "local" starts workers as threads of this process; "zmq" as processes, and other machines can join; "ray"
            as processes which Ray places, on the machines of the cluster that this process has joined, or of one that
            is started here.
        host: for "zmq": the address of this machine at which other machines reach it; by default no other one does.
        port: for "zmq": of the name table; 0 for any free one.
        file: for "zmq": write the connection file here. With it, workers on other machines can join, and
            `penstock status` shows the workers.
    """

    def __init__(
        self,
        experiment: str,
        trial: str = "trial0",
        *,
        wire: WireName = "local",
        host: str | None = None,
        port: int = 0,
        file: str | Path | None = None,
    ) -> None:
        one_of("wire", wire, get_args(WireName))
        if wire != "zmq" and (host or port or file):
            raise ConfigError(f'host, port and file are for wire="zmq", not for {wire!r}')
        with ExitStack() as resources:
            connection, self._start = _trial(f"{experiment}/{trial}", wire, host, resources)
            node = connection.wire(port)
            resources.callback(node.close)
            table = NameTable(lambda: node.clock)
            resources.callback(table.serve(node).close)
            connection = replace(connection, address=node.address)
            if file is not None:
                connection.write(file)
            self._begin(node, connection, resources.pop_all(), table)

    @classmethod
    def join(cls, connection: Connection) -> Self:
        """Connect to a running experiment. This panel launches no workers."""
        panel, wire = cls.__new__(cls), connection.wire()
        resources = ExitStack()
        resources.callback(wire.close)
        panel._start = None
        panel._begin(wire, connection, resources)
        return panel

    def _begin(self, wire: Node, connection: Connection, resources: ExitStack, table: NameTable | None = None) -> None:
        self._wire, self.connection, self._resources = wire, connection, resources
        self._launched: dict[str, Launched] = {}
        self._peers: dict[str, Peer] = {}
        self._closing = threading.Event()
        self._looked, self._n_suspensions, self._look_lock = clock(), 0, threading.Lock()
        #: Workers that have failed while the panel was closed, and their errors.
        self.failed_at_end: dict[str, str] = {}
        self.names = NameClient(wire, connection.address, table=table)
        try:
            self.names.follow("")
        except BaseException:
            resources.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="control panel", daemon=True)
        self._watcher.start()

    # ---- workers ---------------------------------------------------------------------------

    def launch(
        self,
        worker: Callable[[], Worker] | str,
        count: int = 1,
        *,
        name: str | None = None,
        first: int = 0,
        resources: Mapping[str, float] | None = None,
    ) -> list[str]:
        """Start workers, and return their names: `name/first`, `name/first+1`, ...

        Args:
            worker: a `Worker` subclass, another callable that makes a worker, or the text "module:Class".
            name: by default that of the class, as in `my_worker` for `MyWorker`.
            resources: what Ray reserves for each, such as `{"CPU": 2, "GPU": 1}`; by default nothing. Other wires
                reserve nothing.

        Over sockets, the panel needs 4 file descriptors for each worker: this raises the soft limit of its process if
        that is too low, and raises `ConfigError` if the hard limit is.
        """
        if self._start is None:
            raise ConfigError("this panel has joined a trial: only the panel that began the trial launches workers")
        make = load_worker(worker)[0] if isinstance(worker, str) else worker
        if not callable(make) or (isinstance(make, type) and not issubclass(make, Worker)):
            raise ConfigError(f"launch needs a subclass of Worker, or a function that makes a worker, got {make!r}")
        integer("count", count, least=0)
        _need_descriptors(count * (_DESCRIPTORS_OF_THREAD if self._start is LaunchedThread else _DESCRIPTORS), count)
        base = name or snake(make.func if isinstance(make, partial) else make)
        names = [f"{base}/{first + i}" for i in range(count)]
        for worker_name in names:
            old = self._launched.get(worker_name)
            if old is not None and old.ending() is None:
                raise NameTableError(
                    f"there is a worker {worker_name!r} already: choose another name, or another `first`"
                )
            if old is not None:
                old.wait(0)  # this kills the processes that the old worker has started
            self._forget(worker_name)
            self._launched[worker_name] = self._start(make, self.connection, worker_name, resources or {})
        return names

    def connect(self, names: Iterable[str] | None = None, *, timeout: float = 30.0) -> list[str]:
        """Wait until these workers (by default all that were launched) can be reached.

        Raises `ClusterError` as soon as a launched one has ended, and `NoReplyError` after `timeout` seconds.
        """
        wanted = list(self._launched if names is None else _listed(names))
        deadline = time.monotonic() + timeout
        while True:
            workers = self.autoconnect()
            missing = [name for name in wanted if name not in workers]
            if not missing:
                return wanted
            for name in missing:
                self.require_alive(name)
            if time.monotonic() >= deadline:
                raise NoReplyError(f"these workers could not be reached within {timeout:g} s: {', '.join(missing)}")
            self._closing.wait(0.05)

    def require_alive(self, worker_name: str) -> None:
        """Raise `ClusterError` if this worker was launched here, and has ended."""
        ending = self._ending(worker_name)
        if ending is not None:
            final = self._final(worker_name)
            reason = f": {final[1]}" if final else "; see its log"
            raise ClusterError(f"worker {worker_name} has ended before it could be reached ({ending}){reason}")

    def autoconnect(self) -> list[str]:
        """Connect to all workers that the name table lists. Returns their names."""
        self._check_open()
        places = {key.partition("/")[2]: place for key, place in self.names.find("workers").items()}
        for name, place in places.items():
            peer = self._peers.get(name)
            if self._ending(name) is not None:
                continue  # its entry in the table has not run out yet
            if peer is None or peer.is_dead or peer.place != list(place):
                # The watcher sees the end of a launched worker: it may be silent for as long as it lives.
                address, wire_id, inbox = map(str, place)
                silence = float("inf") if name in self._launched else LOST_SECONDS
                self._peers[name] = self._wire.reach(address, inbox, target=wire_id, lost_after=silence)
        return [name for name, peer in self._peers.items() if not peer.is_dead]

    @property
    def worker_names(self) -> list[str]:
        """All workers that this panel has launched or connected to."""
        return sorted({*self._launched, *self._peers})

    # ---- requests --------------------------------------------------------------------------

    def async_request(self, worker_name: str, command: str, *, timeout: float = 30.0, **kwargs: object) -> Future[Any]:
        """Send a request. The future gets the result, or `RequestError`, `NoReplyError` or `PeerLostError`.

        Raises `PeerLostError` if the worker cannot be reached.
        """
        return self._peer(worker_name).ask({"command": command, "kwargs": kwargs}, seconds("timeout", timeout))

    def request(self, worker_name: str, command: str, *, timeout: float = 30.0, **kwargs: object) -> Any:
        """As `async_request`, and wait for the result."""
        return self.async_request(worker_name, command, timeout=timeout, **kwargs).result()

    def group_request(
        self,
        command: str,
        *,
        names: Iterable[str] | None = None,
        regex: str | None = None,
        kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        timeout: float = 30.0,
    ) -> list[Response]:
        """Send a request to many workers, and wait until all have answered, or for `timeout` seconds. If one fails, its
        `Response` says so: nothing is raised.

        Args:
            names: which workers; by default all.
            regex: only the workers whose names match it from start to end.
            kwargs: the same for all, or a list with one for each worker, in the order of the names.
        """
        chosen = [
            name
            for name in (self.worker_names if names is None else _listed(names))
            if re.fullmatch(regex or ".*", name)
        ]
        dicts = [kwargs or {}] * len(chosen) if isinstance(kwargs, Mapping | None) else list(kwargs)
        if len(dicts) != len(chosen):
            raise ConfigError(
                f"{len(dicts)} kwargs for {len(chosen)} workers: {', '.join(chosen)}. Give one dict for each worker, "
                "or one for all"
            )
        timeout = seconds("timeout", timeout)
        futures: list[Future[Any]] = []
        for name, arguments in zip(chosen, dicts, strict=True):
            try:
                futures.append(self._peer(name).ask({"command": command, "kwargs": dict(arguments)}, timeout))
            except PeerLostError as error:
                failed: Future[Any] = Future()
                failed.set_exception(error)
                futures.append(failed)
        return [_response(name, future) for name, future in zip(chosen, futures, strict=True)]

    # ---- statuses --------------------------------------------------------------------------

    def get_worker_status(self, worker_name: str, *, timeout: float = 1.0) -> Status:
        """The status of a worker. UNRESPONSIVE: it lives, but does not answer. LOST: it has ended without a report, or
        cannot be reached."""
        return self.pulse([worker_name], timeout=timeout)[worker_name]

    def pulse(self, names: Iterable[str] | None = None, *, timeout: float = 1.0) -> dict[str, Status]:
        """The statuses of these workers (by default all), by name, after at most `timeout` seconds."""
        self.autoconnect()
        chosen = self.worker_names if names is None else list(_listed(names))
        responses = self.group_request("status", names=chosen, timeout=timeout)
        if any(response.result == Status.PAUSED.value for response in responses):
            self.names.flush(timeout)  # `stats` has all that they have done
        return {
            response.worker_name: Status(response.result)
            if response.is_ok
            else self._status_from_outside(response.worker_name)[0]
            for response in responses
        }

    def stats(self, names: Iterable[str] | None = None, *, timeout: float = 1.0) -> dict[str, dict[str, Any]]:
        """The figures of these workers (by default all), by name, as they have arrived: each worker sends them twice a
        second and when its status changes, or less often if there are more than 75 workers. `age` is how many seconds
        ago they came. For a worker that sends none: `status`, and the error that ended it as `text`.

        Raises `NoReplyError` if the name table was silent for more than `timeout` + 9 seconds.
        """
        self._check_open()
        if self.names.silence > timeout + 3 * LEASE_SECONDS:
            raise NoReplyError(f"no control panel answers at {self.connection.address}: it may have ended")
        if names is None:
            names = sorted({*self.worker_names, *(key[len("figures/") :] for key in self.names.keys("figures"))})
        table: dict[str, dict[str, Any]] = {}
        for name in _listed(names):
            figures = self.names.newest(f"figures/{name}")
            if figures is not None and self._ending(name) is None:
                table[name] = {**figures[0], "age": figures[1]}
            else:
                status, text = self._status_from_outside(name)
                table[name] = {"status": status.value, "text": text}
        return table

    def table(self, *, timeout: float = 1.0) -> str:
        """All workers and their figures, as text."""
        lines = [f"{'worker':<24}{'status':<13}figures"]
        for name, facts in self.stats(timeout=timeout).items():
            figures = "  ".join(
                f"{key}={value:.6g}" if isinstance(value, int | float) else f"{key}={value}"
                for key, value in facts.items()
                if key != "status" and value != ""
            )
            lines.append(f"{name:<24}{facts['status']:<13}{figures}")
        return "\n".join(lines)

    def _status_from_outside(self, name: str) -> tuple[Status, str]:
        """The status of a worker that has given no answer, and the error that ended it."""
        final = self._final(name)
        if final is not None:
            return Status(final[0]), final[1]
        if name not in self._peers and name not in self._launched:
            return Status.UNKNOWN, ""
        ending = self._ending(name)
        lives = ending is None if name in self._launched else self.names.newest(f"workers/{name}") is not None
        return (Status.UNRESPONSIVE if lives else Status.LOST), ending or ""

    def _final(self, name: str) -> tuple[str, str] | None:
        """The final status that a worker has reported, and the error that ended it. None if it has reported nothing."""
        try:
            status, error = self.names.get(f"status/{name}")
        except NameTableError:
            return None
        return str(status), str(error)

    # ---- the end ---------------------------------------------------------------------------

    def has_ended(self, worker_name: str) -> bool:
        """Whether a worker that this panel has launched has ended. Then another one can have its name."""
        return worker_name not in self._launched or self._launched[worker_name].ending() is not None

    def stacks(self, worker_name: str) -> str:
        """What each thread of a worker does now, if this panel has launched it on this machine. It answers while C code
        holds the interpreter lock too."""
        worker = self._own(worker_name)
        return worker.stacks() if worker_name in self._peers else "it has not started yet"

    def kill(self, worker_name: str) -> None:
        """Kill a worker that this panel has launched as a process. Raises `ClusterError` for another name."""
        self._own(worker_name).kill()

    def pid(self, worker_name: str) -> int:
        """The process id of a worker that this panel has launched. Raises `ClusterError` for another name."""
        return self._own(worker_name).pid

    def count_suspensions(self) -> int:
        """How often this process was suspended for more than 5 s, perhaps with its machine. Workers may have ended
        since they heard nothing of it."""
        with self._look_lock:
            before, self._looked = self._looked, clock()
            self._n_suspensions += self._looked - before > _SUSPENDED_SECONDS
            return self._n_suspensions

    def _ending(self, name: str) -> str | None:
        """How a worker that was launched here has ended. None while it runs, and for another worker."""
        worker = self._launched.get(name)
        return None if worker is None else worker.ending()

    def _own(self, name: str) -> Launched:
        if name not in self._launched:
            raise ClusterError(f"this panel has launched no worker {name!r}: panel.worker_names lists the workers")
        return self._launched[name]

    def close(self, timeout: float = 5.0) -> None:
        """Let the launched workers exit, kill them if they take longer than `timeout` seconds, and close the wire.
        Calling it again does nothing."""
        if self._closing.is_set():
            return
        running = [name for name, worker in self._launched.items() if worker.ending() is None]
        if self._start is not None:  # those that have joined end too: the trial ends with its panel
            running += [name for name, peer in self._peers.items() if name not in self._launched and not peer.is_dead]
        ending: list[str] = []
        try:
            if running and not self._wire.is_closed:
                self.autoconnect()
                answers = self.group_request("exit", names=running, timeout=max(0.01, min(timeout, 2.0)))
                ending = [
                    answer.worker_name
                    for answer in answers
                    if answer.is_ok and answer.worker_name not in self._launched
                ]
        finally:
            self._closing.set()
            self._watcher.join()
            deadline = time.monotonic() + timeout
            for name, worker in self._launched.items():
                if not worker.wait(max(0.0, deadline - time.monotonic())):
                    worker.kill()
                    what = (
                        "its thread ends with this process" if isinstance(worker, LaunchedThread) else "it was killed"
                    )
                    _log.warning("worker %s has not ended within %g s: %s", name, timeout, what)
            with contextlib.suppress(ClusterError):  # those that have joined report their end before the table goes
                while time.monotonic() < deadline and self.names.followed("workers").keys() & {
                    f"workers/{name}" for name in ending
                }:
                    time.sleep(0.01)
            with contextlib.suppress(ClusterError):  # without the name table nobody knows
                for key, (status, text) in self.names.find("status").items() if running else ():
                    if status == Status.ERROR.value and (name := key.partition("/")[2]) in running:
                        self.failed_at_end[name] = text
            self._resources.close()

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise ClusterError("this control panel was closed: make another one")

    def _peer(self, name: str) -> Peer:
        peer = self._peers.get(name)
        if peer is None or peer.is_dead:
            self.autoconnect()
            peer = self._peers.get(name)
        if peer is None:
            raise PeerLostError(f"there is no worker {name!r}: panel.worker_names lists the workers")
        return peer

    def _forget(self, name: str) -> None:
        peer = self._peers.pop(name, None)
        if peer is not None:
            peer.lose("it was forgotten")
        for root in ("status", "workers", "figures"):
            self.names.clear(f"{root}/{name}")

    def _watch(self) -> None:
        """In a thread: if a launched worker has ended, fail the requests to it."""
        before: set[Launched] = set()
        while not self._closing.wait(_WATCH_SECONDS):
            self.count_suspensions()
            ended: set[Launched] = set()
            for name, worker in list(self._launched.items()):
                peer = self._peers.get(name)
                if peer is not None and not peer.is_dead and (ending := worker.ending()) is not None:
                    ended.add(worker)
                    if worker in before:  # at the first look, its last reply may be on the way
                        peer.lose(ending)
            before = ended


#: The name that users of SRL know.
WorkerControlPanel = ControlPanel


def _trial(name: str, wire: str, host: str | None, resources: ExitStack) -> tuple[Any, Any]:
    """How to join a new trial, and what starts a worker in it."""
    if wire == "local":
        return Connection.make(name), LaunchedThread
    if wire == "zmq":
        return Connection.make(name, host=host or "127.0.0.1"), LaunchedProcess
    import ray

    from penstock.distributed.launch_ray import LaunchedActor
    from penstock.distributed.placement import connect

    resources.callback(connect(None, 1, dashboard=False))
    return Connection.make(name, host=ray.util.get_node_ip_address()), LaunchedActor


def _need_descriptors(n: int, count: int) -> None:
    """Without these, connections fail, and nothing says why."""
    needed = psutil.Process().num_fds() + n + 50  # of those that have started, some are not open yet
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ConfigError(
            f"{count} more workers need {needed} file descriptors in this process, and its limit is {hard}: "
            "raise it (ulimit -Hn), or start fewer workers here and let others join"
        )
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _listed(names: Iterable[str]) -> Iterable[str]:
    """`names`. Raises `ConfigError` for one name: its letters are no names."""
    if isinstance(names, str):
        raise ConfigError(f"names must be a list of names, got {names!r}: write [{names!r}]")
    return names


def _response(name: str, future: Future[Any]) -> Response:
    try:
        return Response(name, future.result())
    except ClusterError as error:
        timed_out, lost = isinstance(error, NoReplyError), isinstance(error, PeerLostError)
        return Response(name, error=str(error), timed_out=timed_out, lost=lost)
