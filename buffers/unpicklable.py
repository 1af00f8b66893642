"""What cannot be pickled for another process: where it is, and what to do instead."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from penstock.buffers.pickling import Pickler
from penstock.buffers.reports import in_one_line
from penstock.errors import ConfigError

#: What `multiprocessing` says of its own objects, such as a Queue, a Lock, a Value or a RawArray.
_INHERITED = re.compile(r"should only be shared between processes through inheritance|'mmap\.mmap'")


def not_picklable(what: str, value: object, error: Exception, *, more: str = "") -> ConfigError:
    """The error for `value`, which could not be pickled because of `error`: `what` it is, the variable that is in the
    way, and what to do; `more` is another remedy."""
    return ConfigError(f"{what}: {in_one_line(error)}. {_remedy(value, error)}{more}")


def _remedy(value: object, error: Exception) -> str:
    where = _variable_in(value)
    if _INHERITED.search(str(error)):
        what = (
            "A Queue, Lock, Value or Pipe of multiprocessing cannot be sent to a process that runs already. Use one of "
            "a manager, such as multiprocessing.Manager().Queue(), .Lock() or .Value(), or a SharedMemory"
        )
    elif where:
        what = (
            "Pass what is needed of it as an argument, make it where it is used, or put what uses it into a module, "
            "which each worker then imports"
        )
    else:
        what = "Create such objects inside the function, or in the environment"
    return f"{where}{what}"


def _variable_in(value: object) -> str:
    """The variable that cannot be pickled, of a function or class in `value` that is pickled with what it uses. "" if
    there is none."""
    found = _TracingPickler()
    found.cannot_pickle(value)
    for user in reversed(found.by_value):  # the last one was at work
        for kind, name, content in _variables_of(user):
            if _TracingPickler().cannot_pickle(content):
                return f"It is the {kind} {name!r}, which {user.__qualname__} uses. "
    return ""


class _TracingPickler(Pickler):
    """A pickler that remembers the functions and classes that it pickles by value, with what they use."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.by_value: list[FunctionType | type] = []

    def reducer_override(self, value: Any) -> Any:
        found = super().reducer_override(value)
        if isinstance(value, FunctionType | type) and found is not NotImplemented:
            self.by_value.append(value)
        return found

    def cannot_pickle(self, value: object) -> bool:
        """Whether `value` cannot be pickled."""
        try:
            self.dump(value)
        except Exception:  # pickling runs the user's code, which may raise anything
            return True
        return False


def _variables_of(user: FunctionType | type) -> Iterator[tuple[str, str, Any]]:
    """Kind, name and content: of a function, the variables from outside that it uses; of a class, its attributes."""
    if isinstance(user, type):
        for name, content in vars(user).items():
            if not name.startswith(("__", "_abc_")):  # Python's own are not pickled
                yield "attribute", name, content
        return
    for name, cell in zip(user.__code__.co_freevars, user.__closure__ or (), strict=True):
        if name != "__class__":  # of `super()`
            yield "variable", name, getattr(cell, "cell_contents", None)
    for name in dict.fromkeys(_names_in(user.__code__)):
        if name in user.__globals__:
            yield "global variable", name, user.__globals__[name]


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names_in(const)
