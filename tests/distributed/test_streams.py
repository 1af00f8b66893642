"""Sample streams: every piece once, bounded memory, lost consumers. Inference streams: the right answer to each."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock import ConfigError, NoReplyError, RequestError
from penstock.distributed import InferenceClient, InferenceInbox, SampleConsumer, SampleProducer, messages
from penstock.distributed.messages import BadMessageError
from penstock.distributed.names import NameClient, NameTable
from penstock.distributed.parameters import ParameterClient, ParameterServer
from penstock.distributed.wire import Node

from ..scale import scaled
from .support import Wires, in_four_threads, newer, wait_until

pytestmark = [pytest.mark.timeout(scaled(1800, 120)), pytest.mark.slow]
PIECES, PIECES_WITH_FAULTS = scaled((100_000, 1_000), (1_200, 40))


class Trial:
    """A name table, and wires with a client of it."""

    def __init__(self, make: str) -> None:
        self.wires = Wires(make)
        own = self.wires()
        self._table = NameTable(lambda: own.clock).serve(own)
        self.address = self.wires.opened[0].address

    def join(self) -> tuple[Node, NameClient]:
        wire = self.wires()
        return wire, NameClient(wire, self.address)

    def close(self) -> None:
        for wire in self.wires.opened[1:]:
            wire.close()
        self._table.close()
        self.wires.close()


@pytest.fixture(params=["direct", "cut"])
def trial(request: pytest.FixtureRequest) -> Iterator[Trial]:
    made = Trial(request.param)
    yield made
    made.close()


direct = pytest.mark.parametrize("trial", ["direct"], indirect=True)


class Taker(threading.Thread):
    """Consumes pieces until "end" has come from every producer."""

    def __init__(self, consumer: SampleConsumer) -> None:
        super().__init__(daemon=True)
        self.consumer, self.pieces, self.stop = consumer, list[tuple[int, int]](), False
        self.start()

    def run(self) -> None:
        while not self.stop:
            try:
                piece = self.consumer.get(0.05)
            except NoReplyError:
                continue
            self.pieces.append((piece["producer"], piece["number"]))


def test_each_piece_arrives_once(trial: Trial) -> None:
    n = PIECES_WITH_FAULTS if trial.wires.make == "cut" else PIECES // 4
    takers = [Taker(SampleConsumer(*trial.join(), "train", f"trainer/{i}")) for i in range(2)]
    producers = [SampleProducer(*trial.join(), "train", credit=16) for _ in range(4)]

    def produce(index: int) -> None:
        for number in range(n):
            assert producers[index].put({"producer": index, "number": number}, 60)
        assert producers[index].flush(60)

    in_four_threads(produce)
    for taker in takers:
        taker.stop = True
        taker.join()
    everything = [(i, number) for i in range(4) for number in range(n)]
    assert sorted(takers[0].pieces + takers[1].pieces) == everything
    assert all(taker.pieces for taker in takers)


def test_a_consumer_that_stops_stops_the_producer(trial: Trial) -> None:
    producer = SampleProducer(*trial.join(), "train", credit=3)
    assert not producer.put(0, 0.2), "there is no consumer"
    consumer = SampleConsumer(*trial.join(), "train", "trainer/0")
    assert [producer.put(i, 5) for i in range(3)] == [True] * 3
    assert not producer.put(3, 0.2)
    wait_until(lambda: len(consumer) == 3)
    assert sorted(consumer.get(5) for _ in range(3)) == [0, 1, 2]
    assert producer.put(3, 5)
    assert consumer.get(5) == 3


def test_pieces_of_a_consumer_that_ends_go_to_another(trial: Trial) -> None:
    first = SampleConsumer(*trial.join(), "train", "a")
    producer = SampleProducer(*trial.join(), "train", credit=5)
    for i in range(5):
        assert producer.put(i, 5)
    wait_until(lambda: len(first) == 5)
    taken = [first.get(5), first.get(5)]
    assert producer.put(5, 5)
    assert producer.put(6, 5), "it knows that both were taken"
    first.close()
    second = SampleConsumer(*trial.join(), "train", "b")
    flushing = threading.Thread(target=lambda: producer.put(7, 20) and producer.flush(20))
    flushing.start()
    taken += [second.get(20) for _ in range(6)]
    flushing.join()
    assert sorted(taken) == list(range(8))


@direct
def test_flush_waits_for_the_pieces_of_a_consumer_that_ends(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = list[bool]()
    consumer = SampleConsumer(*trial.join(), "train", "a")
    producer = SampleProducer(*trial.join(), "train")
    assert producer.put(1, 5)
    forget = Node.forget

    def flush_and_forget(*arguments: Any) -> None:
        """While a consumer is lost, and its pieces have not come back yet."""
        flushed.append(producer.flush(0))
        forget(*arguments)

    monkeypatch.setattr(Node, "forget", flush_and_forget)
    consumer.close()
    wait_until(lambda: bool(flushed))
    monkeypatch.undo()
    assert flushed == [False]
    second = SampleConsumer(*trial.join(), "train", "b")
    assert producer.put(2, 5)
    flushing = threading.Thread(target=producer.flush, args=(20,))
    flushing.start()
    assert sorted(second.get(5) for _ in range(2)) == [1, 2]
    flushing.join()
    assert producer.flush(5)


def refuse(monkeypatch: pytest.MonkeyPatch, word: bytes) -> None:
    """From now on no node can read a message that has `word` in it."""

    def decode(frames: Any) -> Any:
        if word in bytes(frames[0]):
            raise BadMessageError("torn")
        return messages.decode(frames)

    monkeypatch.setattr("penstock.distributed.wire.decode", decode)


def test_a_piece_that_the_consumer_cannot_read_is_reported(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    SampleConsumer(*trial.join(), "train", "trainer/0")
    producer = SampleProducer(*trial.join(), "train")
    refuse(monkeypatch, b"unreadable")
    assert producer.put("unreadable", 10)
    with pytest.raises(RequestError, match="torn"):
        producer.flush(10)


def test_parameters_that_cannot_be_read_are_reported(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ParameterServer(*trial.join(), "policy")
    client = ParameterClient(trial.join()[1], "policy")
    refuse(monkeypatch, b"unreadable")
    server.publish(1, {"unreadable": np.zeros(3)})

    with pytest.raises(BadMessageError):
        newer(client)


@direct
def test_credit_is_checked(trial: Trial) -> None:
    with pytest.raises(ConfigError, match="credit must be an integer of at least 1, got 0"):
        SampleProducer(*trial.join(), "train", credit=0)


# ---- inference streams -------------------------------------------------------------------------


class Doubler(threading.Thread):
    """Answers with twice the numbers, its name, and a checksum of the version that it stamps on the answer."""

    def __init__(self, server: InferenceInbox, name: str) -> None:
        super().__init__(daemon=True)
        self.server, self.label, self.stop, self.sessions = server, name, False, Counter[str]()
        self.start()

    def end(self) -> None:
        self.stop = True
        self.join()

    def run(self) -> None:
        version = 0
        while not self.stop:
            call = self.server.receive(0.05)
            if call is not None:
                version += 1
                self.sessions[call.message["session"]] += 1
                answer: dict[str, Any] = {"x": 2 * call.message["x"], "by": self.label, "version": version}
                call.reply({**answer, "sum": int(answer["x"].sum()) * 1000 + version})


def test_every_question_has_its_own_answer(trial: Trial) -> None:
    servers = [Doubler(InferenceInbox(*trial.join(), "policy", f"p{i}"), f"p{i}") for i in range(2)]
    failures = []

    def ask(index: int) -> None:
        client = InferenceClient(*trial.join(), "policy", f"actor/{index}")
        by = set()
        for i in range(50):
            x = np.arange(3) + 100 * index + i
            answer = client.ask({"x": x})
            if (answer["x"] != 2 * x).any() or answer["sum"] != int(2 * x.sum()) * 1000 + answer["version"]:
                failures.append((index, i))
            by.add(answer["by"])
        if len(by) != 1 or client.n_moves:
            failures.append((index, -1))

    in_four_threads(ask)
    for server in servers:
        server.end()
    assert failures == []
    assert sum(sum(server.sessions.values()) for server in servers) == 200


def test_a_client_moves_to_another_server_in_a_new_session(trial: Trial) -> None:
    first = Doubler(InferenceInbox(*trial.join(), "policy", "a"), "a")
    client = InferenceClient(*trial.join(), "policy", "actor/0")
    assert client.ask({"x": np.ones(1)})["by"] == "a"
    first.end()
    first.server.close()
    second = Doubler(InferenceInbox(*trial.join(), "policy", "b"), "b")
    assert client.ask({"x": np.ones(1)})["by"] == "b"
    second.end()
    assert client.n_moves >= 1  # 2, if it has asked the first one once more
    assert not first.sessions.keys() & second.sessions.keys()


@direct
def test_a_server_that_was_lost_and_is_reached_again_gets_a_new_session(trial: Trial) -> None:
    server = Doubler(InferenceInbox(*trial.join(), "policy", "a"), "a")
    client = InferenceClient(*trial.join(), "policy", "actor/0")
    assert client.ask({"x": np.ones(1)})["version"] == 1
    (peer,) = client._servers.live()
    ask = peer.ask

    def ask_and_lose(*args: Any) -> Any:
        """The server acts, but the answer does not come: the network is broken for a while."""
        ask(*args).result(5)
        peer.lose("it was silent")
        return ask(*args)

    peer.ask = ask_and_lose  # type: ignore[method-assign]
    assert client.ask({"x": np.ones(1)})["version"] == 3
    server.end()
    assert client.n_moves == 1
    assert sorted(server.sessions.values()) == [1, 2], "the third step is the first one of another session"


@direct
def test_a_client_gives_up_without_servers_and_if_they_do_not_answer(trial: Trial) -> None:
    with pytest.raises(NoReplyError, match="no server of the inference stream policy"):
        InferenceClient(*trial.join(), "policy", "actor/0", timeout=0.2).ask({})
    with pytest.raises(NoReplyError):
        InferenceClient(*trial.join(), "policy", "actor/0", is_over=lambda: True).ask({})
    server = InferenceInbox(*trial.join(), "policy", "a")
    with pytest.raises(NoReplyError, match="did not answer in time"):
        InferenceClient(*trial.join(), "policy", "actor/0", timeout=0.7).ask({})
    server.close()


def test_published_parameters_do_not_change_with_the_trainers(trial: Trial) -> None:
    server = ParameterServer(*trial.join(), "policy")
    weight = np.zeros(2**18)  # ZMQ copies small ones in any case
    server.publish(1, {"weight": weight})
    weight += 1  # the trainer trains on, before anybody has asked
    client = ParameterClient(trial.join()[1], "policy")
    trial.wires.mend()  # they are larger than what a link carries until it is cut
    assert (newer(client)["weight"] == 0).all()


@direct
def test_a_consumer_that_was_silent_gets_each_piece_once(trial: Trial) -> None:
    """Its name goes while it is suspended, and comes back. There is no other consumer, so nothing is sent again."""
    wire, names = trial.join()
    consumer = SampleConsumer(wire, names, "train", "trainer/0")
    producer = SampleProducer(*trial.join(), "train", credit=5)
    assert all(producer.put(i, 5) for i in range(3))
    place = names.get("streams/train/trainer/0")
    names.delete("streams/train/trainer/0")
    wait_until(lambda: not producer.has_room())
    assert not producer.put(3, 0.1)
    names.add("streams/train/trainer/0", place)
    assert producer.put(3, 10)
    assert sorted(consumer.get(5) for _ in range(4)) == [0, 1, 2, 3]
    with pytest.raises(NoReplyError):
        consumer.get(0.1)
    assert producer.flush(5)


def test_parameters_come_although_the_trainer_calls_nothing(trial: Trial) -> None:
    """It is in a long step, or waits for other trainers."""
    server = ParameterServer(*trial.join(), "policy")
    server.publish(1, {"weight": np.zeros(2)})
    for client in [ParameterClient(trial.join()[1], "policy") for _ in range(3)]:
        assert newer(client)["weight"].tolist() == [0, 0]
        assert client.version == (server.lineage, 1)


@direct
def test_no_more_than_two_versions_of_the_parameters_are_kept(trial: Trial) -> None:
    """However many follow them: one that has come, and the one that is on its way."""
    server = ParameterServer(*trial.join(), "policy")
    clients = [ParameterClient(trial.join()[1], "policy") for _ in range(12)]

    def all_have(version: int) -> bool:
        for client in clients:
            client.newer()
        return all(client.version[1] == version for client in clients)

    for version in range(1, 20):
        server.publish(version, {"weight": np.zeros(2**14)})
        wait_until(lambda v=version: all_have(v))
    replies = [reply for wire in trial.wires.opened for sender in [*wire.senders.values()] for reply in held(sender)]
    assert len({id(packed[0]) for _, packed in replies if sum(map(len, packed)) > 2**14}) <= 2


def held(sender: Any) -> list[Any]:
    """The replies that a node keeps for `sender`."""
    return [reply for reply in sender.replies.values() if reply is not None]
