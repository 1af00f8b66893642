"""Digests of policies and functions: by them a folder of results refuses another policy at once, with a clear reason.

They are no proof that two policies are the same. That is `penstock.evaluation.proof`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import NoneType
from typing import Any

import numpy as np

from penstock.agents import Agent
from penstock.agents.shared_parameters import parameters_of

_OF_PYTHON = tuple(os.path.join(sysconfig.get_paths()[name], "") for name in ("stdlib", "platstdlib"))
_OF_PENSTOCK = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
#: What an attribute may become while a policy acts.
_STATE = (int, float, complex, np.generic, NoneType, np.random.Generator, np.random.RandomState, deque)
_INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")


def digest(value: object) -> str:
    """A short text that is another one if `value` has other code, arrays, tensors or texts, however deep. It is equal
    in another process of the same version of Python.

    Of a library, only the names of its functions and classes count. Numbers count only in code and as arguments, since
    a policy may count. Random generators, queues, caches of Python and most of what objects of libraries hold do not.
    """
    hashed, seen, todo = hashlib.sha256(), dict[int, Any](), [value]  # not recursive: a list may be linked very often
    while todo:
        part = todo.pop()
        if isinstance(part, bytes | memoryview | str):
            hashed.update(part.encode() if isinstance(part, str) else part)
            hashed.update(b"\0")
        elif not (isinstance(part, _STATE) or id(part) in seen):
            seen[id(part)] = part  # so nothing else gets its id
            todo += [type(part).__qualname__, *_parts(part)]
    return hashed.hexdigest()[:16]


def _parts(value: Any) -> Iterable[Any]:
    """What counts of a value: bytes and texts, and values that have parts themselves."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor | torch.nn.Module):
        return _of_tensor(torch, value.detach()) if isinstance(value, torch.Tensor) else _of_module(torch, value)
    found = next((parts for cls, parts in _PARTS.items() if isinstance(value, cls)), None)
    if found is not None:
        return found(value)
    if type(value).__module__ in sys.stdlib_module_names:  # such as a lock, a logger or a queue
        return ()
    return _of_library(torch, value) if _is_of_library(type(value)) else _attributes(value)


def _of_array(array: Any) -> Iterator[Any]:
    yield f"{array.dtype}{array.shape}"
    yield array.tolist() if array.dtype.hasobject else array.tobytes()
    yield np.ma.getmaskarray(array).tobytes() if isinstance(array, np.ma.MaskedArray) else b""


def _of_agent(agent: Any) -> Iterator[Any]:
    # A pickled function differs in each process, so the function itself is compared.
    yield {name: array for name, array in parameters_of(agent).items() if name != "function"}
    yield from (type(agent), *(vars(agent).get(name) for name in ("model", "_fn")))


def _of_module(torch: Any, module: Any) -> Iterable[Any]:
    if isinstance(module, torch.jit.ScriptModule):
        return module.code, dict(module.named_parameters()), dict(module.named_buffers())
    return [module._modules["_orig_mod"]] if "_orig_mod" in module._modules else _attributes(module)  # if compiled


def _of_tensor(torch: Any, tensor: Any) -> Iterable[Any]:
    if tensor.is_nested:
        return list(tensor.unbind())
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    tensor = (tensor if tensor.layout == torch.strided else tensor.to_dense()).cpu().resolve_conj().resolve_neg()
    return str(tensor.dtype), memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def _of_library(torch: Any, value: Any) -> Iterator[Any]:
    """The class of an object of a library, and the models, the functions and the objects of the user that it holds. Its
    other attributes may be those of the last call."""
    models = (
        Mapping,
        list,
        tuple,
        partial,
        types.FunctionType,
        types.MethodType,
        *([torch.nn.Module] if torch is not None else ()),
    )
    yield type(value)
    for name, held in sorted(getattr(value, "__dict__", {}).items()):
        if isinstance(held, models) or not _is_of_library(type(held)):
            yield from (name, held)


def _attributes(value: Any) -> Iterator[Any]:
    """The class of an object, and what its attributes hold that is no number."""
    slots = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
    names = [name for part in slots for name in ([part] if isinstance(part, str) else part)]
    held = {name: getattr(value, name, None) for name in names} | getattr(value, "__dict__", {})
    yield type(value)
    for name in sorted(map(str, held)):
        is_cache = isinstance(getattr(type(value), name, None), functools.cached_property)
        if not (is_cache or isinstance(held.get(name), _STATE)):
            yield from (name, held.get(name))


def _of_class(cls: type) -> Iterator[Any]:
    for base in cls.__mro__:
        yield f"{base.__module__}.{base.__qualname__}"
        if not _is_of_library(base):
            for name, value in sorted(vars(base).items()):
                # Python adds entries of its own, such as `__slotnames__` when an object is pickled.
                is_written = isinstance(value, types.FunctionType) or not name.startswith(("__", "_abc_"))
                if is_written and not isinstance(value, _STATE):
                    yield from (name, value)


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    yield function.__qualname__
    if _is_library(function.__code__.co_filename):
        return
    yield from (function.__code__, _as_texts(function.__defaults__), _as_texts(function.__kwdefaults__))
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty
            yield None
    for code in _codes(function.__code__):
        yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)


def _of_code(code: types.CodeType) -> Iterator[Any]:
    yield from (code.co_code, " ".join(code.co_names), _as_texts(code.co_consts))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code, and that of the functions inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _as_texts(values: Any) -> Any:
    """Arguments and constants, of which numbers count too."""
    if isinstance(values, Mapping):
        return {key: _as_texts(entry) for key, entry in values.items()}
    if isinstance(values, list | tuple):
        return [_as_texts(entry) for entry in values]
    if isinstance(values, frozenset):
        return sorted(map(repr, values))
    return repr(values) if isinstance(values, int | float | complex | None) else values


def _is_of_library(cls: type) -> bool:
    module = sys.modules.get(cls.__module__)  # None for a class that came by value
    return module is not None and cls.__module__ != "__main__" and _is_library(getattr(module, "__file__", None))


def _is_library(file: str | None) -> bool:
    """Whether a file is one of Python, of an installed package or of penstock; None: it has none."""
    if file is None or file.startswith(("<frozen", *_OF_PYTHON, _OF_PENSTOCK)):
        return True
    return _INSTALLED.search(file) is not None


#: What counts of an object of each class.
_PARTS: dict[Any, Callable[[Any], Iterable[Any]]] = {
    np.ndarray: _of_array,
    Agent: _of_agent,
    # Hooks of modules have numbers as keys, which differ.
    Mapping: lambda value: [
        part for key, entry in value.items() for part in (key if isinstance(key, str) else "", entry)
    ],
    set | frozenset: lambda value: sorted(part if isinstance(part, str) else type(part).__qualname__ for part in value),
    list | tuple: iter,
    types.ModuleType: lambda value: [value.__name__],
    types.CodeType: _of_code,
    partial: lambda value: (value.func, _as_texts(value.args), _as_texts(value.keywords)),
    types.MethodType: lambda value: (value.__func__, value.__self__),
    types.FunctionType: _of_function,
    staticmethod | classmethod: lambda value: (value.__func__,),
    property: lambda value: (value.fget, value.fset),
    functools.cached_property: lambda value: (value.func,),
    functools._lru_cache_wrapper: lambda value: (value.__wrapped__,),
    type: _of_class,
}
