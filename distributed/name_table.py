"""The name table on a wire: what serves it, and a client, which keeps the names that it has added.

A client always has one request at the table, its *sync*. It renews the lease of the client and writes entries. The
table answers when something has changed below the names that the client follows, or after some time: the more clients
there are, the later. So nobody looks a name up again and again, and the table has some 300 requests a second at most.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from penstock.distributed.messages import BadMessageError, plain_copy
from penstock.distributed.names import MOST_BYTES, PAGE, Names, prefixes, size_of, too_long
from penstock.distributed.wire import LOST_SECONDS, Call, Inbox, Node, Peer, Request
from penstock.errors import ClusterError, NameTableError, NoReplyError, PeerLostError, RequestError

INBOX = "names"
LEASE_SECONDS = 3.0
_SYNC_SECONDS = 0.5  # how long a sync waits, if nothing changes
_MOST_SYNCS = 300  # a second, of all clients
_SILENT_SECONDS = 20.0  # until a sync without an answer is given up
_PATIENCE_SECONDS = 5.0  # until the first question whether a sync has arrived
_RETRY_SECONDS = 0.25
_MOST_STEP = 1.0  # a process that has not looked at its clock for longer was suspended
_NAME_ERROR = "NameTableError: "  # begins a reply that the client raises as `NameTableError`


@dataclass
class _Sync:
    """A sync that waits for its answer."""

    call: Call
    owner: str
    roots: frozenset[str]
    since: list[Any]  # its sender has seen the changes up to this one: `[id of the table, number]`
    after: str  # its sender asks for its own keys that come after this one
    pace: float  # seconds that it waits if nothing changes
    until: float


class NameHost:
    """Serves a name table as the inbox "names" of `wire`, in the threads of that wire. Close it before the wire."""

    def __init__(self, wire: Node) -> None:
        self._wire, self._looked, self._skipped = wire, time.monotonic(), 0.0
        self._names = Names(self._clock)
        self._lock, self._looked_at = threading.Lock(), self._names.last
        self._syncs: dict[str, _Sync] = {}  # those that wait, by owner
        self._by_roots: dict[frozenset[str], dict[str, _Sync]] = {}  # by roots: most clients follow the same names
        self._deadlines: list[tuple[float, int, _Sync]] = []  # a heap; one that was answered stays in it until then
        self._numbers = itertools.count()  # so that two syncs are never compared
        self._inbox: Inbox = wire.open(INBOX, self._answer)
        wire.on_tick.append(self._tick)

    def _clock(self) -> float:
        """Seconds of leases. The time in which this process was suspended does not count: nobody could renew then."""
        now = time.monotonic()
        self._skipped += max(0.0, now - self._looked - _MOST_STEP)
        self._looked = now
        return now - self._skipped

    def close(self) -> None:
        """Answer no more. The owners of entries add them to the next table."""
        self._wire.on_tick.remove(self._tick)
        self._inbox.close()

    def _answer(self, call: Call) -> None:
        try:
            message = dict(call.message)
            what = message.pop("call")
            if what not in ("sync", "add", "delete", "clear"):
                return call.fail(f"the name table has no call {what!r}")
            with self._lock:
                if what == "sync":
                    answers = self._sync(call, **message)
                else:
                    answers = [(call, getattr(self._names, what)(**message))]
        except NameTableError as error:
            return call.fail(f"{_NAME_ERROR}{error}")
        except Exception as error:  # not a message for a name table
            return call.fail(f"{type(error).__name__}: {error}")
        for each, result in answers:  # not with the lock: an answer may bring the next request, in this thread
            _reply(each, result)
        return None

    def _sync(
        self,
        call: Call,
        *,
        owner: str,
        lease: float,
        since: list[Any],
        roots: list[str],
        entries: dict[str, Any],
        is_urgent: bool,
        after: str = "",
    ) -> list[tuple[Call, Any]]:
        """Keep a sync until there is something to tell, unless it is urgent. Returns the calls that are answered
        now."""
        names, now = self._names, time.monotonic()
        pace = max(min(_SYNC_SECONDS, lease / 4), len(self._syncs) / _MOST_SYNCS)
        lease = max(lease, 3 * pace)
        names.renew(owner, lease)
        for key, (value, is_lasting) in entries.items():
            with contextlib.suppress(NameTableError):  # another owner has it now
                names.add(key, value, owner=owner, lease=None if is_lasting else lease)
        sync = _Sync(call, owner, frozenset(roots), since, after, pace, now + pace)
        if is_urgent:
            return [(call, self._answer_to(sync))]
        if names.has_changed(sync.roots, since):
            sync.until = 0.0  # the next tick answers: not earlier, since more may change until then
        if (old := self._syncs.get(owner)) is not None:
            self._remove(old)
        self._syncs[owner] = self._by_roots.setdefault(sync.roots, {})[owner] = sync
        heapq.heappush(self._deadlines, (sync.until, next(self._numbers), sync))
        return [] if old is None else [(old.call, None)]

    def _remove(self, sync: _Sync) -> None:
        """It waits no more."""
        del self._syncs[sync.owner]
        del self._by_roots[sync.roots][sync.owner]
        if not self._by_roots[sync.roots]:
            del self._by_roots[sync.roots]

    def _answer_to(self, sync: _Sync) -> dict[str, Any]:
        """The answer to a sync."""
        changes, last = self._names.changes(sync.roots, sync.since)
        keys, until = self._names.page_of_keys(sync.owner, sync.after)
        answer = {"since": last, "is_last": last == self._names.last, "changes": changes, "pace": sync.pace}
        return {**answer, "keys": keys, "until": until}

    def _tick(self, now: float) -> None:
        with self._lock:
            self._names.expire()
            due: dict[str, _Sync] = {}
            for roots, waiting in self._by_roots.items():
                if self._names.has_changed(roots, self._looked_at):
                    due |= waiting
            while self._deadlines and self._deadlines[0][0] <= now:
                sync = heapq.heappop(self._deadlines)[2]
                if self._syncs.get(sync.owner) is sync:
                    due[sync.owner] = sync
            self._looked_at = self._names.last
            for sync in due.values():
                self._remove(sync)
            answers = [(sync.call, self._answer_to(sync)) for sync in due.values()]
        for call, answer in answers:
            _reply(call, answer)


def _reply(call: Call, answer: object) -> None:
    """An answer that cannot be sent fails this call alone."""
    try:
        call.reply(answer)
    except BadMessageError as error:
        call.fail(f"the name table cannot answer: {error}")


@dataclass(eq=False)
class _Watch:
    keys: list[str]
    until: str  # "any" or "all": how many of the keys must be gone
    seen: set[str]  # the keys that were in the table
    gone: Future[Any] = field(default_factory=Future)

    def left(self, found: Mapping[str, Any]) -> list[str]:
        return [key for key in self.keys if key in self.seen and key not in found]

    def ends(self, found: Mapping[str, Any], changes: Iterable[str]) -> bool:
        self.seen |= {*changes} & {*self.keys}
        return len(self.left(found)) >= (1 if self.until == "any" else len(self.keys))


class NameClient:
    """The name table, as one wire sees it. Names that it adds stay for as long as the wire is open.

    All calls raise `NoReplyError` if the table cannot be reached for `timeout` seconds.

    Args:
        wire: the requests go over it, and its id is the owner of the names.
        address: where the table is.
        timeout: seconds that a call waits for the table.
        lease: seconds after which the names are deleted, unless a thread of the wire renews them. With very many
            clients, the table keeps them longer.
    """

    def __init__(self, wire: Node, address: str, *, timeout: float = 10.0, lease: float = LEASE_SECONDS) -> None:
        self._wire, self._address, self._lease = wire, address, lease
        self.timeout = timeout
        self._entries: dict[str, tuple[Any, bool]] = {}  # key: value, whether it stays when this wire is closed
        self._unsent: dict[str, None] = {}  # keys of entries that the next syncs write, in this order
        self._after = ""  # the next sync asks which of the keys after this one the table has
        self._changed = threading.Condition()  # of everything below
        self._roots: Counter[str] = Counter()
        self._found: dict[str, tuple[Any, float]] = {}  # all names below the roots: value, when it came
        self._coming: dict[str, tuple[Any, float]] = {}  # the same, or the part of them that has come
        self._since: list[Any] = ["", -1]
        # How many syncs were sent, the last one whose answer has all names, and the one that somebody waits for.
        self._n_syncs = self._n_known = self._n_wanted = 0
        self._watches: list[_Watch] = []
        self._sync: Request | None = None
        self._sync_at = 0.0
        #: Grows with each change of the names that are followed.
        self.version = 0
        self._silence, self._ticked = 0.0, time.monotonic()  # seconds since the table was heard of; the last tick
        #: How many seconds a sync may wait for its answer, as the table has said: it has more time for more clients.
        self.pace = 0.0
        self._peer = self._reach()
        wire.on_tick.append(self._tick)

    def _reach(self) -> Peer:
        return self._wire.reach(self._address, INBOX)

    @property
    def silence(self) -> float:
        """How many seconds the table was silent while this process ran: the time in which it was suspended, or C code
        held the interpreter lock, does not count."""
        return float("inf") if self._wire.is_closed else self._silence

    def patience(self, least: float) -> float:
        """How many seconds of silence are no sign that the table has ended: at least so many."""
        return max(least, 3 * self.pace)

    # ---- calls -----------------------------------------------------------------------------

    def add(self, key: str, value: object, *, replace: bool = False, lasting: bool = False) -> None:
        """Add a name, and add it again whenever it is missing in the table. With `lasting` it stays when this wire is
        closed.

        Raises `NameTableError` if another wire has added this name, unless `replace` is True, and `BadMessageError` if
        `value` cannot cross a wire or has more than 64 KiB.
        """
        _check_size(key, value)
        lease = None if lasting else self._lease
        self._call("add", key=key, value=value, owner=self._wire.id, lease=lease, replace=replace)
        self._entries[key] = (value, lasting)

    def write(self, key: str, value: object, *, at_once: bool = False) -> None:
        """Add or change a name of this wire, and do not wait for it: it goes with the next sync, or with one that is
        sent at once. Raises `BadMessageError` if `value` cannot cross a wire or has more than 64 KiB."""
        value = plain_copy(value)
        _check_size(key, value)
        with self._changed:
            self._entries[key] = (value, False)
            self._unsent[key] = None
        if at_once:
            self._send_sync()

    def flush(self, timeout: float) -> bool:
        """Wait until the table has what `write` was called with, for `timeout` seconds. Returns whether it has."""
        with self._changed:
            self._n_wanted = number = self._n_syncs + 1
            self._send_sync()
            self._changed.wait_for(lambda: self._n_known >= number or self._wire.is_closed, timeout)
            return self._n_known >= number

    def delete(self, key: str) -> bool:
        """Delete a name that this wire has added."""
        self._entries.pop(key, None)
        return bool(self._call("delete", key=key, owner=self._wire.id))

    def get(self, key: str) -> Any:
        """The value of `key`. Raises `NameTableError` if it does not exist."""
        found = self.find(key)
        if key not in found:
            raise NameTableError(f"there is no name {key!r} in the name table")
        return found[key]

    def find(self, root: str = "") -> dict[str, Any]:
        """All names at `root` and below, with their values, sorted by name."""
        with self._following(root, self.timeout):
            return self.followed(root)

    def clear(self, root: str) -> int:
        """Delete `root` and everything below. Their owners add them again, unless they have ended."""
        return int(self._call("clear", root=root))

    def wait(self, key: str, timeout: float) -> Any:
        """The value of `key`, as soon as there is one. Raises `NoReplyError` after `timeout` seconds."""
        until = time.monotonic() + timeout
        with self._following(key, timeout), self._changed:
            if self._changed.wait_for(lambda: key in self._found, until - time.monotonic()):
                return self._found[key][0]
        raise NoReplyError(f"the name {key!r} was not added within {timeout:g} s")

    def watch(self, keys: list[str], *, until: str = "any") -> Future[Any]:
        """A future that gets the list of the keys that are gone, when any or all of `keys` are gone. If the table
        itself ends, it gets a `PeerLostError`: watch again then. A key that was never in the table is not gone."""
        if until not in ("any", "all"):
            raise NameTableError(f'until must be "any" or "all", got {until!r}')
        for key in keys:
            self.follow(key)
        with self._changed:
            self._watches.append(watch := _Watch(list(keys), until, self._found.keys() & set(keys)))
        return watch.gone

    def peer(self, key: str) -> Peer:
        """The inbox whose address is the value of `key`. Raises `NameTableError` if it does not exist."""
        return self.reach(self.get(key))

    def reach(self, place: Any, *, lost_after: float = LOST_SECONDS) -> Peer:
        """The inbox at `place`, which is the value of a name: address, wire id and name of the inbox."""
        address, wire_id, name = place
        return self._wire.reach(str(address), str(name), target=str(wire_id), lost_after=lost_after)

    def announce(self, key: str, inbox: Inbox, *, replace: bool = False) -> None:
        """Add `key`, so that others can reach `inbox` by this name."""
        self.add(key, [self._wire.address, self._wire.id, inbox.name], replace=replace)

    # ---- names that are followed -----------------------------------------------------------

    def follow(self, root: str) -> None:
        """From now on, `followed` knows the names at `root` and below. Waits until it does."""
        self._follow(root, self.timeout)

    @contextlib.contextmanager
    def _following(self, root: str, timeout: float) -> Iterator[None]:
        self._follow(root, timeout)
        try:
            yield
        finally:
            self._roots[root] -= 1

    def _follow(self, root: str, timeout: float) -> None:
        """Follow `root`, and wait until all of its names are known as they are now."""
        with self._changed:
            if not any(self._roots[prefix] > 0 for prefix in prefixes(root)):
                self._since = [self._since[0], -1]
            self._roots[root] += 1
            is_known = self.flush(timeout)
            if not is_known or self._wire.is_closed:
                self._roots[root] -= 1
        if self._wire.is_closed:
            raise PeerLostError("the name table is lost: this wire was closed")
        if not is_known:
            raise self._silent(timeout)

    def followed(self, root: str) -> dict[str, Any]:
        """The names at `root` and below, sorted by name, without asking the table. Call `follow` before."""
        with self._changed:
            below = f"{root}/"
            keys = [key for key in self._found if not root or key == root or key.startswith(below)]
            return {key: self._found[key][0] for key in sorted(keys)}

    def newest(self, key: str) -> tuple[Any, float] | None:
        """The value of a name that is followed, and how many seconds ago it came. None if it does not exist."""
        found = self._found.get(key)
        return None if found is None else (found[0], time.monotonic() - found[1])

    def _tick(self, now: float) -> None:
        self._silence += min(now - self._ticked, _MOST_STEP)
        self._ticked = now
        if self._sync is None and now >= self._sync_at:
            self._send_sync()

    def _send_sync(self) -> None:
        with self._changed:
            self._sync, self._sync_at, self._n_syncs = None, time.monotonic() + _RETRY_SECONDS, self._n_syncs + 1
            entries, size = dict[str, list[Any]](), 0
            for key in [*self._unsent]:
                if (entry := self._entries.get(key)) is not None:
                    size += size_of(key, entry[0])
                    if size > PAGE:
                        break  # the next sync follows at once
                    entries[key] = list(entry)
                del self._unsent[key]
            message = {"call": "sync", "owner": self._wire.id, "lease": self._lease, "since": self._since}
            message |= {"roots": [root for root, n in self._roots.items() if n > 0], "entries": entries}
            message |= {"is_urgent": self._n_known < self._n_wanted or bool(self._unsent), "after": self._after}
            with contextlib.suppress(ClusterError):  # the table was lost just now: the next tick tries again
                self._sync = sync = self._live_peer().ask(message, self.patience(_SILENT_SECONDS))
                sync.add_done_callback(self._on_sync)

    def _on_sync(self, future: Future[Any]) -> None:
        """The table has answered a sync."""
        with self._changed:
            if future is not self._sync:
                return  # a newer one was sent
            self._sync = None
            answer = None if future.exception() is not None else future.result()
            if answer is None:  # the next tick sends another one, which the table answers at once
                self._n_wanted = self._n_syncs + 1
                return
            self.pace = answer["pace"]
            self._silence, now = 0.0, time.monotonic()
            after, until = self._after, answer["until"]
            self._after = until or ""
            missing = self._entries.keys() - set(answer["keys"])
            self._unsent |= dict.fromkeys(key for key in missing if after < key and (until is None or key <= until))
            is_other = "" != self._since[0] != answer["since"][0]  # another table has taken its place
            if is_other or self._since[1] < 0:
                self._coming = {}  # these are all names, or the first of them
            for key, value in answer["changes"].items():
                self._coming.pop(key, None)
                if value:
                    self._coming[key] = (value[0], now)
            self._since = answer["since"]
            if answer["is_last"]:
                self._found, self._n_known = self._coming, self._n_syncs
            self.version += bool(answer["changes"])
            ended = [each for each in self._watches if each.ends(self._found, answer["changes"]) or is_other]
            self._watches = [each for each in self._watches if each not in ended]
            self._roots.subtract(key for each in ended for key in each.keys)
            self._changed.notify_all()
        for watch in ended:
            if is_other:
                watch.gone.set_exception(PeerLostError("the name table has ended"))
            else:
                watch.gone.set_result(watch.left(self._found))
        self._send_sync()

    # ---- requests --------------------------------------------------------------------------

    def _call(self, call: str, **arguments: object) -> Any:
        deadline = time.monotonic() + self.timeout
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._silent(self.timeout)
            try:
                result = self._live_peer().ask({"call": call, **arguments}, left).result()
            except PeerLostError:  # it may come back: these calls can be made twice
                if self._wire.is_closed:
                    raise
                time.sleep(min(0.05, left))
            except NoReplyError:
                raise self._silent(self.timeout) from None
            except RequestError as error:
                _, is_name_error, text = str(error).partition(_NAME_ERROR)
                raise (NameTableError(text) if is_name_error else error) from None
            else:
                self._silence = 0.0
                return result

    def _silent(self, timeout: float) -> NoReplyError:
        return NoReplyError(f"no control panel has answered at {self._address} for {timeout:g} s: it may have ended")

    def _live_peer(self) -> Peer:
        with self._wire.lock:
            if self._peer.is_dead:
                self._peer = self._reach()
            return self._peer


def _check_size(key: str, value: object) -> None:
    if (size := size_of(key, value)) > MOST_BYTES:
        raise BadMessageError(too_long(key, size))
