"""The name table on a wire: the thread that serves it, and a client, which renews the names that it has added."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future
from typing import Any, cast

from penstock.control.names import Names
from penstock.control.wire import Inbox, Letter, Peer, Wire
from penstock.errors import NameTableError, NoReplyError, PeerLostError, RequestError

INBOX = "names"
LEASE_SECONDS = 3.0
_NAME_ERROR = "NameTableError: "  # begins a reply that the client raises as `NameTableError`


class NameHost:
    """Serves a name table as the inbox "names" of `wire`. Close it before the wire."""

    def __init__(self, wire: Wire) -> None:
        self._names = Names(time.monotonic)
        self._inbox: Inbox = wire.open(INBOX)
        self._waiting: dict[str, Letter] = {}
        self._thread = threading.Thread(target=self._run, name="name table", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. The owners of entries add them to the next table."""
        self._inbox.close()
        self._thread.join()

    def _run(self) -> None:
        due_at = 0.0
        while not self._inbox.is_closed:
            letter = self._inbox.receive(0.05)
            if letter is not None:
                self._answer(letter)
            if self._waiting and (letter is not None or time.monotonic() >= due_at):
                due_at = time.monotonic() + 0.05
                for token, value in self._names.due():
                    if (waiting := self._waiting.pop(token, None)) is not None:
                        waiting.reply(value)

    def _answer(self, letter: Letter) -> None:
        try:
            message = dict(letter.message)
            call = message.pop("call")
            if call in ("wait", "watch"):
                message["token"] = token = str(message["token"])
                getattr(self._names, call)(**message)
                self._waiting[token] = letter
            elif call == "forget":
                self._names.forget(str(message["token"]))
                self._waiting.pop(str(message["token"]), None)
                letter.reply()
            elif call in ("add", "renew", "get", "delete", "find", "clear"):
                letter.reply(getattr(self._names, call)(**message))
            else:
                letter.fail(f"the name table has no call {call!r}")
        except NameTableError as error:
            letter.fail(f"{_NAME_ERROR}{error}")
        except Exception as error:  # not a message for a name table
            letter.fail(f"{type(error).__name__}: {error}")


