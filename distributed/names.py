"""The name table: addresses of workers, and their figures.

The owner of names sends all of them at each *beat*, and so renews its lease. A beat comes twice a second, or less often
if there are more than 75 owners. The answer has all names that the owner follows, if one of them has changed.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import Any

import msgpack
import numpy as np

from penstock.distributed.messages import BadMessageError, decode, encode, packer
from penstock.distributed.wire import LOST_SECONDS, Inbox, Node, Peer
from penstock.errors import NameTableError, NoReplyError, PeerLostError, RequestError, brief

INBOX = "names"
LEASE_SECONDS = 3.0  # the least
MOST_BYTES = 2**16  #: of the value of a name
_BEAT_SECONDS = 0.5
_MOST_BEATS = 150  # a second, of all owners, as long as each has one within `_LONGEST_SECONDS`
_LONGEST_SECONDS = 10.0  # a third of the silence after which a worker ends
_RETRY_SECONDS = 0.25  # after a beat that has failed


@lru_cache(2**16)
def natural(name: str) -> str:
    """For sorting: `w/10` comes after `w/9`."""
    return f"{re.sub('0*([0-9]+)', lambda digits: f'{len(digits[1]):03}{digits[1]}', name)} {name}"


def below(keys: Iterable[str], *roots: str) -> list[str]:
    """Those of `keys` at one of `roots` or below, sorted. `a/b` is below `a`, `ab` is not; all are below ""."""
    if "" in roots:
        return sorted(keys)
    heads = tuple(f"{root}/" for root in roots)
    return sorted(key for key in list(keys) if key.startswith(heads) or key in roots)


def is_place(value: object) -> bool:
    """Whether the value of a name is where an inbox is: address, node id and name of the inbox."""
    return isinstance(value, list) and [*map(type, value)] == [str, str, str]


def check_key(key: object) -> None:
    """Raise `NameTableError` for what can be no name: one such key in a beat would stop all names of its owner."""
    if not isinstance(key, str) or not all(key.split("/")) or len(key) > 500 or not key.isprintable():
        raise NameTableError(
            "a name is a path such as 'trial0/workers/actor/3', of at most 500 characters that can be printed, got "
            f"{brief(key)}"
        )


class NameTable:
    """Path keys such as `workers/actor/3`, each with a packed value and an owner. It has no thread, no socket and no
    clock of its own. When the lease of an owner has run out, its names are deleted, except lasting ones.

    Args:
        clock: returns seconds; it never goes back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._id, self.version = clock, uuid.uuid4().hex[:12], 0
        #: By key: value, owner, whether it is lasting, when it came.
        self.entries: dict[str, tuple[bytes, str, bool, float]] = {}
        self._until: dict[str, float] = {}  # the leases, by owner
        self._next_end, self._n_ended = 0.0, 0  # no lease ends before; how many have ended
        # By the first part of a key: the last version that has changed something there; for "", that of all.
        self._changed: dict[str, int] = {}
        #: Called with each key that somebody wants to add. It may raise `NameTableError`.
        self.admit: Callable[[str], None] = lambda key: None

    def serve(self, node: Node) -> Inbox:
        """Answer the requests to the inbox "names" of `node`, in its thread."""
        handlers: dict[str, Callable[..., Any]] = {"add": self.add, "delete": self.delete, "clear": self.clear}
        handlers["find"] = lambda roots: pack_table(self.find(roots))
        handlers["beat"] = lambda entries, **others: self.beat(entries=unpack_table(entries), **others)
        node.on_tick.append(lambda now: self.expire())
        return node.open(INBOX, lambda call: call.run(handlers))

    @property
    def pace(self) -> float:
        """Seconds between two beats of an owner. Everything that depends on it has three times as long."""
        return min(_LONGEST_SECONDS, max(_BEAT_SECONDS, len(self._until) / _MOST_BEATS))

    def add(self, key: str, value: bytes, owner: str, lasting: bool = False, replace: bool = False) -> None:
        """Add a name, and renew the lease of its owner. Raises `NameTableError` if another owner has the key, unless
        `replace`, and for what is no name."""
        self.expire()
        self.admit(key)
        self._put(key, value, owner, lasting, replace)
        self._renew(owner)

    def _put(self, key: str, value: bytes, owner: str, lasting: bool, replace: bool = False) -> None:
        check_key(key)
        if [type(value), type(owner), type(lasting)] != [bytes, str, bool] or len(value) > MOST_BYTES:
            raise NameTableError(f"the name {key!r} has no value, or no owner")
        old = self.entries.get(key)
        if old is not None and old[1] != owner and not replace:
            raise NameTableError(f"the name {key!r} is taken by {old[1]}: choose another one, or wait until that ends")
        if old is None or old[:3] != (value, owner, lasting):
            self.entries[key] = value, owner, lasting, time.monotonic()
            self._note(key)

    def _renew(self, owner: str) -> None:
        self._until[owner] = until = self._clock() + max(LEASE_SECONDS, 3 * self.pace)
        self._next_end = min(self._next_end, until)

    def _note(self, key: str) -> None:
        self.version += 1
        self._changed[""] = self._changed[key.partition("/")[0]] = self.version

    def _delete(self, key: str) -> None:
        del self.entries[key]
        self._note(key)

    def delete(self, key: str, owner: str) -> bool:
        """Delete a name of `owner`. Returns whether it was there."""
        self.expire()
        has = key in self.entries and self.entries[key][1] == owner
        if has:
            self._delete(key)
        return has

    def clear(self, root: str) -> int:
        """Delete `root` and everything below. Returns how many names there were."""
        self.expire()
        keys = below(self.entries, root)
        for key in keys:
            self._delete(key)
        return len(keys)

    def find(self, roots: Sequence[str]) -> dict[str, bytes]:
        """The names at `roots` and below, sorted."""
        self.expire()
        return {key: self.entries[key][0] for key in below(self.entries, *roots)}

    def beat(
        self, owner: str, entries: Mapping[str, Any], roots: Sequence[str], since: Sequence[Any], n_ended: int = -1
    ) -> dict[str, Any]:
        """Renew the lease of `owner`, and keep its `entries`: value and whether it is lasting. The answer has all names
        at `roots` and below, as `pack_table` returns them, if one has changed after the version `since`.

        A beat may be old: when a broken link works again, the system delivers what a process had sent before it died.
        So an owner without a lease must send `n_ended`, the number of leases that have ended. Only a living owner has
        got it, in an answer with `is_kept` False."""
        self.expire()
        if owner not in self._until and n_ended != self._n_ended:
            return {"is_kept": False, "n_ended": self._n_ended, "pace": self.pace}
        self._renew(owner)
        for key, (value, lasting) in entries.items():
            if self.entries.get(key, ())[:3] != (value, owner, lasting):
                with contextlib.suppress(NameTableError):  # another owner has it now
                    self._put(key, value, owner, lasting)
        table, number = since
        news = [root for root in roots if self._changed.get(root.partition("/")[0], 0) > number or table != self._id]
        answer = {"is_kept": True, "n_ended": self._n_ended, "pace": self.pace, "since": [self._id, self.version]}
        return {**answer, "found": pack_table(self.find(roots)) if news else None}

    def expire(self) -> None:
        """Delete the names whose leases have ended."""
        if (now := self._clock()) < self._next_end:
            return
        ended = {owner for owner, until in self._until.items() if until <= now}
        for owner in ended:
            del self._until[owner]
        self._n_ended += len(ended)
        self._next_end = min(self._until.values(), default=float("inf"))
        for key in [key for key, entry in self.entries.items() if entry[1] in ended and not entry[2]] if ended else ():
            self._delete(key)


