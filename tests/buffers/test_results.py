"""Results: what workers put is what the main process takes, each once, none lost."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.buffers import ObjectPipe, TrajectoryRecords
from penstock.buffers.object_pipe import RECORD, MessageKind, ObjectMessage, Unreadable
from penstock.errors import TrajectoryCountError

from ..children import exit_code_of
from ..scale import START_METHODS, examples, methods

quick = examples(15, 30)

# ---- records -----------------------------------------------------------------------------------


def records_of(keys: list[tuple[int, int]], first: int = 0) -> Any:
    """One record per (t, env_rank), each with another Length."""
    records = np.zeros(len(keys), RECORD)
    for i, (t, env_rank) in enumerate(keys):
        records[i] = (t, env_rank, first + i, 0.5 * i, i % 3, -0.25 * i)
    return records


worker_keys = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8)


@quick
@given(st.lists(worker_keys, min_size=1, max_size=4), st.booleans())
def test_records_come_out_ordered_by_time_then_environment(keys: list[list[tuple[int, int]]], shared: bool) -> None:
    rings = TrajectoryRecords([len(k) + 2 for k in keys], shared=shared)
    put = [records_of(k, first=100 * rank) for rank, k in enumerate(keys)]
    for rank, records in enumerate(put):
        rings.begin()
        rings.put(rank, records)
    taken = rings.take([len(k) for k in keys], [0] * len(keys))
    everything = [record for records in put for record in records.tolist()]
    assert sorted(taken) == sorted(everything)
    assert [(t, env_rank) for t, env_rank, *_ in taken] == sorted(key for k in keys for key in k)
    rings.memory.close()


def test_each_of_several_batches_has_a_part_of_the_array() -> None:
    rings = TrajectoryRecords([6, 4], shared=False)
    for slot in (1, 0):
        for rank, start in enumerate((3 * slot, 2 * slot)):
            rings.begin(start)
            rings.put(rank, records_of([(slot, rank)]))
    for slot in (0, 1):
        taken = rings.take([1, 1], [3 * slot, 2 * slot])
        assert [(t, env_rank) for t, env_rank, *_ in taken] == [(slot, 0), (slot, 1)]


def test_later_records_of_a_batch_go_behind_its_earlier_ones_and_are_copied_out() -> None:
    rings = TrajectoryRecords([4], shared=False)
    wanted = records_of([(0, 0), (1, 0), (2, 0), (3, 0)])
    rings.put(0, wanted[:3])
    rings.put(0, wanted[3:])
    with pytest.raises(ValueError, match="could not broadcast"):
        rings.put(0, wanted[:2])  # more than the ring holds
    taken = rings.take([4], [0])
    rings.begin()
    rings.put(0, records_of([(7, 7), (8, 8)]))
    assert taken == wanted.tolist()


def test_what_was_not_expected_is_not_taken() -> None:
    rings = TrajectoryRecords([3, 3], shared=False)
    for rank in range(2):
        rings.begin()
        rings.put(rank, records_of([(0, rank), (1, rank), (2, rank)]))
    assert [record[1] for record in rings.take([1, 2], [0, 0])] == [0, 1, 1]
    assert rings.take([0, 0], [0, 0]) == []


@pytest.mark.parametrize("expected", [[1], [1, 1, 1]])
def test_a_count_is_needed_from_every_worker(expected: list[int]) -> None:
    with pytest.raises(ValueError, match="zip"):
        TrajectoryRecords([2, 2], shared=False).take(expected, [0, 0])


# ---- objects -----------------------------------------------------------------------------------


@pytest.fixture
def pipe() -> Iterator[ObjectPipe]:
    pipe = ObjectPipe()
    yield pipe
    pipe.close()


values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(max_size=20),
        st.binary(max_size=50),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
messages = st.builds(
    ObjectMessage,
    st.sampled_from(MessageKind),
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    st.dictionaries(st.text(max_size=8), values, max_size=4),
)
message_lists = st.lists(messages, max_size=6)


def info(t: int, env_rank: int, payload: dict[str, Any]) -> ObjectMessage:
    return ObjectMessage(MessageKind.TRAJ_INFO, t, env_rank, payload)


@quick
@given(message_lists, st.data())
def test_messages_survive_any_division_of_the_stream(sent: list[Any], data: st.DataObject) -> None:
    source, target = ObjectPipe(), ObjectPipe()
    try:
        source.put(sent)
        source.writer.close()
        stream = b""
        while chunk := os.read(source.reader.fd, 1 << 16):
            stream += chunk
        while stream:
            size = data.draw(st.integers(1, len(stream)))
            os.write(target.writer.fd, stream[:size])
            target.drain()
            stream = stream[size:]
        assert target.take(len(sent)) == sent
    finally:
        source.close()
        target.close()


@pytest.mark.parametrize("size", [2**16 - 100, 2**16, 2**16 + 1, 3 * 2**20])
def test_messages_larger_than_the_pipe_arrive_while_it_is_drained(pipe: ObjectPipe, size: int) -> None:
    rng = np.random.default_rng(0)
    sent = [info(i, i, {"picture": rng.bytes(size)}) for i in range(3)]
    done_reader, done_writer = os.pipe()

    def write() -> None:
        pipe.put(sent)
        os.write(done_writer, b"!")

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    while done_reader not in select.select([pipe.reader.fileno(), done_reader], [], [], 60)[0]:
        pipe.drain()
    writer.join(60)
    os.close(done_reader)
    os.close(done_writer)
    assert not writer.is_alive()
    assert pipe.take(3) == sent


def test_a_message_that_the_system_takes_in_pieces_arrives_whole(
    pipe: ObjectPipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    sent = [info(1, 2, {"name": "x" * 50}), info(3, 4, {})]
    with monkeypatch.context() as patched:  # as a signal does that interrupts a large write
        patched.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
        pipe.put(sent)
    assert pipe.take(2) == sent


def test_the_messages_of_one_command_can_be_taken_before_those_of_the_next(pipe: ObjectPipe) -> None:
    sent = [info(t, 0, {"Length": t}) for t in range(5)]
    pipe.put(sent)
    assert pipe.take(2, may_leave=True) == sent[:2]
    replacement = pipe.replacement(keep=1)
    assert replacement.take(1) == sent[2:3]
    replacement.close()
    assert pipe.take(3) == sent[2:]
    with pytest.raises(TrajectoryCountError):
        pipe.take(1, may_leave=True)


def test_draining_after_the_writer_is_gone_keeps_what_it_wrote(pipe: ObjectPipe) -> None:
    pipe.drain()  # of an empty pipe, it returns at once
    assert pipe.take(0) == []
    pipe.put([info(1, 2, {"Length": 3})])
    pipe.writer.close()
    pipe.drain()
    pipe.drain()
    assert pipe.take(1) == [info(1, 2, {"Length": 3})]


def test_objects_that_only_cloudpickle_can_send_arrive(pipe: ObjectPipe) -> None:
    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    step = 3
    pipe.put([info(0, 1, {"plain": 1}), info(1, 1, {"local": Local(5), "function": lambda x: x + step})])
    (*_, first), (_, t, env_rank, second) = pipe.take(2)
    assert first == {"plain": 1}
    assert (t, env_rank, second["local"].value, second["function"](4)) == (1, 1, 5, 7)


def test_an_object_that_nothing_can_send_is_an_error_for_the_worker(pipe: ObjectPipe) -> None:
    with pytest.raises(TypeError, match="pickle"):
        pipe.put([info(0, 0, {"Length": 1, "lock": threading.Lock()})])
    assert pipe.take(0) == []


class NeedsTwo(Exception):
    """As many are: its pickle calls it with one argument."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one)


