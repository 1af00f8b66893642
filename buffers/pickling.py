"""How penstock pickles what another process needs: with cloudpickle, which also sends what a script defines."""

from __future__ import annotations

import io
import linecache
import os
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import cloudpickle


def dumps(value: object) -> bytes:
    """`value`, pickled. Raises what pickling raises."""
    stream = io.BytesIO()
    Pickler(stream).dump(value)
    return stream.getvalue()


# ---- code: a traceback names its file, and shows its lines ---------------------------------------------


def _reduced_code(code: types.CodeType) -> tuple[Any, ...]:
    file = code.co_filename
    # Another process cannot read the cell of a notebook. It can read the file of a script.
    lines = [] if os.path.exists(file) else linecache.getlines(file)
    return _rebuilt_code, (*cloudpickle.Pickler.dispatch_table[types.CodeType](code), file, lines)


def _rebuilt_code(
    make: Callable[..., types.CodeType], arguments: Sequence[Any], file: str, lines: list[str]
) -> types.CodeType:
    if lines and file not in linecache.cache:
        linecache.cache[file] = sum(map(len, lines)), None, lines, file  # None: no file that may have changed
    return make(*arguments).replace(co_filename=file)  # cloudpickle 3.1.3 leaves it out


# ---- functions: Python 3.14 evaluates annotations when somebody reads them ------------------------------


if sys.version_info >= (3, 14):
    from annotationlib import Format, get_annotations

    def _with_annotations_as_text(function: types.FunctionType) -> types.FunctionType:
        """A copy of `function`, whose annotations may have names that only type checkers import."""
        copied = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        copied.__dict__.update(function.__dict__)
        for name in ("__kwdefaults__", "__qualname__", "__module__", "__doc__"):
            setattr(copied, name, getattr(function, name))
        copied.__annotations__ = get_annotations(function, format=Format.STRING)
        return copied


# ---- layers with torch's parametrizations ----------------------------------------------------------------


def _is_parametrized(value: object) -> bool:
    """torch gives each layer with parametrizations a class of its own, which refuses to be pickled."""
    refusal = vars(type(value)).get("__getstate__")
    return getattr(refusal, "__module__", None) == "torch.nn.utils.parametrize"


def _reduced_layer(layer: Any) -> tuple[Any, ...]:
    """Pickle the layer as one of the class that it had before its parametrizations."""
    cls = type(layer).__bases__[0]
    state = cls.__getstate__(layer) if hasattr(cls, "__getstate__") else vars(layer)  # Python 3.10 has none
    return cls.__new__, (cls,), state, None, None, _parametrize


def _parametrize(layer: Any, state: Any) -> None:
    """Set the state of a new layer, and give it a class of its own again."""
    from torch.nn.utils import parametrize

    layer.__setstate__(state)
    parametrize._inject_new_class(layer)
    for name in layer.parametrizations:
        parametrize._inject_property(layer, name)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, which can send more: where code is from, annotations that cannot be evaluated, and layers with
    torch's parametrizations."""

    dispatch_table: ClassVar[Any] = ChainMap({types.CodeType: _reduced_code}, cloudpickle.Pickler.dispatch_table)

    def reducer_override(self, value: Any) -> Any:
        """How `value` is pickled."""
        if type(value).__module__ == "multiprocessing.connection":  # its number means another descriptor there
            raise TypeError("Pipe connections should only be shared between processes through inheritance")
        if _is_parametrized(value):
            return _reduced_layer(value)
        try:
            return super().reducer_override(value)
        except Exception:
            if sys.version_info >= (3, 14) and isinstance(value, types.FunctionType):
                return super().reducer_override(_with_annotations_as_text(value))
            raise
