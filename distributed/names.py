"""The name table: addresses of workers, and for how long they are valid. It has no thread, no socket and no clock."""

from __future__ import annotations

import heapq
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from penstock.distributed.messages import n_bytes
from penstock.errors import NameTableError

MOST_BYTES = 2**16  #: of a name with its value
PAGE = 2**17  #: bytes of names in one message, which is limited
_MOST_DELETED = 10_000  # keys that were deleted and are remembered


@dataclass
class _Entry:
    value: Any
    owner: str
    lasting: bool  # it stays when the lease of its owner has run out
    size: int  # bytes, with its key


@dataclass
class _Owner:
    deadline: float = 0.0  # when its lease runs out
    keys: set[str] = field(default_factory=set)


class Names:
    """Path keys such as `trial0/workers/actor/3`, each with a value and an owner.

    Each owner has one lease, which it renews for as long as it runs. When the lease has run out, its entries are
    deleted, except lasting ones. Changes are numbered: a client that knows all entries asks only for later changes.

    Args:
        clock: returns seconds; it never goes back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        #: The last change: `[id of this table, number]`. The id is new when deleted keys were forgotten: clients then
        #: take all entries again.
        self.last: list[Any] = [uuid.uuid4().hex[:12], 0]
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._owners: dict[str, _Owner] = {}
        self._deadlines: list[tuple[float, str]] = []  # a heap, also of leases that were renewed since
        self._changed: dict[str, int] = {}  # the last change of each key, in the order of the changes
        self._changed_below: dict[str, int] = {}  # the last change of each path: of it, or of something below it

    def add(self, key: str, value: object, *, owner: str, lease: float | None = None, replace: bool = False) -> None:
        """Add an entry, and renew the lease of its owner, for so many seconds. None: the entry is lasting.

        Raises `NameTableError` if another owner has the key, unless `replace` is True, and if the value is too long.
        """
        if not isinstance(key, str) or not key or not all(key.split("/")) or len(key) > 500:
            text = "a name is a path such as 'trial0/workers/actor/3', at most 500 characters"
            raise NameTableError(f"{text}, got {key!r}")
        if lease is not None and not lease > 0:
            raise NameTableError(f"the lease of {key!r} must be longer than 0 s, got {lease!r}")
        if (size := size_of(key, value)) > MOST_BYTES:
            raise NameTableError(too_long(key, size))
        self.expire()
        old = self._entries.get(key)
        if old is not None and old.owner != owner:
            if not replace:
                raise NameTableError(
                    f"the name {key!r} is taken by {old.owner}: choose another one, or wait until that ends"
                )
            self._delete(key)
        self._entries[key] = _Entry(value, owner, lease is None, size)
        self._owners.setdefault(owner, _Owner()).keys.add(key)
        if lease is not None:
            self.renew(owner, lease)
        self._note(key)

    def renew(self, owner: str, lease: float) -> None:
        """Renew the lease of `owner`."""
        self.expire()
        found = self._owners.setdefault(owner, _Owner())
        found.deadline = self._clock() + lease
        heapq.heappush(self._deadlines, (found.deadline, owner))

    def keys_of(self, owner: str) -> set[str]:
        """The keys of `owner`, which adds missing ones again."""
        return self._owners[owner].keys if owner in self._owners else set()

    def page_of_keys(self, owner: str, after: str) -> tuple[list[str], str | None]:
        """The keys of `owner` that come after this text, sorted, as many as fit into a message. Also the last one of
        them, or None if these are all."""
        found, size = list[str](), 0
        for key in sorted(key for key in self.keys_of(owner) if key > after):
            size += n_bytes(key)
            if size > PAGE // 2:
                return found, found[-1]
            found.append(key)
        return found, None

    def delete(self, key: str, *, owner: str) -> bool:
        """Delete `key`, if it belongs to `owner`. Returns whether it was deleted."""
        self.expire()
        if key not in self.keys_of(owner):
            return False
        self._delete(key)
        return True

    def clear(self, root: str) -> int:
        """Delete `root` and everything below it. Returns how many entries there were. `a/b` is below `a`, `ab` is
        not."""
        self.expire()
        keys = [key for key in self._entries if root in prefixes(key)]
        for key in keys:
            self._delete(key)
        return len(keys)

    def has_changed(self, roots: frozenset[str], since: Sequence[Any]) -> bool:
        """Whether a root, or something below one, has changed after `since`. True if `since` is of another table."""
        number = self._number(since)
        return number < 0 or any(self._changed_below.get(root, -1) > number for root in roots)

    def changes(self, roots: frozenset[str], since: Sequence[Any]) -> tuple[dict[str, list[Any]], list[Any]]:
        """The entries below `roots` that have changed after the change `since`: `[value]` for each key, and `[]` if it
        was deleted; as many as fit into a message. Also the last change that this has."""
        found: dict[str, list[Any]] = {}
        last, size = [*since], 0
        number, keys = self._number(since), list[str]()
        if self.has_changed(roots, since):
            keys = [*takewhile(lambda key: self._changed[key] > number, reversed(self._changed))]
        for key in reversed(keys):
            if not roots.isdisjoint(prefixes(key)):
                entry = self._entries.get(key)
                size += n_bytes(key) if entry is None else entry.size
                if size > PAGE:
                    return found, last
                found[key] = [] if entry is None else [entry.value]
                last = [self.last[0], self._changed[key]]
        return found, self.last

    def _number(self, since: Sequence[Any]) -> int:
        """The number in `since`; -1 if that is of another table."""
        return int(since[1]) if since[0] == self.last[0] else -1

    def expire(self) -> None:
        """Delete entries whose lease has ended."""
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            owner = heapq.heappop(self._deadlines)[1]
            found = self._owners.get(owner)
            if found is not None and found.deadline <= now:
                for key in [key for key in found.keys if not self._entries[key].lasting]:
                    self._delete(key)
                if not found.keys:
                    del self._owners[owner]

    def _delete(self, key: str) -> None:
        self._owners[self._entries.pop(key).owner].keys.discard(key)
        self._note(key)

    def _note(self, key: str) -> None:
        table, number = self.last
        self.last = [table, number + 1]
        self._changed.pop(key, None)
        self._changed[key] = number + 1
        for path in prefixes(key):
            self._changed_below[path] = number + 1
        if len(self._changed) > len(self._entries) + _MOST_DELETED:  # forget the deleted keys
            self._changed = {key: number for key, number in self._changed.items() if key in self._entries}
            self._changed_below = {path: n for key, n in self._changed.items() for path in prefixes(key)}
            self.last = [uuid.uuid4().hex[:12], number + 1]


def size_of(key: str, value: object) -> int:
    """How many bytes a name has in a message."""
    return n_bytes(key) + n_bytes(value) + 10


def too_long(key: str, size: int) -> str:
    """What is wrong with a name of so many bytes."""
    return (
        f"the value of the name {key!r} has {size:,} bytes. At most {MOST_BYTES:,} are possible: the name table is for "
        "addresses and figures, so send long values in a request or a stream"
    )


def prefixes(key: str) -> list[str]:
    """`key`, and every path above it."""
    found = ["", key]
    while (end := key.rfind("/")) >= 0:
        key = key[:end]
        found.append(key)
    return found
