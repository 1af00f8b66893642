"""Shared parameters: readers find whole versions, the newest first, however often the writer publishes."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock import RandomAgent, SerialSampler
from penstock.agents import SharedParameters
from penstock.buffers import ArraySpec, NamedArrays, NamedMemory
from penstock.errors import ConfigError, SamplerStateError

from ..scale import examples, scaled
from ..support import sampler_of


def constant(value: float, n_elements: int = 6) -> dict[str, Any]:
    """Parameters all of whose elements are `value`: half of one version and half of another would show."""
    return {
        "weight": np.full((2, n_elements // 2), value, np.float64),
        "bias": np.full(n_elements, value, np.float32),
        "count": np.full((), value, np.int64),
    }


def values_of(parameters: dict[str, Any]) -> set[float]:
    return {float(x) for array in parameters.values() for x in np.unique(array)}


@pytest.fixture
def shared() -> SharedParameters:
    return SharedParameters(constant(0), shared=False)


# ---- one process -------------------------------------------------------------------------------

arrays = hnp.arrays(
    st.sampled_from([np.float16, np.float32, np.int64, np.int16, np.bool_]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)


@examples(20, 50)
@given(st.dictionaries(st.sampled_from(["weight", "0.bias", "values", "running_mean"]), arrays), st.booleans())
def test_what_is_published_is_read_by_name_shape_and_dtype(parameters: dict[str, Any], in_shared: bool) -> None:
    shared = SharedParameters(parameters, shared=in_shared)
    shared.publish(parameters)
    read, version = shared.read()
    assert version == 1
    assert [*read] == [*parameters]
    for name, value in parameters.items():
        assert read[name].dtype == value.dtype
        np.testing.assert_array_equal(read[name], value)
    shared.memory.close()


def test_what_was_read_is_private(shared: SharedParameters) -> None:
    shared.publish(constant(1))
    first, _ = shared.read()
    first["bias"][...] = 9
    second, _ = shared.read()
    shared.publish(constant(2))
    shared.publish(constant(3))
    assert values_of(second) == {1}


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({f"new_{name}": value for name, value in constant(2).items()}, "new_bias"),
        ({"weight": constant(2)["weight"]}, "bias"),
        ({**constant(2), "bias": np.zeros(7, np.float32)}, r"bias .*\(7,\).*\(6,\)"),
        ({**constant(2), "bias": np.full(6, 0x4000, np.int16)}, "bias"),  # the bits of bfloat16, for instance
    ],
)
def test_other_parameters_than_at_first_are_refused_by_name_and_disturb_nobody(
    shared: SharedParameters, other: dict[str, Any], named: str
) -> None:
    for version in (1, 2):
        shared.publish(constant(version))
        with pytest.raises(ConfigError, match=named):
            shared.publish(other)
        parameters, found = shared.read()
        assert (values_of(parameters), found) == ({version}, version)


# ---- a writer that overtakes a reader, made to happen ------------------------------------------


class Interrupting(np.ndarray[Any, Any]):
    """An array that runs `hook` when it has been copied: in the middle of a read."""

    hook: Callable[[], None]

    def copy(self, order: Any = "C") -> Any:
        copied = np.asarray(self).copy(order)
        type(self).hook()
        return copied


def interrupt_reads(shared: SharedParameters, hook: Callable[[], None], times: int) -> list[int]:
    """Run `hook` in the middle of the next `times` attempts at reading; the list counts attempts."""
    attempts: list[int] = []

    def once() -> None:
        attempts.append(len(attempts))
        if len(attempts) <= times:
            hook()

    class Hooked(Interrupting):
        hook = staticmethod(once)

    def with_hook(slot: NamedArrays) -> NamedArrays:
        # Between the first array and the last, so that either half may be of the wrong version.
        return NamedArrays({name: leaf.view(Hooked) if name == "p1" else leaf for name, leaf in slot.items()})

    plain = shared.memory.arrays
    slots = NamedArrays({name: with_hook(slot) for name, slot in plain.slots.items()})
    shared.memory.arrays = NamedArrays({**plain, "slots": slots})
    return attempts


class Writer:
    """Publishes all-equal parameters whose value is their version."""

    def __init__(self, shared: SharedParameters) -> None:
        self._plain = SharedParameters.__new__(SharedParameters)
        self._plain.__dict__.update(shared.__dict__)
        self._plain.memory = NamedMemory.__new__(NamedMemory)
        self._plain.memory.__dict__.update(shared.memory.__dict__)

    def publish(self, times: int = 1) -> None:
        for _ in range(times):
            self._plain.publish(constant(self._plain.version + 1))


def test_one_publication_during_a_read_leaves_the_reader_its_slot(shared: SharedParameters) -> None:
    writer = Writer(shared)
    writer.publish()
    attempts = interrupt_reads(shared, writer.publish, times=1)
    parameters, version = shared.read()
    assert (values_of(parameters), version) == ({1}, 1)
    assert len(attempts) == 1
    assert shared.version == 2


@pytest.mark.parametrize("overtaken", [2, 3, 4])
@pytest.mark.parametrize("times", [1, 5])
def test_a_reader_whose_slot_was_overwritten_reads_again(shared: SharedParameters, overtaken: int, times: int) -> None:
    writer = Writer(shared)
    writer.publish()
    attempts = interrupt_reads(shared, lambda: writer.publish(overtaken), times)
    parameters, version = shared.read()
    assert len(attempts) == times + 1
    assert (values_of(parameters), version) == ({shared.version}, shared.version)


def test_a_reader_never_takes_a_slot_that_is_being_written(shared: SharedParameters) -> None:
    writer = Writer(shared)
    writer.publish(2)
    stamps, slot = shared.memory.arrays.stamps, shared.version % 2
    stamps[slot] = 2 * (shared.version + 2) - 1  # as a writer leaves it that has gone round and is at work
    with pytest.raises(SamplerStateError, match="publish less often"):
        shared.read()
    stamps[slot] = 2 * shared.version
    assert values_of(shared.read()[0]) == {shared.version}


def test_a_reader_does_not_take_what_is_half_written_while_it_reads(shared: SharedParameters) -> None:
    writer = Writer(shared)
    writer.publish()
    arrays = shared.memory.arrays

    def overtake_and_stop_half_way() -> None:
        writer.publish()
        arrays.stamps[1] = 2 * 3 - 1
        arrays.slots.s1.p0[...] = 3

    attempts = interrupt_reads(shared, overtake_and_stop_half_way, times=1)
    parameters, version = shared.read()
    assert len(attempts) == 2
    assert (values_of(parameters), version) == ({2}, 2)


def test_the_version_that_is_read_is_that_of_the_values(
    shared: SharedParameters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer goes round twice between the reader's look at the version and its look at the slot."""
    writer = Writer(shared)
    writer.publish()
    looks: list[int] = []

    class Delayed(SharedParameters):
        @property
        def version(self) -> int:
            seen = SharedParameters.version.fget(self)  # type: ignore[attr-defined]
            looks.append(seen)
            if len(looks) == 1:
                writer.publish(2)
            return int(seen)

    shared.__class__ = Delayed
    parameters, version = shared.read()
    assert values_of(parameters) == {version}


