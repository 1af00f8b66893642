"""Classes that break one rule each, and the errors that must name the rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from penstock.testing import ConformanceError

Class = TypeVar("Class", bound=type)


class Broken(list[tuple[Any, str, str]]):
    """Classes, each with the rule that it breaks and a pattern of the message."""

    def breaks(self, rule: str, words: str) -> Callable[[Class], Class]:
        """Decorates a class that is to be added."""

        def add(cls: Class) -> Class:
            self.append((cls, rule, words))
            return cls

        return add

    @property
    def rules(self) -> set[str]:
        return {rule for _, rule, _ in self}

    @property
    def names(self) -> list[str]:
        return [cls.__name__ for cls, *_ in self]


@contextmanager
def finds(rule: str, words: str, name: str = r"\w+") -> Iterator[None]:
    """Something named `name` is checked here, and breaks this rule."""
    with pytest.raises(ConformanceError, match=f"(?s){words}") as caught:
        yield
    assert caught.value.rule == rule, str(caught.value)
    assert re.match(rf"{name} breaks the rule {rule}\n  rule: (.|\n)*\n  do:   ", str(caught.value))


def assert_rules_are_stated(rules: Any, broken: set[str]) -> None:
    """Each rule has a statement, and something breaks it."""
    assert all(rule.__doc__ and rule.__doc__.rstrip().endswith(".") for rule in rules)
    assert {rule.__name__ for rule in rules} == broken
