"""The name table: addresses of workers, and for how long they are valid. It has no thread, no socket and no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import NameTableError


@dataclass
class _Entry:
    value: Any
    owner: str
    lease: float | None  # seconds, or None: until it is deleted
    expires: float


@dataclass(frozen=True)
class _Watch:
    keys: tuple[str, ...]
    until: str  # "any" or "all": how many of the keys must be gone


class Names:
    """Path keys such as `trial0/workers/actor/3`, each with a value, an owner and a lease.

    An entry is deleted when its lease has run out. Its owner renews the lease for as long as it runs. A call that waits
    for a key, or watches keys, gives a token. `due()` returns the token when the key was added or the keys are gone.

    Args:
        clock: returns seconds; it never goes back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._waiting: dict[str, str] = {}  # token: key
        self._watching: dict[str, _Watch] = {}  # token: keys
        self._seen: dict[str, set[str]] = {}  # token: the keys that were in the table since the watch began

    # ---- entries ---------------------------------------------------------------------------

    def add(self, key: str, value: object, *, owner: str, lease: float | None = None, replace: bool = False) -> None:
        """Add an entry. Its owner may add it again, which renews it.

        Raises `NameTableError` if another owner has the key, unless `replace` is True.
        """
        _check(key)
        if lease is not None and not lease > 0:
            raise NameTableError(f"the lease of {key!r} must be longer than 0 s, got {lease!r}")
        self._expire()
        old = self._entries.get(key)
        if old is not None and old.owner != owner and not replace:
            raise NameTableError(
                f"the name {key!r} is taken by {old.owner}: choose another one, or wait until that ends"
            )
        self._entries[key] = _Entry(value, owner, lease, self._clock() + (lease or 0.0))
        self._note_seen()

    def renew(self, owner: str) -> list[str]:
        """Renew all leases of `owner`. Returns its keys. The owner adds missing ones again."""
        self._expire()
        now = self._clock()
        mine = {key: entry for key, entry in self._entries.items() if entry.owner == owner}
        for entry in mine.values():
            entry.expires = now + (entry.lease or 0.0)
        return sorted(mine)

    def get(self, key: str) -> Any:
        """The value of `key`. Raises `NameTableError` if it does not exist."""
        self._expire()
        if key not in self._entries:
            raise NameTableError(f"there is no name {key!r} in the name table")
        return self._entries[key].value

    def delete(self, key: str, *, owner: str | None = None) -> bool:
        """Delete `key`, if it belongs to `owner` (None: to anybody). Returns whether it was deleted."""
        self._expire()
        entry = self._entries.get(key)
        if entry is None or owner not in (None, entry.owner):
            return False
        del self._entries[key]
        return True

    def find(self, root: str = "") -> dict[str, Any]:
        """All entries at `root` and below, sorted by key. `a/b` is below `a`, `ab` is not."""
        self._expire()
        return {key: self._entries[key].value for key in sorted(self._entries) if _is_below(key, root)}

    def clear(self, root: str) -> int:
        """Delete `root` and everything below it. Returns how many entries there were."""
        keys = list(self.find(root))
        for key in keys:
            del self._entries[key]
        return len(keys)

    # ---- waiting ---------------------------------------------------------------------------

    def wait(self, key: str, token: str) -> None:
        """From now on, `due()` returns `token` once, with the value of `key`, as soon as there is one."""
        _check(key)
        self._waiting[token] = key

    def watch(self, keys: Sequence[str], token: str, *, until: str = "any") -> None:
        """From now on, `due()` returns `token` once, with the keys that are gone, when any or all of `keys` are gone. A
        key that was never in the table is not gone."""
        for key in keys:
            _check(key)
        if until not in ("any", "all"):
            raise NameTableError(f'until must be "any" or "all", got {until!r}')
        self._watching[token], self._seen[token] = _Watch(tuple(keys), until), set()
        self._expire()
        self._note_seen()

    def forget(self, token: str) -> None:
        """Stop waiting or watching."""
        for table in (self._waiting, self._watching, self._seen):
            table.pop(token, None)

    def due(self) -> list[tuple[str, Any]]:
        """Tokens whose key was added, with its value, and tokens whose keys are gone, with these keys."""
        self._expire()
        found = [(token, self._entries[key].value) for token, key in self._waiting.items() if key in self._entries]
        for token, watch in self._watching.items():
            gone = [key for key in watch.keys if key in self._seen[token] and key not in self._entries]
            if gone and (watch.until == "any" or len(gone) == len(watch.keys)):
                found.append((token, gone))
        for token, _ in found:
            self.forget(token)
        return found

    def _note_seen(self) -> None:
        for token, watch in self._watching.items():
            self._seen[token].update(key for key in watch.keys if key in self._entries)

    def _expire(self) -> None:
        now = self._clock()
        for key in [key for key, entry in self._entries.items() if entry.lease is not None and entry.expires <= now]:
            del self._entries[key]


def _is_below(key: str, root: str) -> bool:
    return not root or key == root or key.startswith(f"{root}/")


def _check(key: object) -> None:
    if not isinstance(key, str) or not key or not all(key.split("/")) or len(key) > 500:
        raise NameTableError(f"a name is a path such as 'trial0/workers/actor/3', at most 500 characters, got {key!r}")
