"""The name table: leases, subtrees and pages, against a model with a clock that the test moves."""

from __future__ import annotations

import contextlib
from typing import Any

import msgpack
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock import ConfigError, NameTableError
from penstock.distributed import ControlPanel, Worker
from penstock.distributed.messages import BadMessageError
from penstock.distributed.names import LEASE_SECONDS, NameClient, NameTable, unpack_table

from ..scale import scaled

pytestmark = [pytest.mark.timeout(scaled(1800, 120)), pytest.mark.slow]

KEYS = ("a", "a/b", "a/b/c", "a/c", "a-b", "ab", "ab/b")
OWNERS = ("x", "y", "z")
ROOTS = ("", "a", "a/b", "ab")


def is_below(key: str, root: str) -> bool:
    return not root or f"{key}/".startswith(f"{root}/")


def beat(names: NameTable, owner: str, *arguments: Any) -> dict[str, Any]:
    """A beat, which an owner repeats that the table does not know."""
    answer = names.beat(owner, *arguments)
    return answer if answer["is_kept"] else names.beat(owner, *arguments, answer["n_ended"])


class NamesMachine(RuleBasedStateMachine):
    """The model is a dict: key to value, owner, whether it is lasting. And each owner has a deadline. Followers see the
    names below their roots, some of them seldom."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.names = NameTable(lambda: self.now)
        self.model: dict[str, tuple[bytes, str, bool]] = {}
        self.deadlines: dict[str, float] = {}
        self.seen: dict[str, tuple[dict[str, bytes], list[object]]] = {root: ({}, ["", -1]) for root in ROOTS}
        self.n = 0

    def live(self) -> dict[str, tuple[bytes, str, bool]]:
        ended = {owner for owner, deadline in self.deadlines.items() if deadline <= self.now}
        self.model = {k: v for k, v in self.model.items() if v[2] or v[1] not in ended}
        return self.model

    @rule(key=st.sampled_from(KEYS), owner=st.sampled_from(OWNERS), lasting=st.booleans(), replace=st.booleans())
    def add(self, key: str, owner: str, lasting: bool, replace: bool) -> None:
        self.n += 1
        value, old = b"%d" % self.n, self.live().get(key)
        if old is not None and old[1] != owner and not replace:
            with pytest.raises(NameTableError, match=f"'{key}' is taken by {old[1]}"):
                self.names.add(key, value, owner, lasting)
            return
        self.names.add(key, value, owner, lasting, replace)
        self.model[key] = (value, owner, lasting)
        self.deadlines[owner] = self.now + LEASE_SECONDS

    @rule(owner=st.sampled_from(OWNERS))
    def beat(self, owner: str) -> None:
        """It sends all its names again, and a name that another one may have."""
        mine = {key: [value[0], value[2]] for key, value in self.live().items() if value[1] == owner}
        if "a" not in self.model:
            self.model["a"] = (b"new", owner, False)
        self.deadlines[owner] = self.now + LEASE_SECONDS
        beat(self.names, owner, {"a": [b"new", False], **mine}, [], ["", -1])

    @rule(key=st.sampled_from(KEYS), owner=st.sampled_from(OWNERS))
    def delete(self, key: str, owner: str) -> None:
        has = key in self.live() and owner == self.model[key][1]
        assert self.names.delete(key, owner) == has
        if has:
            del self.model[key]

    @rule(root=st.sampled_from(KEYS))
    def clear(self, root: str) -> None:
        below = [key for key in self.live() if is_below(key, root)]
        assert self.names.clear(root) == len(below)
        for key in below:
            del self.model[key]

    @rule(root=st.sampled_from(ROOTS))
    def look(self, root: str) -> None:
        found, since = self.seen[root]
        answer = beat(self.names, "follower", {}, [root], since)
        self.deadlines["follower"] = self.now + LEASE_SECONDS
        if answer["found"] is not None:
            found = unpack_table(answer["found"])
        self.seen[root] = found, answer["since"]
        assert found == {key: value[0] for key, value in self.live().items() if is_below(key, root)}

    @rule(seconds=st.sampled_from((0.1, 0.5, 1.0, 3.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def the_table_is_the_model(self) -> None:
        found = self.names.find([""])
        assert found == {key: value[0] for key, value in self.live().items()}
        assert list(found) == sorted(found)


# 100,000 operations; daily 2,000. Some examples have fewer steps than 50.
NamesMachine.TestCase.settings = settings(max_examples=scaled(2200, 40), stateful_step_count=50, deadline=None)
TestNames = NamesMachine.TestCase


NO_KEYS = ["", "/", "a//b", "/a", "a/", 3, None, (1, 2), b"ab", "a\ud800", "a\0b", "a\nb", "x" * 501, "x" * 100_000]


@pytest.mark.parametrize("key", NO_KEYS)
def test_a_key_is_a_path(key: Any) -> None:
    with pytest.raises(NameTableError, match="a name is a path"):
        NameTable(lambda: 0.0).add(key, b"", "x")


def test_what_can_be_no_key_is_refused_before_it_stops_the_other_names_of_its_node() -> None:
    with ControlPanel("test") as panel, contextlib.closing(panel.connection.wire()) as node:
        names = NameClient(node, panel.connection.address)
        for key in NO_KEYS:
            for add in (names.add, names.write):
                with pytest.raises(NameTableError, match=r"a name is a path .* got .{1,250}$"):
                    add(key, 1)  # type: ignore[arg-type]
        names.write("well", 2)
        assert names.flush(30)
        assert panel.names.get("well") == 2


def test_a_worker_has_a_name_that_every_group_request_can_match() -> None:
    with ControlPanel("test") as panel:
        for name in ("a\nb", "a\ud800", "a\0", "", "a//b", "x" * 500):
            with pytest.raises(ConfigError, match="name must be a name such as 'worker'"):
                panel.launch(Worker, name=name)


def test_many_names_come_at_once() -> None:
    names = NameTable(lambda: 0.0)
    for i in range(1200):
        names.add(f"workers/{i:04}", b"x" * (60_000 if i % 300 == 7 else i), "owner")
    assert len(names.find(["workers", "workers/0001"])) == 1200
    found = unpack_table(beat(names, "other", {}, ["workers"], ["", -1])["found"])
    assert found == names.find(["workers"])


def test_a_value_has_a_limit() -> None:
    with ControlPanel("test") as panel:
        for add in (panel.names.add, panel.names.write):
            with pytest.raises(BadMessageError, match=r"the value of the name 'a' has 70,\d\d\d bytes. At most 65,536"):
                add("a", "x" * 70_000)
    with pytest.raises(NameTableError, match="has no value"):
        NameTable(lambda: 0.0).add("a", b"x" * 70_000, "x")


def test_figures_concern_only_who_follows_them() -> None:
    names = NameTable(lambda: 0.0)
    names.add("streams/train/a", b"1", "x")
    since = beat(names, "y", {}, ["streams/train"], ["", -1])["since"]
    beat(names, "x", {"figures/a": [b"2", False]}, [], since)
    assert beat(names, "y", {}, ["streams/train"], since)["found"] is None
    assert beat(names, "z", {}, ["figures"], since)["found"] == msgpack.packb({"figures/a": b"2"})


def test_an_old_beat_of_an_owner_whose_lease_has_ended_brings_no_name_back() -> None:
    """What a process has sent before it died comes when its link is there again. One that lives is asked first."""
    now = 0.0
    names, mine = NameTable(lambda: now), {"workers/a": [b"1", False]}
    beat(names, "dead", mine, [], ["", -1])
    told = beat(names, "dead", mine, [], ["", -1])["n_ended"]
    now = 2 * LEASE_SECONDS
    assert not names.beat("dead", mine, [], ["", -1], told)["is_kept"]
    names.add("workers/a", b"2", "other")
    assert names.find([""]) == {"workers/a": b"2"}
    now = 4 * LEASE_SECONDS
    assert beat(names, "dead", mine, [], ["", -1])["is_kept"]
    assert names.find([""]) == {"workers/a": b"1"}


def test_very_many_owners_and_no_orphan() -> None:
    """Each owner beats at the pace that the table has told it last: no lease ends, and no owner waits for 30 s."""
    now, n = 0.0, scaled(10_000, 2_500)  # so many that the pace is the slowest
    names, beats, spans = NameTable(lambda: now), 0, list[float]()
    next_beats = dict.fromkeys(range(n), 0.0)
    for second in range(1, 61):
        now = float(second)
        for i in [i for i, at in next_beats.items() if at <= now]:
            pace = beat(names, f"owner {i}", {f"figures/{i}": [b"%d" % second, False]}, ["streams"], ["", -1])["pace"]
            spans.append(now - next_beats[i] + pace)
            next_beats[i] = now + pace
            beats += second > 30
        names.expire()
        assert len(names.entries) == n
    assert max(spans) <= 11
    assert beats / 30 == pytest.approx(n / 10, rel=0.1)  # a second
