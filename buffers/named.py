"""NamedArrays: nested arrays with names, which are indexed, assigned and copied together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, SpaceError

_Self = TypeVar("_Self", bound="NamedArrays")


class NamedArrays:
    """Named fields, each an array or another `NamedArrays`.

    As in a named tuple, fields are attributes (`x.reward`), unpack in order (`a, b = x`) and cannot be replaced. But an
    index applies to every array: `x[3]`, `x[:, 1:4]` and `x[mask]` return the same structure, and `x[3] = y` writes
    every field. A string is the name of a field: `x["position"]`. The fields of a Tuple space are called `_0`, `_1`, …,
    as `collections.namedtuple(rename=True)` names them.

    A loop over `x`, `len(x)` and `zip(x, ...)` go through the fields. `x.rows()` goes through the rows: `x[0]`, `x[1]`
    and so on.

    Leaves are numpy arrays or torch tensors. `torch()` and `numpy()` convert without a copy.
    """

    __slots__ = ("_values",)
    _values: dict[str, Any]
    _remedies: ClassVar[Mapping[str, str]] = {}  # for fields that are not always there

    def __init__(self, values: Mapping[str, Any] | None = None, /, **fields: Any) -> None:
        object.__setattr__(self, "_values", {**(values or {}), **fields})

    # ---- fields ----------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # copy, pickle and numpy look for special methods
        try:
            return self._values[name]
        except KeyError:
            remedy = self._remedies.get(name)
            raise AttributeError(
                f"{type(self).__name__} has no field {name!r}; it has {', '.join(self._values) or 'none'}"
                + (f". To record it, {remedy}" if remedy else "")
            ) from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"field {name!r} cannot be replaced: write into its array, x.{name}[...] = value")

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values.values())

    def __len__(self) -> int:
        return len(self._values)

    def rows(self: _Self) -> Iterator[_Self]:
        """The rows: `x[0]`, `x[1]`, ... All arrays must have the same first dimension."""
        lengths = {path: len(leaf) for path, leaf in self.leaves()}
        if len(set(lengths.values())) != 1:
            raise ConfigError(f"rows needs arrays with the same number of rows, these have {lengths}")
        return (self[i] for i in range(next(iter(lengths.values()))))

    def __bool__(self) -> bool:
        return bool(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def keys(self) -> tuple[str, ...]:
        """The field names, in order."""
        return tuple(self._values)

    def values(self) -> tuple[Any, ...]:
        """The field values, in order."""
        return tuple(self._values.values())

    def items(self) -> tuple[tuple[str, Any], ...]:
        """Pairs of field name and value, in order."""
        return tuple(self._values.items())

    def leaves(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """Pairs of dotted path and array, for every array at any depth."""
        for name, value in self._values.items():
            if isinstance(value, NamedArrays):
                yield from value.leaves(f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", value

    # ---- all fields at once ----------------------------------------------------------------

    def map(self: _Self, fn: Callable[[Any], Any]) -> _Self:
        """The same structure with `fn` applied to every array."""
        return _make(type(self), {name: map_leaves(fn, value) for name, value in self._values.items()})

    def _field_index(self, name: str, loc: Any) -> Any:
        """What the index `loc` means for field `name`. Subclasses may override it."""
        return loc

    @overload
    def __getitem__(self: _Self, loc: str) -> Any: ...
    @overload
    def __getitem__(self: _Self, loc: object) -> _Self: ...
    def __getitem__(self: _Self, loc: object) -> Any:
        if isinstance(loc, str):
            if loc in self._values:
                return self._values[loc]
            raise KeyError(f"no field {loc!r}; there are {', '.join(self._values) or 'none'}")
        return _make(type(self), {n: v[self._field_index(n, loc)] for n, v in self._values.items()})

    def __setitem__(self, loc: object, value: object) -> None:
        """Write into every field. `value` has the same fields, or it is one array or number for all of them."""
        if isinstance(loc, str):
            self[loc][...] = value
            return
        parts = fields_of(value)
        if parts is not None and parts.keys() != self._values.keys():
            raise ConfigError(
                f"cannot write the fields {sorted(parts)} into the fields {sorted(self._values)}: give all of these, "
                "and no others"
            )
        for name, field in self._values.items():
            field[self._field_index(name, loc)] = value if parts is None else parts[name]

    def copy(self: _Self) -> _Self:
        """The same structure in new memory (`ndarray.copy` / `Tensor.clone` of every leaf)."""
        return self.map(copied)

    def __copy__(self: _Self) -> _Self:
        return _make(type(self), dict(self._values))

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        return self.copy()

    def torch(self: _Self) -> _Self:
        """The same memory as torch tensors; nothing is copied."""
        import torch  # here, so that only processes that use tensors import it

        return self.map(lambda leaf: leaf if isinstance(leaf, torch.Tensor) else torch.from_numpy(leaf))

    def numpy(self: _Self) -> _Self:
        """The same memory as numpy arrays; nothing is copied. Tensors must be on the CPU."""
        return self.map(lambda leaf: leaf.numpy() if hasattr(leaf, "numpy") else leaf)

    def to_dict(self) -> dict[str, Any]:
        """The same arrays in nested dicts, as `torch.save` and other libraries take them."""
        return {
            name: value.to_dict() if isinstance(value, NamedArrays) else value for name, value in self._values.items()
        }

    # ---- pickling and showing --------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, (type(self), dict(self._values))

    def __repr__(self) -> str:
        return "\n".join(self._lines(0))

    def _lines(self, depth: int) -> list[str]:
        lines = [f"{type(self).__name__}("]
        pad = "  " * (depth + 1)
        for name, value in self._values.items():
            if isinstance(value, NamedArrays):
                head, *rest = value._lines(depth + 1)
                lines += [f"{pad}{name}={head}", *rest]
            else:
                shape = getattr(value, "shape", None)
                what = repr(value) if shape is None else f"{list(shape)} {value.dtype}"
                lines.append(f"{pad}{name}: {what}")
        return [*lines, "  " * depth + ")"] if len(lines) > 1 else [lines[0] + ")"]


#: An array of numpy, or `NamedArrays` of such arrays.
ArrayTree = npt.NDArray[Any] | NamedArrays


class FixedFields(NamedArrays):
    """Named arrays whose class lists all fields: for type checkers, a misspelt one is an error."""

    __slots__ = ()
    if TYPE_CHECKING:
        __getattr__: ClassVar[None]  # type: ignore[assignment, misc]


def _make(cls: type[_Self], values: dict[str, Any]) -> _Self:
    new = object.__new__(cls)
    object.__setattr__(new, "_values", values)
    return new


def copied(leaf: Any) -> Any:
    """`leaf`, an array or a tensor, in new memory."""
    return leaf.copy() if hasattr(leaf, "copy") else leaf.clone()


@lru_cache(maxsize=256)
def _is_leaf(cls: type) -> bool:
    """Whether objects of this class have no parts for certain. To ask this for each object takes long."""
    return not issubclass(cls, (tuple, Mapping, Sequence))


def fields_of(value: object) -> Mapping[str, Any] | None:
    """The parts of `value` by name, if it is a mapping, a tuple, `NamedArrays`, or a Dict or Tuple space; None for
    anything else."""
    if isinstance(value, NamedArrays):
        return value._values
    cls: Any = value.__class__
    if cls is not dict and _is_leaf(cls):
        return None
    if cls is dict or isinstance(value, Mapping):
        return value  # type: ignore[return-value]
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return dict(value._asdict())
    if isinstance(value, tuple) or (hasattr(value, "spaces") and isinstance(value, Sequence)):
        return {f"_{i}": part for i, part in enumerate(value)}
    return None


def as_named(value: object) -> Any:
    """`value` with `NamedArrays` in place of its mappings and tuples, at any depth. Anything else is not changed."""
    if value.__class__ is np.ndarray:  # first, since the other checks take long
        return value
    if isinstance(value, NamedArrays):
        return value.map(as_named)
    fields = fields_of(value)
    if fields is None:
        return value
    named = {str(name): as_named(part) for name, part in fields.items()}
    if len(named) < len(fields):
        raise SpaceError(f"the keys {list(fields)} have the same text: rename one of them")
    return NamedArrays(named)


def map_leaves(fn: Callable[[Any], Any], value: object) -> Any:
    """`fn` of every leaf of `value`, which is a `NamedArrays` or a single leaf."""
    return value.map(fn) if isinstance(value, NamedArrays) else fn(value)