class NameClient:
    """The name table, as one wire sees it. Names that it adds stay for as long as the wire is open.

    All calls raise `NoReplyError` if the table cannot be reached for `timeout` seconds.

    Args:
        address: where the table is.
        timeout: seconds.
        lease: seconds after which a name is deleted, unless it is renewed. A thread of the wire does that.
    """

    def __init__(self, wire: Wire, address: str, *, timeout: float = 10.0, lease: float = LEASE_SECONDS) -> None:
        self._wire, self._address, self._lease = wire, address, lease
        self.timeout = timeout
        self._entries: dict[str, tuple[Any, bool]] = {}  # key: value, whether it stays when this wire is closed
        self._peer = self._reach()
        self._renew_at = 0.0
        #: When the table was last heard of, by `time.monotonic()`.
        self.heard = time.monotonic()
        wire.on_tick.append(self._tick)

    def _reach(self) -> Peer:
        return self._wire.reach(self._address, INBOX)

    # ---- calls -----------------------------------------------------------------------------

    def add(self, key: str, value: object, *, replace: bool = False, lasting: bool = False) -> None:
        """Add a name, and add it again whenever it is missing in the table. With `lasting` it stays when this wire is
        closed.

        Raises `NameTableError` if another wire has added this name, unless `replace` is True.
        """
        lease = None if lasting else self._lease
        self._call("add", key=key, value=value, owner=self._wire.id, lease=lease, replace=replace)
        self._entries[key] = (value, lasting)

    def delete(self, key: str) -> bool:
        """Delete a name that this wire has added."""
        self._entries.pop(key, None)
        return bool(self._call("delete", key=key, owner=self._wire.id))

    def get(self, key: str) -> Any:
        """The value of `key`. Raises `NameTableError` if it does not exist."""
        return self._call("get", key=key)

    def find(self, root: str = "", *, timeout: float | None = None) -> dict[str, Any]:
        """All names at `root` and below, with their values."""
        return cast(dict[str, Any], self._call("find", timeout, root=root))

    def clear(self, root: str) -> int:
        """Delete `root` and everything below. Their owners add them again, unless they have ended."""
        return int(self._call("clear", root=root))

    def wait(self, key: str, timeout: float) -> Any:
        """The value of `key`, as soon as there is one. Raises `NoReplyError` after `timeout` seconds."""
        token = f"{self._wire.id}.{next(self._wire.numbers)}"
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            # A separate peer: the replies to other requests can then be forgotten while this one waits.
            peer = self._reach()
            try:
                return peer.ask({"call": "wait", "key": key, "token": token}, left).result()
            except PeerLostError:  # the table was closed, and may be opened again
                time.sleep(min(0.1, left))
            except NoReplyError:
                break
            finally:
                peer.release()
        with contextlib.suppress(PeerLostError):
            self._live_peer().ask({"call": "forget", "token": token}, self.timeout)  # nobody needs the answer
        raise NoReplyError(f"the name {key!r} was not added within {timeout:g} s")

    def watch(self, keys: list[str], *, until: str = "any") -> Future[Any]:
        """A future that gets the list of the keys that are gone, when any or all of `keys` are gone. If the table
        itself ends, it gets a `PeerLostError`: watch again then. A key that was never in the table is not gone."""
        token, peer = f"{self._wire.id}.{next(self._wire.numbers)}", self._reach()
        gone = peer.ask({"call": "watch", "keys": keys, "token": token, "until": until}, 1e9)
        gone.add_done_callback(lambda _: peer.release())
        return gone

    def peer(self, key: str, *, credit: int = 16) -> Peer:
        """The inbox whose address is the value of `key`. Raises `NameTableError` if it does not exist."""
        return self.reach(self.get(key), credit=credit)

    def reach(self, place: Any, *, credit: int = 16) -> Peer:
        """The inbox at `place`, which is the value of a name: address, wire id and name of the inbox."""
        address, wire_id, name = place
        return self._wire.reach(str(address), str(name), target=str(wire_id), credit=credit)

    def announce(self, key: str, inbox: Inbox, *, replace: bool = False) -> None:
        """Add `key`, so that others can reach `inbox` by this name."""
        self.add(key, [self._wire.address, self._wire.id, inbox.name], replace=replace)

    def _call(self, call: str, timeout: float | None = None, /, **arguments: Any) -> Any:
        timeout = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._silent(timeout)
            try:
                result = self._live_peer().ask({"call": call, **arguments}, left).result()
            except PeerLostError:  # it may come back: these calls can be made twice
                if self._wire.is_closed:
                    raise
                time.sleep(min(0.05, left))
            except NoReplyError:
                raise self._silent(timeout) from None
            except RequestError as error:
                _, is_name_error, text = str(error).partition(_NAME_ERROR)
                raise (NameTableError(text) if is_name_error else error) from None
            else:
                self.heard = time.monotonic()
                return result

    def _silent(self, timeout: float) -> NoReplyError:
        return NoReplyError(f"no control panel has answered at {self._address} for {timeout:g} s: it may have ended")

    def _live_peer(self) -> Peer:
        with self._wire.lock:
            if self._peer.is_dead:
                self._peer = self._reach()
            return self._peer

    # ---- leases ----------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        if now < self._renew_at:
            return
        self._renew_at = now + self._lease / 4
        with contextlib.suppress(PeerLostError):  # it was lost just now: the next tick tries again
            renewed = self._live_peer().ask({"call": "renew", "owner": self._wire.id}, self._lease)
            renewed.add_done_callback(self._add_missing)

    def _add_missing(self, renewed: Future[Any]) -> None:
        """The table has answered with the keys that it has of this wire. Add the others again."""
        if renewed.exception() is not None:
            return
        self.heard = time.monotonic()
        missing = self._entries.keys() - set(renewed.result())
        for key in missing:
            entry = self._entries.get(key)
            if entry is not None:
                value, lasting = entry
                lease = None if lasting else self._lease
                message = {"call": "add", "key": key, "value": value, "owner": self._wire.id, "lease": lease}
                with contextlib.suppress(PeerLostError):
                    self._live_peer().ask(message, self._lease)