def test_what_cannot_be_unpickled_is_named_and_taken_for_good(pipe: ObjectPipe) -> None:
    shared = [1]
    pipe.put([info(0, 1, {"Length": 1, "Error": NeedsTwo(1, 2), "Rest": 3}), info(4, 2, {"a": shared, "b": shared})])
    (_, t, env_rank, broken), (*_, whole) = pipe.take(2)
    assert isinstance(broken, Unreadable)
    assert (t, env_rank, broken.attribute, type(broken.error)) == (0, 1, "Error", TypeError)
    assert isinstance(whole, dict)
    assert whole["a"] is whole["b"], "what was one object still is"
    assert pipe.take(0) == []


@pytest.mark.parametrize(("expected", "cut"), [(0, 0), (1, 0), (3, 0), (2, 1), (2, 33)])
def test_another_number_than_expected_or_half_a_message_is_an_error_that_names_both(
    pipe: ObjectPipe, expected: int, cut: int
) -> None:
    """`cut`: inside the length of a message, and inside its body."""
    pipe.put([info(0, 0, {}), info(1, 0, {"a": 1})])
    stream = os.read(pipe.reader.fd, 1 << 16)
    os.write(pipe.writer.fd, stream + stream[:cut])
    with pytest.raises(TrajectoryCountError, match=f"2 results arrived, {expected} were expected, and {cut} bytes"):
        pipe.take(expected)
    assert pipe.take(0) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@methods(*START_METHODS)
def test_only_the_writing_end_crosses_to_a_worker(pipe: ObjectPipe, start_method: str) -> None:
    target = "pipe.put([message]); assert fork or pipe.reader.fd == -1"
    arguments = {"pipe": pipe, "message": info(1, 2, {"Length": 3}), "fork": start_method == "fork"}
    assert exit_code_of(start_method, target, **arguments) == 0
    assert pipe.take(1) == [info(1, 2, {"Length": 3})]
