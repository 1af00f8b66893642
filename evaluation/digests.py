"""Digests of policies and functions, by which a folder of results knows whether they are the same."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from penstock.agents import Agent
from penstock.agents.shared_parameters import parameters_of

_DEEPEST = 12  # what lies deeper is not compared
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def digest(value: object) -> str:
    """A short text that is another one if `value` is: its code, with the global variables that this uses, what it
    holds, arrays, and the parameters of agents and torch modules. Of libraries only the names are compared."""
    hashed = hashlib.sha256()
    for part in _parts(value, 0, {}):
        hashed.update(part)
        hashed.update(b"\0")
    return hashed.hexdigest()[:16]


def _parts(value: Any, depth: int, seen: dict[int, Any]) -> Iterator[bytes]:
    """What to compare of `value`, in order. `seen`: what was visited, by its id, which nothing else gets meanwhile."""
    yield type(value).__qualname__.encode()
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | range | np.generic):
        yield repr(value).encode()
        return
    if isinstance(value, np.ndarray):
        yield str((value.dtype, value.shape)).encode()
        yield value.tobytes() if not value.dtype.hasobject else repr(value.tolist()).encode()
        return
    if isinstance(value, types.ModuleType):
        yield value.__name__.encode()
        return
    if depth > _DEEPEST or id(value) in seen:
        return
    seen[id(value)] = value
    for part in _children(value):
        yield from [part] if isinstance(part, bytes) else _parts(part, depth + 1, seen)


def _children(value: Any) -> Iterator[Any]:
    for cls, parts in _PARTS.items():
        if isinstance(value, cls):
            yield from parts(value)
            return
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        array = value.detach().cpu().contiguous()
        yield str((array.dtype, tuple(array.shape))).encode()
        yield array.reshape(-1).view(torch.uint8).numpy().tobytes() if array.numel() else b""
        return
    yield type(value)
    held = vars(value) if hasattr(value, "__dict__") else {}
    yield {key: each for key, each in held.items() if not key.startswith("__")}


def _of_agent(agent: Any) -> Iterator[Any]:
    # A pickled function differs in each process, so the function itself is compared.
    yield from sorted((name, array) for name, array in parameters_of(agent).items() if name != "function")
    yield vars(agent).get("_fn")
    yield {k: v for k, v in vars(agent).items() if isinstance(v, bool | float | str) and not k.startswith("_")}


def _of_class(cls: type) -> Iterator[Any]:
    yield f"{cls.__module__}.{cls.__qualname__}".encode()
    if not _is_of_library(cls):
        yield {k: v for k, v in vars(cls).items() if isinstance(v, types.FunctionType | int | float | str)}


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    yield f"{function.__module__}.{function.__qualname__}".encode()
    if _is_of_library(function):
        return
    yield from _of_code(function.__code__)
    yield from (function.__defaults__, function.__kwdefaults__)
    yield [_content(cell) for cell in function.__closure__ or ()]
    yield {name: function.__globals__[name] for name in _names_of(function.__code__) if name in function.__globals__}


def _of_code(code: types.CodeType) -> Iterator[Any]:
    yield code.co_code
    yield from code.co_names
    for constant in code.co_consts:
        yield from _of_code(constant) if isinstance(constant, types.CodeType) else [constant]


def _names_of(code: types.CodeType) -> list[str]:
    """The names that the code, and functions inside, may look up in the global variables."""
    inner = [
        name for constant in code.co_consts if isinstance(constant, types.CodeType) for name in _names_of(constant)
    ]
    return list(dict.fromkeys([*code.co_names, *inner]))


def _is_of_library(value: Any) -> bool:
    module = sys.modules.get(value.__module__)
    file = getattr(module, "__file__", None)
    return value.__module__ != "__main__" and (file is None or os.path.abspath(file).startswith(_LIBRARIES))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


#: What to compare of an object of each class.
_PARTS: dict[Any, Callable[[Any], Iterable[Any]]] = {
    Agent: _of_agent,
    Mapping: lambda value: value.items(),
    (list, tuple): iter,
    (set, frozenset): lambda value: [sorted(map(digest, value))],
    partial: lambda value: (value.func, value.args, dict(value.keywords)),
    types.MethodType: lambda value: (value.__func__, value.__self__),
    types.FunctionType: _of_function,
    type: _of_class,
}
