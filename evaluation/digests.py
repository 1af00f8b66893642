"""Digests of policies and functions, by which a folder of results knows whether they are the same."""

from __future__ import annotations

import dis
import functools
import hashlib
import os
import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from penstock.agents import Agent
from penstock.agents.shared_parameters import parameters_of

_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
#: What changes while a policy acts: only the class is compared.
_STATE = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random, deque)
#: The private attributes of penstock's agents that are settings.
_SETTINGS = ("_fn", "_epsilon_setting", "_eval_setting", "_sigma_setting", "_ou", "_initial_log_std")
#: The public attributes that are none. Parameters and model are compared by themselves.
_NO_SETTINGS = ("parameters", "model", "inference", "observation_space", "action_space", "env_ranks", "n_envs")


def digest(value: object) -> str:
    """A short text that is another one if `value` is: its code, with the global variables that this uses, what it
    holds, however deep, arrays, and the parameters of agents and torch modules. Of libraries only the names are
    compared, and of random generators and deques nothing: they change while a policy acts."""
    return _digest(value, {})


def _digest(value: object, seen: dict[int, Any]) -> str:
    """`seen`: what was visited, by its id, which nothing else gets meanwhile."""
    hashed = hashlib.sha256()
    stack: list[Iterator[Any]] = [iter([value])]  # not recursive: a list may be linked a thousand times
    while stack:
        for part in stack[-1]:
            if isinstance(part, bytes | memoryview):
                hashed.update(part)
                hashed.update(b"\0")
            else:
                stack.append(_parts(part, seen))
                break
        else:
            stack.pop()
            hashed.update(b"\1")
    return hashed.hexdigest()[:16]


def _parts(value: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """What to compare of `value`, in order: bytes, and values that have parts themselves."""
    yield type(value).__qualname__.encode()
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | range | np.generic):
        yield repr(value).encode()
    elif isinstance(value, types.ModuleType):
        yield value.__name__.encode()
    elif isinstance(value, np.ndarray):
        yield from _of_array(value)
    elif id(value) not in seen and not isinstance(value, _STATE):
        seen[id(value)] = value
        if isinstance(value, set | frozenset):
            yield from sorted(_digest(part, dict(seen)).encode() for part in value)
        else:
            yield from next((parts for cls, parts in _PARTS.items() if isinstance(value, cls)), _of_object)(value)


