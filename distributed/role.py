"""A worker of a distributed experiment, and the server through which a control panel commands it."""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.distributed.messages import BadMessageError, describe
from penstock.distributed.names import NameClient
from penstock.distributed.statuses import FINAL, Status, StatusMachine
from penstock.distributed.wire import Call, Node
from penstock.errors import ClusterError, ConfigError, RequestError

if TYPE_CHECKING:
    from penstock.distributed.keys import Connection

_log = logging.getLogger("penstock")

Handler = Callable[..., Any]

ORPHAN_SECONDS = 30.0  # a worker that has not heard of the name table for so long ends, or saves what it has and waits
_IDLE_SECONDS = 0.002  # between polls that had nothing to do
_STATS_SECONDS = 0.5  # how often a worker updates its figures
_MOST_TEXT = 4000  # characters of the error that has ended a worker
_END_SECONDS = 2.0  # how long a worker that ends waits for an urgent handler, and for the name table
#: What every worker answers.
_COMMANDS = ("configure", "reconfigure", "start", "pause", "exit", "interrupt", "ping", "status", "stats", "stacks")


def clock() -> float:
    """Seconds, with those in which the machine was suspended, where the system counts them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def check_handler(command: str, handler: Handler) -> None:
    """Raise `ConfigError` unless `command` is text and `handler` can be called."""
    if not isinstance(command, str) or not callable(handler):
        raise ConfigError(f"a handler is the name of a command and a function, got {command!r} and {handler!r}")


@dataclass(frozen=True)
class PollResult:
    """What one poll has done. If both are 0, the worker waits 2 ms before the next poll."""

    sample_count: int = 0
    batch_count: int = 0


class WorkerServer:
    """Receives the requests to one worker. Urgent handlers run at once, in the thread of this server. The others run in
    the worker's own thread, when it calls `handle`."""

    def __init__(self, wire: Node, name: str) -> None:
        self._handlers: dict[str, Handler] = {}
        self._urgent: set[str | None] = set()
        self._requests: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self.inbox = wire.open(f"worker/{name}")
        self._thread = threading.Thread(target=self._receive, name=f"server of {name}", daemon=True)
        self._thread.start()

    def register(self, command: str, handler: Handler, *, urgent: bool = False) -> None:
        """Call `handler(**kwargs)` for requests of this command. The result is sent: see `messages` for its types."""
        self._handlers[command] = handler
        (self._urgent.add if urgent else self._urgent.discard)(command)

    def handle(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for a request, and answer all that wait."""
        try:
            call = self._requests.get(timeout=timeout) if timeout else self._requests.get_nowait()
            while call is not None:
                call.run(self._handlers)
                call = self._requests.get_nowait()
        except queue.Empty:
            pass

    def wake(self) -> None:
        """End a `handle` that waits."""
        self._requests.put(None)

    def close(self) -> None:
        """Answer no more requests."""
        self.inbox.close()
        self._thread.join(_END_SECONDS)

    def _receive(self) -> None:
        while (call := self.inbox.receive()) is not None:
            if call.command in self._urgent:
                with contextlib.suppress(BaseException):  # the sender knows it, and other requests follow
                    call.run(self._handlers)
            else:
                self._requests.put(call)


class Worker:
    """Subclass it, and override `_configure` and `_poll`, and perhaps `_reconfigure`, `_stats` and `_close`.

    You can use `self.name`, `self.wire` and `self.names` from `_configure` on.

    Commands: configure, reconfigure, start, pause, exit, interrupt, ping, status, stats, stacks, and those that you add
    with `register_handler`.
    """

    name: str
    wire: Node
    names: NameClient
    configure_error = ""  #: why it could not be configured
    # Other attributes have names that begin with `_worker_`, so that a subclass does not use the same names.

    # ---- for subclasses --------------------------------------------------------------------

    def _configure(self, *args: Any, **config: Any) -> None:
        """Prepare for polling. If it raises, the worker stays READY, and can be configured again."""

    def _reconfigure(self, *args: Any, **config: Any) -> None:
        """Change the configuration between two polls."""
        raise RequestError("reconfigure: this worker has nothing to reconfigure")

    def _poll(self) -> PollResult | None:
        """One piece of work, of limited length: between two polls the worker answers requests."""
        raise NotImplementedError

    def _stats(self) -> Mapping[str, float]:
        """Figures for the panels. Called twice a second between polls and after each command, once it is configured."""
        return {}

    def _on_silence(self) -> float:
        """The panel has been silent for 30 s: it is suspended, or the network is broken. Save here what must not be
        lost. Returns the seconds of silence after which this worker ends; until then it waits, and does not poll. With
        0 it ends now. A worker that its panel has launched as a process goes on in any case: it ends with its pipe."""
        return 0.0

    def _close(self) -> None:
        """Release what `_configure` has acquired. Called once at the end, whatever the status."""

    def register_handler(self, command: str, handler: Handler, *, urgent: bool = False) -> None:
        """Answer requests of this command with `handler(**kwargs)`: between two polls, or with `urgent` at once, in
        another thread. Raises `ConfigError` if every worker has a command of this name."""
        check_handler(command, handler)
        if command in _COMMANDS:
            raise ConfigError(f"every worker has the command {command!r}: choose another name for this handler")
        self._worker_server.register(command, handler, urgent=urgent)

    @property
    def status(self) -> Status:
        """The status. A long poll should return early if this is COMPLETED or INTERRUPTED."""
        return self._worker_machine.status

    # ---- the loop --------------------------------------------------------------------------

    def run(self, connection: Connection, name: str, *, ends_with_panel: bool = False) -> Status:
        """Join a trial, and work until a command or an error ends this worker. Returns the final status.

        Something else ends it with its panel if `ends_with_panel`. Otherwise it ends when the name table was silent for
        30 s, or for as long as `_on_silence` returns.
        """
        self._worker_ends_with_panel = ends_with_panel
        self._worker_heard: float | None = None  # by `clock`, when the table was heard last, if it is silent
        self.name, self._worker_machine = name, StatusMachine()
        self._worker_counts = {"samples": 0, "batches": 0, "polls": 0}
        self._worker_figures: dict[str, float] = {}
        self._worker_thread, self._worker_began = threading.get_ident(), time.monotonic()
        self.wire = connection.wire()
        try:
            self.names = NameClient(self.wire, connection.address)
            self._worker_server = server = WorkerServer(self.wire, name)
            text, is_announced = "", False
            try:
                self._register_commands(server)
                self._push(at_once=True)  # first: a panel that finds this worker finds its status too
                self.names.announce(f"workers/{name}", server.inbox)  # raises if another worker has this name
                is_announced = True
                self.names.clear(f"status/{name}")
                self._loop(server)
            except BaseException as error:
                text = describe(error)
                self._worker_machine.fail()
                _log.exception("worker %s has failed", name)
            try:
                self._close()
            except BaseException as error:  # SystemExit too: what it should have saved is lost
                self._worker_machine.fail()
                text = text or f"_close raised {describe(error)}"
                _log.exception("worker %s could not close", name)
            if is_announced:
                self._report_end(text)
            server.close()
        finally:
            self.wire.close()
        return self._worker_machine.status

    def _report_end(self, text: str) -> None:
        """Write the final status into the name table."""
        self.names.timeout = _END_SECONDS  # the table may have ended
        try:
            text = (
                text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} ... ({len(text):,} characters: see its log)"
            )
            self.names.add(f"status/{self.name}", [self._worker_machine.status.value, text], replace=True, lasting=True)
            self.names.delete(f"workers/{self.name}")
            self.names.delete(f"figures/{self.name}")
        except ClusterError as error:
            _log.warning("worker %s could not report that it has ended: %s", self.name, str(error))

    def _loop(self, server: WorkerServer) -> None:
        machine, next_stats, idle = self._worker_machine, 0.0, 0.0
        status: Status | None = None
        while machine.status not in FINAL:
            waits = self._worker_heard is not None and not self._worker_ends_with_panel
            server.handle(idle if machine.status is Status.RUNNING and not waits else 0.2)
            if not waits and machine.begin_poll():
                result = self._poll() or PollResult()
                if not isinstance(result, PollResult):
                    raise ConfigError(f"_poll must return a PollResult or None, got {result!r}")
                self._worker_counts["polls"] += 1
                self._worker_counts["samples"] += result.sample_count
                self._worker_counts["batches"] += result.batch_count
                idle = 0.0 if result.sample_count or result.batch_count else _IDLE_SECONDS
            now = time.monotonic()
            is_due = now >= next_stats or machine.status is not status
            if is_due:
                next_stats, status = now + _STATS_SECONDS, machine.status
                self._worker_figures = {**self._worker_counts, **(self._stats() if machine.is_configured else {})}
                self._check_silence()
            has_paused = is_due and status is Status.PAUSED
            if has_paused and machine.shown != Status.PAUSED.value:
                self._push(at_once=False, status=Status.PAUSED.value)
                self.names.flush(_END_SECONDS)  # who sees that it is PAUSED finds these figures
            machine.end_poll(has_new_figures=has_paused)
            if is_due:
                self._push(at_once=self._worker_shown != machine.shown)

    def _misses_panel(self, share: float = 1.0) -> bool:
        """Whether the panel was silent for this share of the time after which this worker ends, or waits. False if this
        worker goes on in any case."""
        return not self._worker_ends_with_panel and self.names.silence > share * ORPHAN_SECONDS

    def _check_silence(self) -> None:
        """Raise `ClusterError` if the panel was silent for too long."""
        if self.wire.is_closed:
            raise ClusterError("the name table is lost: the wire of this worker was closed")
        silence = self.names.silence
        if silence <= ORPHAN_SECONDS:
            if self._worker_heard is not None:
                _log.warning("worker %s: the name table answers again", self.name)
            self._worker_heard = None
            return
        if self._worker_heard is None:
            self._worker_heard = clock() - silence
            _log.warning("worker %s: the name table was silent for %.0f s", self.name, silence)
            self._worker_patience = self._on_silence()
        silence = clock() - self._worker_heard
        if silence > self._worker_patience and not self._worker_ends_with_panel:
            limit = f", and this worker waits for {self._worker_patience:g} s" if self._worker_patience else ""
            raise ClusterError(
                f"the name table was silent for {silence:.0f} s{limit}: its control panel has ended or was suspended, "
                "or the network is broken"
            )

    def _register_commands(self, server: WorkerServer) -> None:
        machine = self._worker_machine

        def change(command: str) -> Callable[[], str]:
            def run() -> str:
                status = machine.apply(command)
                self._push(at_once=True)
                server.wake()
                return status

            return run

        for command in ("start", "pause", "exit", "interrupt"):
            server.register(command, change(command), urgent=True)
        server.register("ping", lambda: "pong", urgent=True)
        server.register("status", lambda: machine.shown, urgent=True)
        server.register("stats", self._report, urgent=True)
        server.register("stacks", self._stacks, urgent=True)
        server.register("configure", self._configure_once)
        server.register("reconfigure", self._reconfigure_now)

    def _configure_once(self, **config: Any) -> str:
        self._worker_machine.check_configure()
        try:
            self._configure(**config)
        except BaseException as error:
            if self.status not in FINAL:  # otherwise it was told to end meanwhile
                self.configure_error = describe(error)
                _log.exception("worker %s could not be configured", self.name)
            raise
        self.configure_error, self._worker_machine.is_configured = "", True
        return self._worker_machine.shown

    def _reconfigure_now(self, **config: Any) -> str:
        if not self._worker_machine.is_configured:
            raise RequestError("reconfigure: the worker is not configured: send configure first")
        self._reconfigure(**config)
        return self._worker_machine.shown

    def _report(self) -> dict[str, Any]:
        seconds = time.monotonic() - self._worker_began
        report = {"status": self._worker_machine.shown, "seconds": seconds}
        return {**report, **self._worker_figures, **report}

    def _push(self, *, at_once: bool, status: str | None = None) -> None:
        """Write the figures into the name table, where the panels read them; with `status` in place of its own."""
        key, figures = f"figures/{self.name}", self._report()
        figures["status"] = status or figures["status"]
        self._worker_shown = figures["status"]
        try:
            self.names.write(key, figures, at_once=at_once)
        except BadMessageError as error:
            text = f"stats raised BadMessageError: {error}"
            self.names.write(key, {"status": figures["status"], "seconds": figures["seconds"], "text": text})

    def _stacks(self) -> str:
        frame = sys._current_frames().get(self._worker_thread)
        return "".join(traceback.format_stack(frame)) if frame is not None else "the worker's thread has ended"
