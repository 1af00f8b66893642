"""The control panel of a trial: it starts workers, commands them, and shows their statuses."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import psutil

from penstock import system
from penstock.arguments import integer, must_be, one_of, seconds
from penstock.distributed.closing import Closing
from penstock.distributed.keys import Connection
from penstock.distributed.launched import LaunchedProcess, LaunchedThread, snake
from penstock.distributed.names import LEASE_SECONDS, NameClient, NameTable, is_place, natural
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
_STATUSES = {status.value for status in Status}
_SUSPENDED_SECONDS = 5.0  # no look at the clock for so long
# Of this process for each worker: its pipe, its stacks, and two connections; or in a thread, all of its node.
_DESCRIPTORS, _DESCRIPTORS_OF_THREAD, _DESCRIPTORS_OF_JOINED = 5, 24, 2
WHERE_ITS_LOG_IS = "its log is in the standard error of this program, or on Ray in Ray's log folder"
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
        for argument, text in (("experiment", experiment), ("trial", trial)):
            must_be(argument, text, isinstance(text, str) and text, "a name")
        must_be("host", host, isinstance(host, str | None), "an address of this machine")
        must_be("file", file, file is None or (isinstance(file, str | Path) and file != ""), "the path of a file")
        one_of("wire", wire, get_args(WireName))
        if wire != "zmq" and (host or port or file):
            raise ConfigError(f'host, port and file are for wire="zmq", not for {wire!r}')
        with ExitStack() as resources:
            connection, self._start = _trial(f"{experiment}/{trial}", wire, host, resources)
            node = connection.wire(port)
            resources.callback(node.close)
            table = NameTable(lambda: node.clock)
            self._launched: dict[str, Launched] = {}
            table.admit = self._admit
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
        panel._start, panel._launched = None, {}
        panel._begin(wire, connection, resources)
        return panel

    def _begin(self, wire: Node, connection: Connection, resources: ExitStack, table: NameTable | None = None) -> None:
        self.connection, self._resources = connection, resources
        self.wire = wire  #: the node of this panel, for streams and inboxes of your own
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
        worker: Callable[[], Worker],
        count: int = 1,
        *,
        name: str | None = None,
        first: int = 0,
        resources: Mapping[str, float] | None = None,
    ) -> list[str]:
        """Start workers, and return their names: `name/first`, `name/first+1`, ...

        Args:
            worker: a `Worker` subclass, or another callable that makes a worker.
            name: by default that of the class, as in `my_worker` for `MyWorker`.
            resources: what Ray reserves for each, such as `{"CPU": 2, "GPU": 1}`; by default nothing. Other wires
                reserve nothing.

        Over sockets, the panel needs 5 file descriptors for each worker: this raises the soft limit of its process if
        that is too low, and raises `ConfigError` if the hard limit is.
        """
        self._check_open()
        if self._start is None:
            raise ConfigError("this panel has joined a trial: only the panel that began the trial launches workers")
        if not callable(worker) or (isinstance(worker, type) and not issubclass(worker, Worker)):
            raise ConfigError(f"launch needs a subclass of Worker, or a function that makes a worker, got {worker!r}")
        integer("count", count, least=0)
        integer("first", first, least=0)
        is_name = isinstance(name, str) and all(name.split("/")) and name.isprintable() and len(name) <= 400
        must_be("name", name, name is None or is_name, "a name such as 'worker'")
        must_be("resources", resources, isinstance(resources, Mapping | None), "a dict such as {'CPU': 2}")
        per_worker = _DESCRIPTORS_OF_THREAD if self._start is LaunchedThread else _DESCRIPTORS
        _need_descriptors(count * per_worker, f"{count} more workers need")
        base = name or snake(worker.func if isinstance(worker, partial) else worker)
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
            self._launched[worker_name] = self._start(worker, self.connection, worker_name, resources or {})
        return names

    def _admit(self, key: str) -> None:
        """In the node's thread: raise `NameTableError` if no descriptor is left for a worker that joins."""
        name = key.removeprefix("workers/")
        if name != key and name not in self._launched:
            try:
                _need_descriptors(_DESCRIPTORS_OF_JOINED, f"with worker {name}, which wants to join, its panel needs")
            except ConfigError as error:
                raise NameTableError(str(error)) from error

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
        self.wire.require_own()
        ending = self._ending(worker_name)
        if ending is not None:
            final = self._final(worker_name)
            reason = f": {final[1]}" if final else f"; {WHERE_ITS_LOG_IS}"
            raise ClusterError(f"worker {worker_name} has ended before it could be reached ({ending}){reason}")

    def autoconnect(self) -> list[str]:
        """Connect to all workers that the name table lists. Returns their names."""
        self._check_open()
        for key, place in self.names.find("workers").items():
            if not is_place(place):  # it is no worker
                continue
            name = key.partition("/")[2]
            peer = self._peers.get(name)
            if self._ending(name) is not None:
                continue  # its entry in the table has not run out yet
            if peer is None or peer.is_dead or peer.place != place:
                # The watcher sees the end of a launched worker: it may be silent for as long as it lives.
                silence = float("inf") if name in self._launched else LOST_SECONDS
                self._peers[name] = self.names.reach(place, lost_after=silence)
        return sorted((name for name, peer in self._peers.items() if not peer.is_dead), key=natural)

    @property
    def worker_names(self) -> list[str]:
        """All workers that this panel has launched or connected to, `worker/10` after `worker/9`."""
        return sorted({*self._launched, *self._peers}, key=natural)

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
            kwargs: the same for all, or a list with one for each worker, in the order of `names`, or of
                `worker_names`: `worker/10` comes after `worker/9`.
        """
        self.wire.require_own()
        try:
            pattern = re.compile(must_be("regex", regex or ".*", isinstance(regex, str | None), "text"), re.DOTALL)
        except re.error as error:
            raise ConfigError(f"regex={regex!r} is no regular expression: {error}") from error
        chosen = [*filter(pattern.fullmatch, self.worker_names if names is None else _listed(names))]
        is_one = isinstance(kwargs, Mapping | None)
        dicts: Any = [kwargs or {}] * len(chosen) if is_one else kwargs
        is_list = isinstance(dicts, Sequence) and all(isinstance(each, Mapping) for each in dicts)
        must_be("kwargs", kwargs, is_list, "a dict, or a list with one dict for each worker")
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
        told = {each.worker_name: each.result if isinstance(each.result, str) else "" for each in responses}
        if Status.PAUSED.value in told.values():
            self.names.flush(timeout)  # `stats` has all that they have done
        return {
            name: Status(text) if text in _STATUSES else self._status_from_outside(name)[0]
            for name, text in told.items()
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
            known = {*self._launched, *self._peers, *(key[len("figures/") :] for key in self.names.keys("figures"))}
            names = sorted(known, key=natural)
        table: dict[str, dict[str, Any]] = {}
        for name in _listed(names):
            figures = self.names.newest(f"figures/{name}")
            report, age = figures or (None, 0.0)
            if isinstance(report, dict) and isinstance(report.get("status"), str) and self._ending(name) is None:
                table[name] = {**report, "age": age}
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
                if key != "status" and not (isinstance(value, str) and not value)
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
        final: Any = self.names.find(key := f"status/{name}").get(key)
        return (final[0], final[1]) if _is_final(final) else None

    # ---- the end ---------------------------------------------------------------------------

    def has_ended(self, worker_name: str) -> bool:
        """Whether a worker that this panel has launched has ended. Then another one can have its name."""
        self.wire.require_own()
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
        self.wire.require_own()
        if name not in self._launched:
            raise ClusterError(f"this panel has launched no worker {name!r}: panel.worker_names lists the workers")
        return self._launched[name]

    def close(
        self, timeout: float = 5.0, *, longer: Mapping[str, float] | None = None, hang_timeout: float = 60.0
    ) -> None:
        """Let all workers exit, kill the launched ones that take too long, and close the wire. Calling it again does
        nothing, and nor does a call in a fork of its process.

        Args:
            timeout: seconds that a worker may take.
            longer: more seconds for some workers, by name. One that is silent for `hang_timeout` seconds is killed
                earlier. `failed_at_end` has those of them that have not reported that they have closed.
        """
        if not self.is_own or self._closing.is_set():
            return
        running = [name for name, worker in self._launched.items() if worker.ending() is None]
        if self._start is not None:  # those that have joined end too: the trial ends with its panel
            running += [name for name, peer in self._peers.items() if name not in self._launched and not peer.is_dead]
        limits, needed = dict.fromkeys(self._launched, timeout), longer or {}
        try:
            if running and not self.wire.is_closed:
                self.autoconnect()
                for answer in self.group_request("exit", names=running, timeout=max(0.01, min(timeout, 2.0))):
                    name = answer.worker_name
                    if answer.is_ok or (name in self._launched and not answer.lost):
                        limits[name] = max(timeout, needed.get(name, 0.0))
        finally:
            self._closing.set()
            self._watcher.join()
            try:
                self._wait_for_ends(limits, timeout, max(timeout, hang_timeout), needed)
                self._note_failures(running, needed)
            finally:
                for worker in self._launched.values():
                    if not worker.wait(0):
                        worker.kill()
                self._resources.close()

    def _note_failures(self, running: Iterable[str], needed: Iterable[str]) -> None:
        """Note which of these workers have reported an error, and which of the `needed` ones have reported nothing."""
        finals: Any = {}
        with contextlib.suppress(ClusterError):  # without the name table nobody knows
            finals = self.names.find("status") if {*running, *needed} else {}
        for name in {*running, *needed}:
            final = finals.get(f"status/{name}")
            if _is_final(final):
                if final[0] == Status.ERROR.value:
                    self.failed_at_end[name] = final[1]
            elif name in needed and name not in self.failed_at_end:
                self.failed_at_end[name] = f"it has ended without a report ({self._ending(name) or 'nobody knows how'})"

    def _wait_for_ends(
        self, limits: Mapping[str, float], timeout: float, hang_timeout: float, needed: Container[str]
    ) -> None:
        """Wait until these workers have ended, each for so many seconds. Then kill it, if it was launched here."""
        began = time.monotonic()
        until = dict.fromkeys(limits, began + timeout)
        while until:
            now = time.monotonic()
            for name in list(until):
                worker, is_patient = self._launched.get(name), limits[name] > timeout
                is_listed = self.names.newest(f"workers/{name}") is not None  # it renews this name while it lives
                has_saved = self.names.newest(f"status/{name}") is not None  # it writes this after its `_close`
                if is_patient and has_saved:
                    until[name] = min(until[name], now + timeout)
                elif is_patient and is_listed:
                    until[name] = min(began + limits[name], now + hang_timeout)
                if worker.wait(0) if worker is not None else not is_listed:
                    del until[name]
                elif now >= until[name]:
                    del until[name]
                    if worker is not None:
                        self._give_up(name, worker, now - began, loses=name in needed and not has_saved)
            time.sleep(0.01)

    def _give_up(self, name: str, worker: Launched, seconds: float, *, loses: bool) -> None:
        """Kill a worker that has not ended."""
        worker.kill()
        what = "its thread ends with this process" if isinstance(worker, LaunchedThread) else "it was killed"
        _log.warning("worker %s has not ended within %.0f s: %s", name, seconds, what)
        if loses:
            self.failed_at_end[name] = f"it has not ended within {seconds:.0f} s, so {what}"

    @property
    def is_own(self) -> bool:
        """Whether this process has made it. A fork of that process cannot use it: its calls raise `ClusterError`."""
        return not self.wire.left

    def _check_open(self) -> None:
        self.wire.require_own()
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

    resources.callback(connect(1))
    return Connection.make(name, host=ray.util.get_node_ip_address()), LaunchedActor


def _need_descriptors(n: int, who: str) -> None:
    """Raise the soft limit for n more. Without them, connections fail, and nothing says why."""
    needed = psutil.Process().num_fds() + n + 50  # of those that have started, some are not open yet
    if needed > (limit := system.allow_files(needed)):
        raise ConfigError(
            f"{who} {needed} file descriptors in the process of the panel, whose limit is {limit}: raise it there "
            "(ulimit -Hn), or use fewer workers"
        )


def _listed(names: Iterable[str]) -> list[str]:
    """`names`. Raises `ConfigError` for one name: its letters are no names."""
    if isinstance(names, str):
        raise ConfigError(f"names must be a list of names, got {names!r}: write [{names!r}]")
    listed = list(must_be("names", names, isinstance(names, Iterable), "a list of names"))
    return [must_be("a name", name, isinstance(name, str), "text") for name in listed]


def _is_final(value: object) -> bool:
    """Whether this is what a worker reports at its end: a status and a text."""
    return isinstance(value, list) and [*map(type, value)] == [str, str] and value[0] in _STATUSES


def _response(name: str, future: Future[Any]) -> Response:
    try:
        return Response(name, future.result())
    except ClusterError as error:
        timed_out, lost = isinstance(error, NoReplyError), isinstance(error, PeerLostError)
        return Response(name, error=str(error), timed_out=timed_out, lost=lost)
