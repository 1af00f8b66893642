"""The name table: leases, subtrees, waiting and watching, against a model with a clock that the test moves."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock import NameTableError
from penstock.control.names import Names

from ..scale import scaled

pytestmark = [pytest.mark.timeout(scaled(1800, 120)), pytest.mark.slow]

KEYS = ("a", "a/b", "a/b/c", "a/c", "ab", "ab/b")
OWNERS = ("x", "y", "z")
LEASES = (None, 1.0, 2.5)


class NamesMachine(RuleBasedStateMachine):
    """The model is a dict: key to value, owner, lease and the time at which it runs out."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.names = Names(lambda: self.now)
        self.model: dict[str, tuple[int, str, float | None, float]] = {}
        self.waiting: dict[str, str] = {}
        self.watching: dict[str, tuple[tuple[str, ...], str, set[str]]] = {}
        self.n = 0

    def live(self) -> dict[str, tuple[int, str, float | None, float]]:
        self.model = {k: v for k, v in self.model.items() if v[2] is None or v[3] > self.now}
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
        self.model[key] = (self.n, owner, lease, self.now + (lease or 0.0))
        for keys, _, seen in self.watching.values():
            seen.update({key} & set(keys))

    @rule(owner=st.sampled_from(OWNERS))
    def renew(self, owner: str) -> None:
        mine = {k: v for k, v in self.live().items() if v[1] == owner}
        assert self.names.renew(owner) == sorted(mine)
        for key, (value, _, lease, _) in mine.items():
            self.model[key] = (value, owner, lease, self.now + (lease or 0.0))

    @rule(key=st.sampled_from(KEYS))
    def get(self, key: str) -> None:
        if key in self.live():
            assert self.names.get(key) == self.model[key][0]
        else:
            with pytest.raises(NameTableError, match=f"no name '{key}'"):
                self.names.get(key)

    @rule(key=st.sampled_from(KEYS), owner=st.sampled_from((None, *OWNERS)))
    def delete(self, key: str, owner: str | None) -> None:
        has = key in self.live() and owner in (None, self.model[key][1])
        assert self.names.delete(key, owner=owner) == has
        if has:
            del self.model[key]

    @rule(root=st.sampled_from(("", *KEYS, "b")))
    def find(self, root: str) -> None:
        below = {k: v[0] for k, v in self.live().items() if not root or (k + "/").startswith(root + "/")}
        assert self.names.find(root) == below
        assert list(self.names.find(root)) == sorted(below)

    @rule(root=st.sampled_from(KEYS))
    def clear(self, root: str) -> None:
        below = [k for k in self.live() if (k + "/").startswith(root + "/")]
        assert self.names.clear(root) == len(below)
        for key in below:
            del self.model[key]

    @rule(key=st.sampled_from(KEYS))
    def wait(self, key: str) -> None:
        self.n += 1
        self.names.wait(key, f"wait {self.n}")
        self.waiting[f"wait {self.n}"] = key

    @rule(
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True), until=st.sampled_from(("any", "all"))
    )
    def watch(self, keys: list[str], until: str) -> None:
        self.n += 1
        self.names.watch(keys, f"watch {self.n}", until=until)
        self.watching[f"watch {self.n}"] = (tuple(keys), until, set(keys) & set(self.live()))

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        tokens = sorted({*self.waiting, *self.watching})
        if tokens:
            token = data.draw(st.sampled_from(tokens))
            self.names.forget(token)
            self.waiting.pop(token, None)
            self.watching.pop(token, None)

    @rule(seconds=st.sampled_from((0.1, 0.5, 1.0, 3.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def due(self) -> None:
        live = self.live()
        expected: dict[str, object] = {t: live[key][0] for t, key in self.waiting.items() if key in live}
        for token, (keys, until, seen) in self.watching.items():
            gone = [key for key in keys if key in seen and key not in live]
            if (until == "any" and gone) or (until == "all" and len(gone) == len(keys)):
                expected[token] = gone
        assert dict(self.names.due()) == expected
        for token in expected:
            self.waiting.pop(token, None)
            self.watching.pop(token, None)

    @invariant()
    def the_table_is_the_model(self) -> None:
        assert self.names.find() == {key: value[0] for key, value in sorted(self.live().items())}


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


def test_a_watch_is_for_any_or_all() -> None:
    with pytest.raises(NameTableError, match='"any" or "all"'):
        Names(lambda: 0.0).watch(["a"], "token", until="some")