def _of_array(array: Any) -> Iterator[Any]:
    yield str((array.dtype, array.shape)).encode()
    if array.dtype.hasobject:
        yield array.tolist()
    elif array.size:
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _of_object(value: Any) -> Iterator[Any]:
    """What pickle would take of it; of what it cannot take, such as a lock, the attributes."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and value.layout == torch.strided:
        yield from _of_tensor(value.detach().cpu())
    elif torch is not None and isinstance(value, torch.jit.ScriptModule):
        yield [module.code for module in value.modules()]
        yield {**dict(value.named_parameters()), **dict(value.named_buffers())}
    elif torch is not None and isinstance(value, torch.nn.Module) and "_orig_mod" in value._modules:
        yield value._modules["_orig_mod"]  # it is compiled
    elif torch is not None and isinstance(value, torch.nn.Module):
        yield from (type(value), value.training, _of_module(value), value._parameters, value._buffers, value._modules)
    elif torch is None or not isinstance(value, torch.Generator | torch.device):
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:  # this may be the user's code
            yield type(value)
            yield _attributes(value)
            return
        if isinstance(reduced, str):  # a global name, as of a function that is cached
            yield from (reduced, _attributes(value))
        else:
            yield from (list(part) if isinstance(part, Iterator) else part for part in reduced)


def _of_tensor(tensor: Any) -> Iterator[Any]:
    torch = sys.modules["torch"]
    yield str((tensor.dtype, tuple(tensor.shape))).encode()
    if tensor.numel():
        yield memoryview(tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy())


def _of_module(module: Any) -> dict[str, Any]:
    """What a torch module holds beside tensors and other modules; hooks without their numbers, which differ."""
    torch = sys.modules["torch"]
    held = {name: value for name, value in vars(module).items() if not isinstance(value, torch.Tensor)}
    usual = vars(torch.nn.Module())
    hooks = {name: list(held[name].values()) for name in usual if "hooks" in name and isinstance(held.get(name), dict)}
    return {name: value for name, value in held.items() if name not in usual} | {k: v for k, v in hooks.items() if v}


def _attributes(value: Any) -> dict[str, Any]:
    slots = [name for cls in type(value).__mro__ for name in _as_names(vars(cls).get("__slots__", ()))]
    slot_values = {name: getattr(value, name, None) for name in slots if name not in ("__dict__", "__weakref__")}
    return {**slot_values, **getattr(value, "__dict__", {})}


def _as_names(slots: Any) -> Iterable[str]:
    return [slots] if isinstance(slots, str) else slots


def _of_agent(agent: Any) -> Iterator[Any]:
    """Its code, its parameters, the code and the settings of its model, and its own settings."""
    yield type(agent)
    # A pickled function differs in each process, so the function itself is compared.
    yield from sorted((name, array) for name, array in parameters_of(agent).items() if name != "function")
    held, torch = vars(agent), sys.modules.get("torch")
    if torch is not None and isinstance(model := held.get("model"), torch.nn.Module):
        yield [(type(module), _of_module(module)) for module in model.modules()]
    settings = {name for cls in type(agent).__mro__ if not _is_of_library(cls) for name in _names_of_class(cls)}
    yield {
        name: value
        for name, value in held.items()
        if name in _SETTINGS or (name not in _NO_SETTINGS and (not name.startswith("_") or name in settings))
    }


def _of_class(cls: type) -> Iterator[Any]:
    """Its names, and what it and its bases outside of libraries define."""
    for base in cls.__mro__:
        yield f"{base.__module__}.{base.__qualname__}".encode()
        if not _is_of_library(base):
            yield {name: value for name, value in sorted(vars(base).items()) if _is_defined(name, value)}


def _is_defined(name: str, value: object) -> bool:
    """Whether an attribute of a class was written by the user."""
    if isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
        return False
    is_special = name.startswith("__") and name.endswith("__")
    return name != "_abc_impl" and (not is_special or isinstance(value, types.FunctionType))


def _names_of_class(cls: type) -> Iterator[str]:
    """The names of attributes, and others, that its methods use."""
    methods = [value for value in vars(cls).values() if isinstance(value, types.FunctionType)]
    return (name for method in methods for code in _codes(method.__code__) for name in code.co_names)


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    yield f"{function.__module__}.{function.__qualname__}".encode()
    if _is_of_library(function):
        return
    yield from _of_code(function.__code__)
    yield from (function.__defaults__, function.__kwdefaults__, vars(function))
    yield [_content(cell) for cell in function.__closure__ or ()]
    codes = list(_codes(function.__code__))
    looked_up = dict.fromkeys(op.argval for code in codes for op in dis.get_instructions(code) if "GLOBAL" in op.opname)
    used = {name: function.__globals__[name] for name in looked_up if name in function.__globals__}
    yield used
    names = dict.fromkeys(name for code in codes for name in code.co_names)
    for module in used.values():
        if isinstance(module, types.ModuleType) and not _is_file_of_library(module.__name__):
            yield {name: vars(module)[name] for name in names if name in vars(module)}


def _of_code(code: types.CodeType) -> Iterator[Any]:
    yield code.co_code
    yield from code.co_names
    for constant in code.co_consts:
        yield from _of_code(constant) if isinstance(constant, types.CodeType) else [constant]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code, and that of the functions inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _is_of_library(value: Any) -> bool:
    return value.__module__ != "__main__" and _is_file_of_library(value.__module__)


def _is_file_of_library(module: str) -> bool:
    """Whether the module of this name belongs to Python, to an installed package or to penstock. One that is not there
    is of a class that came to this process by value."""
    if module not in sys.modules:
        return False
    file = getattr(sys.modules[module], "__file__", None)
    return file is None or module.startswith("penstock.") or os.path.abspath(file).startswith(_LIBRARIES)


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
    partial: lambda value: (value.func, value.args, dict(value.keywords)),
    types.MethodType: lambda value: (value.__func__, value.__self__),
    types.FunctionType: _of_function,
    (staticmethod, classmethod): lambda value: (value.__func__,),
    property: lambda value: (value.fget, value.fset),
    functools.cached_property: lambda value: (value.func,),
    gym.Space: lambda value: (type(value), {k: v for k, v in vars(value).items() if k != "_np_random"}),
    type: _of_class,
}
