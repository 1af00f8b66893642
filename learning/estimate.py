"""How much memory a replay takes, before it is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.buffers.memory_limits import size_text
from penstock.learning.ring import Shape


@dataclass(frozen=True)
class Estimate:
    """Bytes of each array of a replay. Printed, it is a table."""

    n_steps: int
    nbytes: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all arrays."""
        return sum(self.nbytes.values())

    @classmethod
    def of(cls, shape: Shape, tree_nbytes: int = 0) -> Estimate:
        """The estimate for a ring of this shape, and a tree of priorities of `tree_nbytes` bytes (0: none)."""
        nbytes = {name: spec.nbytes for name, spec in shape.specs().leaves()}
        if tree_nbytes:
            nbytes["priorities"] = tree_nbytes
        return cls(shape.T * shape.B, nbytes)

    def __str__(self) -> str:
        lines = [f"{'a replay of':>24}  {self.n_steps:,} steps"]
        lines += [f"{name:>24}  {size_text(nbytes)}" for name, nbytes in self.nbytes.items()]
        return "\n".join([*lines, f"{'total':>24}  {size_text(self.total)}"])