def test_a_reader_that_is_overtaken_for_ever_says_so(shared: SharedParameters) -> None:
    writer = Writer(shared)
    writer.publish()
    interrupt_reads(shared, lambda: writer.publish(2), times=10**9)
    with pytest.raises(SamplerStateError, match="publish less often"):
        shared.read()


# ---- a real second process ---------------------------------------------------------------------

READS, VERSIONS, ELEMENTS, BURST = scaled(5000, 2000), scaled(1000, 400), 60_000, 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_no_read_is_torn_and_no_version_goes_back_while_another_process_publishes() -> None:
    shared = SharedParameters(constant(0, ELEMENTS), shared=True)
    stop = NamedMemory(NamedArrays(word=ArraySpec((), np.dtype(np.int64))), shared=True, purpose="a test")

    def write() -> None:
        burst = [constant(0, ELEMENTS) for _ in range(BURST)]
        while not stop.arrays.word:
            # Several at once, so that readers are overtaken, then none for a while, so that they succeed.
            for ahead, parameters in enumerate(burst, 1):
                for array in parameters.values():
                    array.fill(shared.version + ahead)
            for parameters in burst:
                shared.publish(parameters)

    child = multiprocessing.get_context("fork").Process(target=write, daemon=True)
    child.start()
    try:
        versions = [0]
        deadline = time.monotonic() + 60
        while len(versions) < READS or len(set(versions)) < VERSIONS:
            parameters, version = shared.read()
            extremes = {float(x) for array in parameters.values() for x in (array.min(), array.max())}
            assert extremes == {version}  # all elements are of one version, and of this one
            assert version >= versions[-1]
            versions.append(version)
            assert time.monotonic() < deadline, f"{len(set(versions))} versions in {len(versions)} reads"
    finally:
        stop.arrays.word[...] = 1
        child.join(60)
        child.kill()
        child.join()
        child.close()
        shared.memory.close()
        stop.close()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        *[({"p": each}, "numpy arrays, got .* for 'p': return np") for each in (2.5, None, [1.0], {"a": 1}, "text")],
        (None, "a dict, got None"),
    ],
)
def test_parameters_that_are_no_arrays_are_named(parameters: Any, message: str) -> None:
    class Odd(RandomAgent):
        def read_parameters(self) -> Any:
            return parameters

    with (
        sampler_of(SerialSampler) as sampler,
        pytest.raises(ConfigError, match=f"read_parameters of Odd must return {message}"),
    ):
        sampler.initialize(Odd())
