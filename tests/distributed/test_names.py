"""The name table: leases, subtrees and changes, against a model with a clock that the test moves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock import NameTableError
from penstock.distributed import names as names_module
from penstock.distributed.messages import encode
from penstock.distributed.names import Names

from ..scale import scaled

pytestmark = [pytest.mark.timeout(scaled(1800, 120)), pytest.mark.slow]

KEYS = ("a", "a/b", "a/b/c", "a/c", "ab", "ab/b")
OWNERS = ("x", "y", "z")
LEASES = (None, 1.0, 2.5)
ROOTS = ("", "a", "a/b", "ab")
NEVER: list[object] = ["", -1]  # who has seen no change


class NamesMachine(RuleBasedStateMachine):
    """The model is a dict: key to value, owner, whether it is lasting. And each owner has a deadline. Followers see the
    changes below their roots, some of them seldom."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.names = Names(lambda: self.now)
        self.model: dict[str, tuple[int, str, bool]] = {}
        self.deadlines: dict[str, float] = {}
        self.seen: dict[str, tuple[dict[str, object], list[object]]] = {root: ({}, NEVER) for root in ROOTS}
        self.n = 0

    def live(self) -> dict[str, tuple[int, str, bool]]:
        ended = {owner for owner, deadline in self.deadlines.items() if deadline <= self.now}
        self.model = {k: v for k, v in self.model.items() if v[2] or v[1] not in ended}
        return self.model

    @rule(
        key=st.sampled_from(KEYS), owner=st.sampled_from(OWNERS), lease=st.sampled_from(LEASES), replace=st.booleans()
    )
    def add(self, key: str, owner: str, lease: float | None, replace: bool) -> None:
        self.n += 1
        old = self.live().get(key)
        if old is not None and old[1] != owner and not replace:
            with pytest.raises(NameTableError, match=f"'{key}' is taken by {old[1]}"):
                self.names.add(key, self.n, owner=owner, lease=lease)
            return
        self.names.add(key, self.n, owner=owner, lease=lease, replace=replace)
        self.model[key] = (self.n, owner, lease is None)
        if lease is not None:
            self.deadlines[owner] = self.now + lease

    @rule(owner=st.sampled_from(OWNERS), lease=st.sampled_from(LEASES[1:]))
    def renew(self, owner: str, lease: float) -> None:
        mine = {k for k, v in self.live().items() if v[1] == owner}
        self.names.renew(owner, lease)
        assert self.names.keys_of(owner) == mine
        self.deadlines[owner] = self.now + lease

    @rule(key=st.sampled_from(KEYS), owner=st.sampled_from(OWNERS))
    def delete(self, key: str, owner: str) -> None:
        has = key in self.live() and owner == self.model[key][1]
        assert self.names.delete(key, owner=owner) == has
        if has:
            del self.model[key]

    @rule(root=st.sampled_from(KEYS))
    def clear(self, root: str) -> None:
        below = [k for k in self.live() if (k + "/").startswith(root + "/")]
        assert self.names.clear(root) == len(below)
        for key in below:
            del self.model[key]

    @rule(root=st.sampled_from(ROOTS))
    def look(self, root: str) -> None:
        self.names.expire()
        found, since = self.seen[root]
        is_new = since[0] != self.names.last[0]
        if is_new:
            found = {}
        while True:
            has_changed = self.names.has_changed(frozenset([root]), since)
            changes, since = self.names.changes(frozenset([root]), since)
            assert has_changed == (bool(changes) or is_new)
            is_new = False
            for key, value in changes.items():
                found.pop(key, None)
                if value:
                    found[key] = value[0]
            if since == self.names.last:
                break
        self.seen[root] = found, since
        assert found == {k: v[0] for k, v in self.live().items() if not root or (k + "/").startswith(root + "/")}

    @rule(seconds=st.sampled_from((0.1, 0.5, 1.0, 3.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def the_table_is_the_model(self) -> None:
        self.names.expire()
        found = {key: value[0] for key, value in self.names.changes(frozenset([""]), NEVER)[0].items() if value}
        assert found == {key: value[0] for key, value in self.live().items()}


# 100,000 operations; daily 2,000. Some examples have fewer steps than 50.
NamesMachine.TestCase.settings = settings(max_examples=scaled(2200, 40), stateful_step_count=50, deadline=None)
TestNames = NamesMachine.TestCase


@pytest.mark.parametrize("key", ["", "/", "a//b", "/a", "a/", 3, None, "x" * 501])
def test_a_key_is_a_path(key: object) -> None:
    with pytest.raises(NameTableError, match="a name is a path"):
        Names(lambda: 0.0).add(key, 1, owner="x")  # type: ignore[arg-type]


@pytest.mark.parametrize("lease", [0, -1.0, float("nan")])
def test_a_lease_has_a_length(lease: float) -> None:
    with pytest.raises(NameTableError, match="longer than 0"):
        Names(lambda: 0.0).add("a", 1, owner="x", lease=lease)


def test_many_names_come_in_pages() -> None:
    names = Names(lambda: 0.0)
    for i in range(1200):
        names.add(f"workers/{i:04}", "x" * (60_000 if i % 300 == 7 else i), owner="owner", lease=1.0)
    seen, since = dict[str, object](), NEVER
    while since != names.last:
        changes, since = names.changes(frozenset(["workers"]), since)
        assert len(encode(changes)[0]) <= names_module.PAGE
        seen |= changes
    assert len(seen) == 1200
    keys, after = list[str](), ""
    while after is not None:
        page, after = names.page_of_keys("owner", after)
        keys += page
    assert keys == [f"workers/{i:04}" for i in range(1200)]


def test_a_value_has_a_limit() -> None:
    with pytest.raises(NameTableError, match=r"the value of the name 'a' has 70,\d\d\d bytes. At most 65,536"):
        Names(lambda: 0.0).add("a", "x" * 70_000, owner="x")


def test_what_is_remembered_of_changes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names_module, "_MOST_DELETED", 10)
    names = Names(lambda: 0.0)
    names.add("kept", 1, owner="x")
    first = names.last
    for i in range(100):
        names.add("changing", i, owner="x")
    assert (names.last[0], len(names._changed) <= 15) == (first[0], True)
    assert names.changes(frozenset([""]), first)[0]["changing"] == [99]
    for i in range(100):
        names.add(f"short/{i}", i, owner="x")
        names.delete(f"short/{i}", owner="x")
    assert len(names._changed) <= 15
    assert names.last[0] != first[0], "who has missed changes takes all names"
    assert {"kept": [1], "changing": [99]}.items() <= names.changes(frozenset([""]), first)[0].items()


def test_all_pages_come_after_deleted_keys_were_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names_module, "_MOST_DELETED", 10)
    monkeypatch.setattr(names_module, "PAGE", 200)
    names, found, since = Names(lambda: 0.0), dict[str, Any](), ["another", 7]
    for i in range(12):
        names.add(f"lasting/{i}", i, owner="x")
    first, i = names.last[0], 0
    while names.last[0] == first:
        names.add(f"short/{i}", 0, owner="x")
        names.delete(f"short/{i}", owner="x")
        i += 1
    while since != names.last:
        page, since = names.changes(frozenset([""]), since)
        found |= page
    assert {key for key, value in found.items() if value} == {f"lasting/{i}" for i in range(12)}
