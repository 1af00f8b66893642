"""The contract of a node: the same tests for direct links, and for links that are cut, with packets that come twice."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for

import numpy as np
import pytest

from penstock import ClusterError, NoReplyError, PeerLostError, RequestError
from penstock.distributed import InferenceClient, SampleProducer, messages
from penstock.distributed.messages import BadMessageError
from penstock.distributed.names import NameClient, NameTable
from penstock.distributed.wire import Call, Inbox, Node, Peer

from ..scale import scaled
from .support import LateLink, Wires, in_four_threads, wait_until

pytestmark = [pytest.mark.timeout(scaled(1800, 120)), pytest.mark.slow]


@pytest.fixture(params=["direct", "cut"])
def wires(request: pytest.FixtureRequest) -> Iterator[Wires]:
    made = Wires(request.param)
    yield made
    made.close()


class Echo:
    """Answers in a thread: dicts with "fail" fail, "drop" is not answered, everything else comes back."""

    def __init__(self, inbox: Inbox) -> None:
        self.inbox, self.n_calls, self.kept = inbox, 0, list[Call]()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (call := self.inbox.receive()) is not None:
            self.n_calls += 1
            if isinstance(call.message, str) and call.message == "drop":
                self.kept.append(call)
            elif isinstance(call.message, dict) and "fail" in call.message:
                call.fail(call.message["fail"])
            else:
                call.reply(call.message)

    def close(self) -> None:
        self.inbox.close()
        self._thread.join(10)


@pytest.fixture
def server(wires: Wires) -> Node:
    return wires()


@pytest.fixture
def inbox(server: Node) -> Inbox:
    return server.open("echo")


@pytest.fixture
def echo(inbox: Inbox) -> Iterator[Echo]:
    made = Echo(inbox)
    yield made
    made.close()


@pytest.fixture
def peer(wires: Wires, inbox: Inbox) -> Peer:
    return wires().reach(inbox.node.address, "echo", target=inbox.node.id)


def received(inbox: Inbox) -> Call:
    """The next call."""
    call = inbox.receive(20)
    assert call is not None
    return call


class TestContract:
    # ---- messages --------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "message",
        [None, True, 0, -(2**63), 2**64 - 1, 1.5, "text", b"\x00\xff", [], [1, [2, [None]]], {"a": {"b": []}}],
        ids=repr,
    )
    def test_values_arrive_as_they_were(self, peer: Peer, echo: Echo, message: object) -> None:
        reply = peer.ask(message, 10).result()
        assert (reply, type(reply)) == (message, type(message))

    @pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "float32", ">f8", "complex64"])
    @pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)])
    def test_arrays_arrive_as_they_were(self, peer: Peer, echo: Echo, dtype: str, shape: tuple[int, ...]) -> None:
        array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
        reply = peer.ask({"deep": [array]}, 10).result()["deep"][0]
        assert (reply.dtype, reply.shape) == (array.dtype, array.shape)
        assert (reply == array).all()

    def test_an_array_is_copied_when_it_is_sent(self, peer: Peer, inbox: Inbox) -> None:
        array = np.zeros(3)
        future = peer.ask(array, 10)
        array[:] = 1
        call = received(inbox)
        assert call.message.tolist() == [0, 0, 0]
        call.reply()
        future.result()

    def test_views_of_every_order_arrive_as_read_only_arrays(self, peer: Peer, echo: Echo) -> None:
        array = np.arange(24).reshape(2, 3, 4)
        for view in (array.T, array[:, ::2], np.asfortranarray(array), np.broadcast_to(array[:, :1], (2, 3, 4))):
            reply = peer.ask(view, 10).result()
            assert (reply == view).all()
            with pytest.raises(ValueError, match="read-only"):
                reply[:] = 1

    def test_tuples_arrive_as_lists_and_numpy_scalars_as_numbers(self, peer: Peer, echo: Echo) -> None:
        assert peer.ask((1, np.float32(0.5), np.int64(7)), 10).result() == [1, 0.5, 7]

    def test_a_large_array_is_refused_at_once(
        self, wires: Wires, peer: Peer, echo: Echo, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wires.mend()
        monkeypatch.setattr(messages, "_MOST_FRAMES", 5)
        array = np.zeros(2**20, np.uint8)
        assert peer.ask(array, 20).result().nbytes == 2**20
        error = r"have 2 MiB, and at most 1 MiB can cross a wire at once: .* a smaller batch_T or batch_B of the actors"
        with pytest.raises(BadMessageError, match=error):
            peer.ask([np.zeros(2**20, np.uint8)] * 2, 20)
        with pytest.raises(BadMessageError, match=r"300,005 bytes beside its arrays, .* put long data into arrays"):
            peer.ask("x" * 300_000, 20)

    @pytest.mark.parametrize(
        "message",
        [object(), {1: 2}, {"a": {2}}, np.array(["text"]), np.array([None]), 2**64, [lambda: 0]],
        ids=["object", "int-key", "set", "str-array", "object-array", "large-int", "function"],
    )
    def test_what_cannot_cross_is_refused_at_once(self, peer: Peer, echo: Echo, message: object) -> None:
        with pytest.raises(BadMessageError):
            peer.ask(message, 10)
        assert peer.ask("still here", 10).result() == "still here"

    def test_deep_nesting_is_refused(self, peer: Peer, echo: Echo) -> None:
        message: list[object] = []
        for _ in range(200):
            message = [message]
        with pytest.raises(ClusterError):
            peer.ask(message, 10).result()

    def test_a_large_array_and_many_small_ones_arrive(self, wires: Wires, peer: Peer, echo: Echo) -> None:
        wires.mend()
        array = np.arange(2_000_000, dtype=np.int32)
        assert (peer.ask(array, 20).result() == array).all()
        arrays = [np.arange(i, dtype=np.float64) for i in range(300)]  # the first ones go into the header
        reply = peer.ask(arrays, 20).result()
        assert [array.tolist() for array in reply] == [array.tolist() for array in arrays]

    # ---- requests --------------------------------------------------------------------------

    def test_replies_may_come_in_any_order(self, peer: Peer, inbox: Inbox) -> None:
        futures = [peer.ask(i, 10) for i in range(5)]
        for call in reversed([received(inbox) for _ in range(5)]):
            call.reply(call.message * 10)
        assert [future.result() for future in futures] == [0, 10, 20, 30, 40]

    def test_a_failure_reaches_the_sender(self, peer: Peer, echo: Echo) -> None:
        with pytest.raises(RequestError, match="echo: no such colour"):
            peer.ask({"fail": "no such colour"}, 10).result()

    def test_a_request_ends_at_its_deadline_and_a_later_reply_is_ignored(self, peer: Peer, echo: Echo) -> None:
        began = time.monotonic()
        with pytest.raises(NoReplyError, match="did not answer in time"):
            peer.ask("drop", 0.4).result()
        assert 0.3 < time.monotonic() - began < 5
        wait_until(lambda: len(echo.kept) == 1)
        echo.kept[0].reply("late")
        assert peer.ask("next", 10).result() == "next"

    def test_a_slow_reply_is_waited_for(self, peer: Peer, inbox: Inbox) -> None:
        future = peer.ask("work", 20)
        call = received(inbox)
        assert wait_for([future], 1.2).done == set()  # several probes are answered meanwhile
        call.reply("done")
        assert future.result() == "done"

    def test_a_request_is_answered_once(self, peer: Peer, inbox: Inbox) -> None:
        future = peer.ask("x", 10)
        call = received(inbox)
        call.reply(1)
        with pytest.raises(ClusterError, match="answered already"):
            call.reply(2)
        assert future.result() == 1

    def test_several_threads_may_use_one_peer(self, peer: Peer, echo: Echo) -> None:
        results: list[int] = []
        in_four_threads(lambda k: results.extend(peer.ask(np.array([k * 100 + i]), 20).result()[0] for i in range(10)))
        assert sorted(results) == [k * 100 + i for k in range(4) for i in range(10)]

    def test_each_of_several_waiting_threads_gets_its_reply(self, peer: Peer, inbox: Inbox) -> None:
        futures = [peer.ask(i, 20) for i in range(4)]
        with ThreadPoolExecutor(4) as threads:
            found = [threads.submit(future.result) for future in futures]
            for call in sorted([received(inbox) for _ in futures], key=lambda call: int(call.message)):
                call.reply(call.message)
                assert found[call.message].result(10) == call.message

    def test_ctrl_c_ends_a_wait_and_nothing_else(self, peer: Peer, echo: Echo) -> None:
        future = peer.ask("drop", 30)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            future.result()
        timer.join()
        assert peer.ask("still here", 20).result() == "still here"
        echo.kept[0].reply("late")
        assert future.result(20) == "late"

    def test_requests_may_be_made_in_the_callback_of_a_reply(self, peer: Peer, echo: Echo) -> None:
        second: list[object] = []
        done = threading.Event()

        def again(_: object) -> None:
            peer.ask("second", 10).add_done_callback(lambda future: (second.append(future.result()), done.set()))

        peer.ask("first", 10).add_done_callback(again)
        assert done.wait(10)
        assert second == ["second"]

    def test_what_is_remembered_of_a_sender_is_bounded(self, peer: Peer, echo: Echo) -> None:
        for _ in range(30):
            wait_for([peer.ask(1, 60) for _ in range(10)])
        peer.ask(1, 60).result()
        (sender,) = echo.inbox.node.senders.values()
        assert len(sender.replies) <= 20

    def test_a_sender_that_was_silent_for_600_s_and_has_all_answers_is_forgotten(
        self, wires: Wires, server: Node, echo: Echo
    ) -> None:
        other, done, waits = server.open("other"), wires(), wires()
        assert done.reach(server.address, "echo").ask(1, 60).result() == 1
        answer = waits.reach(server.address, "other").ask(2, 1e9)
        call = received(other)

        def after(seconds: float) -> set[str]:
            """The inboxes of the senders that the server remembers, that much later by its clock."""
            look = Future[set[str]]()

            def jump() -> None:
                server.clock += seconds
                server._tick()
                look.set_result({sender.inbox for sender in server.senders.values()})

            server.do(jump)
            return look.result(20)

        assert after(590) == {"echo", "other"}
        assert after(20) == {"other"}, "one that waits for an answer is remembered"
        call.reply(3)
        assert answer.result(60) == 3

    def test_a_peer_knows_how_many_requests_wait_and_whether_it_is_silent(self, peer: Peer, inbox: Inbox) -> None:
        with pytest.raises(BadMessageError):
            peer.ask(object(), 10)
        futures = [peer.ask(i, 20) for i in range(3)]
        calls = [received(inbox) for _ in futures]
        assert (peer.n_waiting, peer.is_silent) == (3, False)
        for call in calls:
            call.reply()
        wait_for(futures, 20)
        assert (peer.n_waiting, peer.is_silent) == (0, False)

    # ---- the other side ends ---------------------------------------------------------------

    def test_an_inbox_that_was_closed_is_lost(self, peer: Peer, echo: Echo) -> None:
        waiting = peer.ask("drop", 30)
        wait_until(lambda: len(echo.kept) == 1)
        echo.inbox.close()
        with pytest.raises(PeerLostError):
            waiting.result()
        with pytest.raises(PeerLostError, match="echo is lost"):
            peer.ask(2, 30).result()
        assert peer.is_dead
        with pytest.raises(PeerLostError):
            peer.ask(3, 10)

    def test_an_inbox_that_does_not_exist_is_lost(self, wires: Wires, server: Node) -> None:
        with pytest.raises(PeerLostError):
            wires().reach(server.address, "nobody").ask(1, 30).result()

    def test_a_silent_address_is_lost(self, wires: Wires, server: Node) -> None:
        gone = wires()
        address = gone.address
        gone.close()
        with pytest.raises(PeerLostError, match="no connection"):
            wires().reach(address, "echo", lost_after=0.5).ask(1, 30).result()

    def test_a_peer_after_a_pause_is_not_lost(self, wires: Wires, echo: Echo) -> None:
        peer = wires().reach(echo.inbox.node.address, "echo", lost_after=2.0)
        for _ in range(3):
            assert peer.ask(1, 10).result() == 1
            with pytest.raises(NoReplyError):
                peer.ask("drop", 0.4).result()

    def test_another_process_at_the_same_address_is_somebody_else(self, wires: Wires, echo: Echo) -> None:
        peer = wires().reach(echo.inbox.node.address, "echo", target="another wire")
        with pytest.raises(PeerLostError):
            peer.ask(1, 30).result()
        assert echo.n_calls == 0

    def test_closing_a_wire_ends_its_requests_and_receivers(self, wires: Wires, peer: Peer, echo: Echo) -> None:
        future = peer.ask("drop", 30)
        mine = peer.node.open("mine")
        peer.node.close()
        with pytest.raises(PeerLostError):
            future.result()
        assert mine.receive(10) is None
        peer.node.close()  # again

    def test_an_inbox_name_is_used_once(self, server: Node, inbox: Inbox) -> None:
        with pytest.raises(ClusterError, match="has an inbox 'echo' already"):
            server.open("echo")
        inbox.close()
        server.open("echo").close()

    def test_receiving_ends_after_its_timeout(self, inbox: Inbox) -> None:
        assert inbox.receive(0) is None
        assert inbox.receive(0.05) is None


def test_ten_thousand_increments_count_ten_thousand(wires: Wires) -> None:
    n = scaled(10_000, 2_000)
    inbox, count = wires().open("counter"), 0

    def serve() -> None:
        nonlocal count
        while (call := inbox.receive()) is not None:
            count += 1
            call.reply(count)

    thread = threading.Thread(target=serve)
    thread.start()
    peer = wires().reach(inbox.node.address, "counter")
    for _ in range(n // 2000):
        futures = [peer.ask("increment", 100) for _ in range(2000)]
        assert not wait_for(futures, 100).not_done
        assert all(future.exception() is None for future in futures)
    assert count == n
    if wires.make == "cut":
        assert inbox.node.counts["again"] > n // 10
        assert sum(proxy.n for proxy in wires.proxies) > 5
    inbox.close()
    thread.join()


@pytest.mark.parametrize("wires", ["direct"], indirect=True)
def test_a_connection_may_be_left_while_large_replies_come(wires: Wires) -> None:
    servers = [wires() for _ in range(3)]
    for server in servers:
        server.open("large", lambda call: call.reply(np.zeros(3 * 2**20, np.uint8)))
    mine = wires()
    for _ in range(scaled(300, 4)):
        peers = [mine.reach(server.address, "large") for server in servers]
        futures = [peer.ask("more", 30) for peer in peers for _ in range(3)]
        futures[0].result()
        peers[1].lose("left")  # its replies, and those of the others, are on the way
        assert all(future.result().nbytes == 3 * 2**20 for future in (*futures[:3], *futures[6:]))
        peers[0].lose("left")
        peers[2].lose("left")


@pytest.mark.parametrize("wires", ["cut"], indirect=True)
def test_a_link_that_stays_cut_is_lost_and_one_that_comes_back_runs_each_request_once(
    wires: Wires, server: Node, echo: Echo
) -> None:
    (proxy,) = wires.proxies
    wires.mend()
    peer = wires().reach(server.address, "echo", target=server.id, lost_after=3.0)
    assert peer.ask(1, 20).result() == 1
    proxy.is_cut = True
    proxy.cut()
    future = peer.ask(2, 60)
    time.sleep(1.5)
    proxy.is_cut = False
    assert future.result() == 2
    assert echo.n_calls == 2
    proxy.is_cut = True
    proxy.cut()
    began = time.monotonic()
    with pytest.raises(PeerLostError, match="no connection to it for 3 s"):
        peer.ask(3, 60).result()
    assert 2 < time.monotonic() - began < 10


def test_an_answer_that_cannot_be_read_fails_its_request_alone(
    wires: Wires, server: Node, peer: Peer, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(*arguments: object) -> None:
        raise KeyError("something is wrong in the thread of the node")

    with monkeypatch.context() as patch:
        patch.setattr(peer.node, "send", send)
        with pytest.raises(NoReplyError):
            peer.ask(1, 0.3).result()
    assert peer.ask(2, 20).result() == 2


LATE = {
    "request": ("echo", lambda wire, names: wire.reach(names.get("late/a")[0], "echo").ask("x", 1e9).result(30)),
    "credit": ("streams/late/a", lambda wire, names: late_piece(SampleProducer(wire, names, "late"))),
    "inference": ("policies/late/a", lambda wire, names: InferenceClient(wire, names, "late", "me").ask({})),
}


def late_piece(producer: SampleProducer) -> bool:
    assert producer.put("piece", 30)
    return producer.flush(30)


@pytest.mark.parametrize("kind", LATE)
@pytest.mark.parametrize("wires", ["direct"], indirect=True)
def test_a_reply_arrives_although_bytes_of_an_older_connection_come_late(
    wires: Wires, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link is cut until the sender has given its connection up. Then the system delivers what was sent before."""
    monkeypatch.setattr("penstock.distributed.wire._HEARTBEATS", (100, 300, 60_000))
    table, server, mine = wires(), wires(), wires()
    served = NameTable(lambda: table.clock).serve(table)
    inbox_name, call = LATE[kind]
    with contextlib.closing(LateLink(int(server.address.rpartition(":")[2]))) as link:
        server.address = link.address
        names = NameClient(server, table.address)
        inbox = server.open(inbox_name)
        names.announce("late/a" if kind == "request" else inbox_name, inbox)
        warm = mine.reach(link.address, inbox_name).ask("warm", 60)
        received(inbox).reply("warm")
        assert warm.result(30) == "warm"
        link.is_cut = True
        with ThreadPoolExecutor(1) as thread:
            reply = thread.submit(call, mine, NameClient(mine, table.address))
            request = received(inbox)
            assert link.n > 1, "it has come through another connection"
            link.bring()
            wait_until(lambda: server.counts.get("again", 0) > 0)
            request.reply(True)
            assert reply.result(30) is True
    served.close()


