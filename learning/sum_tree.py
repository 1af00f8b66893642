"""The sum tree of priorities: draws in proportion to them, and the largest. In C where it was compiled, else in numpy.

Node i has the children 2i and 2i + 1, and node 1 is the root. A parent is always computed again from its two children,
never by adding a difference, so that no error builds up. Both versions give the same results to the last bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.learning.compiled import compiled

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]

MOST = 1e290  #: the largest leaf that is assigned: the sum of any number of leaves is finite


def _recompute(
    total: _Floats, largest: _Floats, nodes: _Ints | slice, left: _Ints | slice, right: _Ints | slice
) -> None:
    total[nodes] = total[left] + total[right]
    largest[nodes] = np.maximum(largest[left], largest[right])


@compiled
def tree_update(total: _Floats, largest: _Floats, leaves: _Ints, values: _Floats) -> None:
    """Set leaves, and then their ancestors."""
    size = len(total) // 2
    nodes = leaves + size
    total[nodes] = largest[nodes] = values  # of equal leaves, the last value counts
    while size > 1:
        size //= 2
        nodes = nodes // 2
        _recompute(total, largest, nodes, 2 * nodes, 2 * nodes + 1)


@compiled
def tree_range(total: _Floats, largest: _Floats, first: int, values: _Floats) -> None:
    """As `tree_update`, for consecutive leaves from `first` on."""
    if not len(values):
        return
    low = len(total) // 2 + first
    high = low + len(values)
    total[low:high] = largest[low:high] = values
    while low > 1:
        low, high = low // 2, (high - 1) // 2 + 1
        left, right = slice(2 * low, 2 * high, 2), slice(2 * low + 1, 2 * high, 2)
        _recompute(total, largest, slice(low, high), left, right)


@compiled
def tree_assign(
    total: _Floats,
    largest: _Floats,
    n_leaves: int,
    low: int,
    high: int,
    places: _Ints,
    priority: npt.NDArray[Any],
    values: _Floats,
) -> int:
    """See `SumTree.assign`."""
    is_known = (places >= 0) & (places < high) & (priority > 0) & (priority < np.inf) & (values > 0) & (values <= MOST)
    is_kept = places >= low
    leaves, values = places[is_kept] % n_leaves, values[is_kept]
    if not is_known.all() or (total[leaves + len(total) // 2] == 0).any():
        return -1
    order = values.argsort(kind="stable")
    tree_update(total, largest, leaves[order], values[order])
    return len(places) - len(leaves)


@compiled
def tree_draw(total: _Floats, mass: _Floats, n_leaves: int, low: int, places: _Ints) -> None:
    """For each mass, from 0 to the sum of all, find the leaf into which it falls, and write its place, from `low` on,
    into `places`. `mass` is changed."""
    size = len(total) // 2
    node = np.ones(len(mass), np.int64)
    width = 1
    while width < size:
        left = 2 * node
        # Never into a subtree of zeros, even if rounding has left a little mass.
        goes_right = (mass >= total[left]) & (total[left + 1] > 0)
        mass -= total[left] * goes_right
        node = left + goes_right
        width *= 2
    places[:] = low + (node - size - low) % n_leaves


@compiled
def tree_ratios(total: _Floats, n_leaves: int, places: _Ints, ratios: _Floats) -> None:
    """See `SumTree.ratios`."""
    leaf = total[len(total) // 2 + places % n_leaves]
    with np.errstate(over="ignore"):  # as in C
        ratios[:] = leaf / leaf.min(initial=np.inf)


class SumTree:
    """`n_leaves` numbers of at least 0, all 0 at first, with their sum and their largest.

    Place p, a number that counts up, has the leaf `p % n_leaves`.
    """

    def __init__(self, n_leaves: int) -> None:
        self._size = 1 << max(n_leaves - 1, 0).bit_length()
        self._n_leaves = n_leaves
        #: Two trees, each as an array: the root at 1, and below i the nodes 2i and 2i + 1.
        self.sums, self.maxima = np.zeros(2 * self._size), np.zeros(2 * self._size)

    @staticmethod
    def nbytes(n_leaves: int) -> int:
        """Bytes of the trees for so many leaves."""
        return 4 * 8 << max(n_leaves - 1, 0).bit_length()

    @property
    def total(self) -> float:
        """The sum of all leaves."""
        return float(self.sums[1])

    @property
    def largest(self) -> float:
        """The largest leaf."""
        return float(self.maxima[1])

    @property
    def leaves(self) -> _Floats:
        """A view of all leaves."""
        return self.sums[self._size : self._size + self._n_leaves]

    def update(self, places: _Ints, values: _Floats) -> None:
        """Set the leaves of `places` to `values`. If one leaf comes several times, the last value counts."""
        tree_update(self.sums, self.maxima, places % self._n_leaves, values)

    def assign(self, low: int, high: int, places: _Ints, priorities: _Floats, values: _Floats) -> int:
        """Set the leaves of `places` `[n]` to `values` `[n]`, except places below `low`. Returns how many these are.

        If one leaf comes several times, the largest value counts. Every place must be below `high`, and its leaf must
        not be 0. `priorities` `[n]` must be finite and above 0, and values above 0 and at most `MOST`. Otherwise this
        returns -1, and changes nothing.
        """
        return tree_assign(self.sums, self.maxima, self._n_leaves, low, high, places, priorities, values)

    def set_range(self, first: int, values: _Floats) -> None:
        """Set the leaves of the places from `first` on to `values`."""
        first %= self._n_leaves
        fits = min(len(values), self._n_leaves - first)
        tree_range(self.sums, self.maxima, first, values[:fits])
        tree_range(self.sums, self.maxima, 0, values[fits:])

    def draw(self, mass: _Floats, low: int = 0) -> _Ints:
        """The places `[n]`, from `low` on, into whose leaves the masses `[n]` fall. These are from 0 to `total`, and
        are overwritten. A leaf of 0 is never drawn."""
        places = np.empty(len(mass), np.int64)
        tree_draw(self.sums, mass, self._n_leaves, low, places)
        return places

    def ratios(self, places: _Ints) -> _Floats:
        """The leaves of `places` `[n]`, divided by the smallest of these."""
        ratios = np.empty(len(places))
        tree_ratios(self.sums, self._n_leaves, places, ratios)
        return ratios