class NameClient:
    """The name table, as one node sees it. Names that it adds stay for as long as the node is open.

    All calls raise `NoReplyError` if the table cannot be reached for `timeout` seconds, at first 10.

    Args:
        wire: the requests go through this node, and its id is the owner of the names.
        address: where the table is.
        table: the table itself, if this node serves it: then `followed` is never late.
    """

    def __init__(self, wire: Node, address: str, *, table: NameTable | None = None) -> None:
        self._wire, self._address, self.timeout, self._own = wire, address, 10.0, table
        self._entries: dict[str, tuple[bytes, bool]] = {}  # key: value, whether it stays when this node is closed
        self._changed = threading.Condition()  # of everything below
        self._roots: set[str] = set()
        self._found: dict[str, tuple[bytes, float]] = {}  # all names below the roots: value, when it came
        self._values: dict[str, tuple[bytes, Any]] = {}  # what was read last: packed, and unpacked
        self._version = 0
        #: Seconds between two beats, as the table has said: they are seldom if there are many owners.
        self.pace = 0.0
        self._heard, self._next = wire.clock, 0.0  # when the table was heard of, and the next beat, by the node's clock
        self._asked: list[str] | None = None  # the roots of the beat that has no answer yet
        self._since: list[Any] = ["", -1]
        self._n_begun = self._n_done = 0  # beats
        self._n_ended = -1  # how many leases have ended, as the table has said
        self._peer = self._reach()
        wire.on_tick.append(self._tick)

    def _reach(self) -> Peer:
        return self._wire.reach(self._address, INBOX, lost_after=float("inf"))

    def require_own(self) -> None:
        """Raise `ClusterError` in a fork of the process that has made the wire."""
        self._wire.require_own()

    @property
    def version(self) -> int:
        """Grows with each change of the names that are followed."""
        return self._version if self._own is None else self._own.version

    @property
    def silence(self) -> float:
        """How many seconds the table was silent while this process ran: the time in which it was suspended, or C code
        held the interpreter lock, does not count."""
        return float("inf") if self._wire.is_closed else self._wire.clock - self._heard

    # ---- calls -----------------------------------------------------------------------------

    def add(self, key: str, value: object, *, replace: bool = False, lasting: bool = False) -> None:
        """Add a name, and add it again whenever it is missing in the table. With `lasting` it stays when this node is
        closed.

        Raises `NameTableError` if another node has added this name, unless `replace` is True, and `BadMessageError` if
        `value` cannot be sent or has more than 64 KiB.
        """
        packed = _packed(key, value)
        self.require_own()
        self._call("add", key=key, value=packed, owner=self._wire.id, lasting=lasting, replace=replace)
        self._entries[key] = (packed, lasting)

    def announce(self, key: str, inbox: Inbox, *, replace: bool = False) -> None:
        """Add `key`, so that others can reach `inbox` by this name."""
        self.add(key, [self._wire.address, self._wire.id, inbox.name], replace=replace)

    def write(self, key: str, value: object, *, at_once: bool = False) -> None:
        """Add or change a name of this node, and do not wait for it: it goes with the next beat, or at once. Raises
        `NameTableError` for what can be no name, and `BadMessageError` if `value` cannot be sent or has more than 64
        KiB."""
        self.require_own()
        self._entries[key] = (_packed(key, value), False)
        if at_once:
            self._beat_soon()

    def flush(self, timeout: float) -> bool:
        """Wait until the table has what `write` was called with, and `followed` what the table has, for `timeout`
        seconds. Returns whether they have."""
        self.require_own()
        wire = self._wire
        with self._changed:
            number = self._n_begun + 1
            self._beat_soon()
            return (
                self._changed.wait_for(lambda: self._n_done >= number or wire.is_closed, timeout) and not wire.is_closed
            )

    def delete(self, key: str) -> bool:
        """Delete a name that this node has added."""
        self.require_own()
        self._entries.pop(key, None)
        return bool(self._call("delete", key=key, owner=self._wire.id))

    def clear(self, root: str) -> int:
        """Delete `root` and everything below. Their owners add them again, unless they have ended."""
        return int(self._call("clear", root=root))

    def find(self, root: str = "") -> dict[str, Any]:
        """All names at `root` and below, with their values, sorted by name. A value that is no message is left out."""
        entries: dict[str, Any] = {}
        for key, value in unpack_table(self._call("find", roots=[root])).items():
            with contextlib.suppress(BadMessageError):
                entries[key] = decode([value])
        return entries

    def get(self, key: str) -> Any:
        """The value of `key`. Raises `NameTableError` if it does not exist."""
        if key not in (entries := self.find(key)):
            raise NameTableError(f"there is no name {key!r} in the name table")
        return entries[key]

    def wait(self, key: str, timeout: float) -> Any:
        """The value of `key`, as soon as there is one. Raises `NoReplyError` after `timeout` seconds."""
        until = time.monotonic() + timeout
        while key not in (entries := self.find(key)):
            if time.monotonic() > until:
                raise NoReplyError(f"the name {key!r} was not added within {timeout:g} s")
            time.sleep(0.05)
        return entries[key]

    def reach(self, place: Any, *, lost_after: float = LOST_SECONDS) -> Peer:
        """The inbox at `place`, which is the value of a name: address, node id and name of the inbox."""
        address, node_id, name = place
        return self._wire.reach(str(address), str(name), target=str(node_id), lost_after=lost_after)

    def _call(self, command: str, **kwargs: object) -> Any:
        deadline = time.monotonic() + self.timeout
        while (left := deadline - time.monotonic()) > 0:
            try:
                return self._live_peer().ask({"command": command, "kwargs": kwargs}, left).result()
            except NoReplyError:
                break
            except RequestError as error:
                raise NameTableError(str(error).removeprefix(f"{INBOX}: ")) from None
            except PeerLostError:  # it may come back: these calls can be made twice
                if self._wire.is_closed:
                    raise
                time.sleep(min(0.05, left))
        raise self._silent(self.timeout)

    def _silent(self, timeout: float) -> NoReplyError:
        return NoReplyError(f"no control panel has answered at {self._address} for {timeout:g} s: it may have ended")

    def _live_peer(self) -> Peer:
        with self._wire.lock:
            if self._peer.is_dead:
                self._peer = self._reach()
            return self._peer

    # ---- names that are followed -----------------------------------------------------------

    def follow(self, root: str) -> None:
        """From now on, `followed` knows the names at `root` and below. Waits until it does."""
        self.require_own()
        if self._own is not None:
            return
        with self._changed:
            if root not in self._roots:
                self._roots.add(root)
                self._since = ["", -1]
        if not self.flush(self.timeout):
            if self._wire.is_closed:
                raise PeerLostError("the name table is lost: this wire was closed")
            raise self._silent(self.timeout)

    def followed(self, root: str) -> dict[str, Any]:
        """As `find`, without asking the table. Call `follow` before."""
        return {key: found[0] for key in self.keys(root) if (found := self.newest(key)) is not None}

    def keys(self, root: str) -> list[str]:
        """The names at `root` and below, sorted, as `followed` knows them."""
        self.require_own()
        return below(self._found if self._own is None else self._own.entries, root)

    def newest(self, key: str) -> tuple[Any, float] | None:
        """The value of a name that is followed, and how many seconds ago it came. None if it does not exist, or its
        value is no message."""
        self.require_own()
        entry: Any = self._found.get(key) if self._own is None else self._own.entries.get(key)
        if entry is None:
            self._values.pop(key, None)
            return None
        if (known := self._values.get(key)) is None or known[0] is not entry[0]:
            try:
                known = entry[0], decode([entry[0]])
            except BadMessageError:
                return None
            self._values[key] = known
        return known[1], time.monotonic() - entry[-1]

    def _beat_soon(self) -> None:
        self._next = 0.0
        self._wire.do(self._tick)

    def _tick(self, now: float = 0.0) -> None:
        """In the node's thread: send a beat if it is time."""
        if self._asked is not None or self._wire.clock < self._next:
            return
        with self._changed:
            self._asked = asked = sorted(self._roots)
            self._next, self._n_begun = self._wire.clock + max(self.pace, _BEAT_SECONDS), self._n_begun + 1
            entries = pack_table(self._entries.copy())
        kwargs: dict[str, Any] = {"owner": self._wire.id, "entries": entries, "roots": asked, "since": self._since}
        kwargs["n_ended"] = self._n_ended
        try:
            request = self._live_peer().ask({"command": "beat", "kwargs": kwargs}, float("inf"))
        except PeerLostError:  # this node was closed, or the table was lost just now
            self._asked = None
        else:
            request.add_done_callback(self._on_answer)

    def _on_answer(self, request: Future[Any]) -> None:
        asked, self._asked = self._asked, None
        if request.exception() is not None:
            self._next = self._wire.clock + _RETRY_SECONDS
            return
        answer = request.result()
        self._heard, self.pace, self._n_ended = self._wire.clock, answer["pace"], answer["n_ended"]
        if not answer["is_kept"]:
            return self._beat_soon()
        with self._changed:
            if asked == sorted(self._roots):
                self._since = answer["since"]
            if answer["found"] is not None:
                old, now = self._found, time.monotonic()
                self._found = {
                    key: old[key] if key in old and old[key][0] == value else (value, now)
                    for key, value in unpack_table(answer["found"]).items()
                }
                self._version += self._found != old
            self._n_done = self._n_begun
            self._changed.notify_all()
        return self._wire.do(self._tick)


def pack_table(table: Mapping[str, Any]) -> Any:
    """A table as bytes, or as an array if it is large: the rest of a message is limited."""
    packed = packer().pack(table)
    return packed if len(packed) <= MOST_BYTES else np.frombuffer(packed, np.uint8)


def unpack_table(packed: Any) -> dict[str, Any]:
    """What `pack_table` has packed."""
    table: dict[str, Any] = msgpack.unpackb(memoryview(packed))
    return table


def _packed(key: str, value: object) -> bytes:
    """The value of a name, as the table keeps it."""
    check_key(key)
    frames = encode(value)
    if (size := sum(map(len, frames))) > MOST_BYTES or len(frames) > 1:
        raise BadMessageError(
            f"the value of the name {key!r} has {size:,} bytes. At most {MOST_BYTES:,} are possible: the name table is "
            "for addresses and figures, so send long values in a request or a stream"
        )
    packed: bytes = frames[0]
    return packed