@pytest.mark.parametrize("wires", ["direct"], indirect=True)
def test_replies_of_a_repeatable_inbox_are_not_kept(wires: Wires) -> None:
    server, n_calls = wires(), 0

    def answer(call: Call) -> None:
        nonlocal n_calls
        n_calls += 1
        call.reply(np.zeros(2**20, np.uint8))

    server.open("repeatable", answer, repeatable=True)
    server.open("once", answer)
    for name, kept in (("repeatable", 0), ("once", 2**20)):
        peer = wires().reach(server.address, name)
        for _ in range(3):
            assert peer.ask(None, 30).result().nbytes == 2**20
        assert server.kept_bytes in range(kept, kept + 1000)
    assert n_calls == 6


@pytest.mark.parametrize("wires", ["direct"], indirect=True)
def test_a_node_keeps_a_bounded_number_of_replies_and_an_old_request_is_not_run_again(
    wires: Wires, server: Node, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request without a reply holds the number of what the sender has: all later replies are kept."""
    monkeypatch.setattr("penstock.distributed.wire._MOST_KEPT", 50)
    peer = wires().reach(server.address, "echo")
    first = peer.ask("slow", 60)
    slow = received(inbox)
    for i in range(200):
        again = peer.ask(i, 60)
        received(inbox).reply(i)
        assert again.result() == i
    (sender,) = server.senders.values()
    assert len(sender.replies) == len(server.kept) + 1 == 51
    slow.reply("done")
    assert first.result() == "done"
    lost = Future[object]()  # as if its reply was lost long ago
    peer.requests[7] = lost, messages.encode(7), float("inf")
    peer.node.do(peer.send, 7)
    with pytest.raises(RequestError, match="the reply to this request was forgotten"):
        lost.result(30)
    assert len(inbox) == 0
    monkeypatch.setattr("penstock.distributed.wire._MOST_KEPT_BYTES", 2**20)
    waiting = peer.ask("waits", 60)
    received(inbox)
    for _ in range(5):
        large = peer.ask("large", 60)
        received(inbox).reply(np.zeros(2**19, np.uint8))
        assert large.result().nbytes == 2**19
    assert server.kept_bytes <= 2**20
    inbox.close()
    with pytest.raises(PeerLostError):
        waiting.result()
    wait_until(lambda: (server.kept, server.kept_bytes) == ({}, 0))


@pytest.mark.parametrize("wires", ["direct"], indirect=True)
def test_requests_without_a_reply_and_senders_are_bounded(
    wires: Wires, server: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.distributed.wire._MOST_WAITING", 10)
    monkeypatch.setattr("penstock.distributed.wire._MOST_SENDERS", 2)
    kept = list[Call]()
    server.open("kept", kept.append)  # a handler that answers later, as that of parameters
    mine = wires()
    peer = mine.reach(server.address, "kept")
    futures = [peer.ask(i, 60) for i in range(12)]
    for late in futures[10:]:
        with pytest.raises(RequestError, match="the inbox kept is full: 10 requests wait"):
            late.result()
    for call in kept:
        call.reply()
    wait_for(futures[:10], 30)
    answer = peer.ask("again", 60)
    wait_until(lambda: len(kept) == 11)
    kept[-1].reply("there is room")
    assert answer.result() == "there is room"
    mine.reach(server.address, "kept").ask(0, 60)
    with pytest.raises(RequestError, match="this node has 2 senders"):
        mine.reach(server.address, "kept").ask(0, 60).result()


class Unprintable(RequestError):
    def __str__(self) -> str:
        raise SystemExit("no text")


@pytest.mark.parametrize("error", [ValueError("data_\udcff"), RequestError("data_\udcff"), Unprintable()], ids=repr)
@pytest.mark.parametrize("wires", ["direct"], indirect=True)
def test_an_error_whose_text_cannot_be_sent_or_made_reaches_the_sender(wires: Wires, error: Exception) -> None:
    server = wires()

    def fail(call: Call) -> None:
        raise error

    def handle() -> None:
        raise error

    server.open("in its thread", fail)
    server.open("handlers", lambda call: call.run({"fail": handle}))
    text = r"data_\\udcff" if error.args else "could not be formatted"
    for name in ("in its thread", "handlers"):
        with pytest.raises(RequestError, match=text):
            wires().reach(server.address, name).ask({"command": "fail"}, 30).result()
