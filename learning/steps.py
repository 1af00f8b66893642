"""Rewards, values and ends of a batch: the input of every function in this package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.buffers import Samples
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

#: numpy arrays or torch tensors. The results are of the same kind.
Array = TypeVar("Array", npt.NDArray[Any], "Tensor")

_FLAGS = ("terminated", "truncated", "valid")


@dataclass(frozen=True)
class Steps(Generic[Array]):
    """The steps of a batch: torch tensors or numpy arrays `[T, B]`, except `bootstrap_value`, which is `[B]`.

    `Steps.of(samples)` takes them from a sampler's batch. In your own data, the row after the end of an episode must be
    the first step of the next episode, or must not be `valid`. A column may have fewer valid rows than the others: the
    last one is then followed by the observation whose value is `bootstrap_value`.

    Raises `ConfigError` for wrong shapes, for flags that are not bool, and if rows that are not `valid` lie between two
    steps of an episode.
    """

    reward: Array  #: for the action at step t
    value: Array  #: the value of the observation at step t
    terminated: Array  #: bool, as in Gymnasium: the value after this step is 0
    truncated: Array  #: bool, as in Gymnasium: the value after this step is `final_value`
    #: `[B]`, the value of the observation after the last valid row; unused where an episode ends in that row.
    bootstrap_value: Array
    final_value: Array  #: the value of the last observation of an episode that was truncated; unused elsewhere
    valid: Array | None = None  #: bool; False: this row is no step, and its results are 0. None: all rows are steps

    def __post_init__(self) -> None:
        shape = tuple(self.reward.shape)
        for name, array in vars(self).items():
            if array is None:
                continue
            expected = shape[1:] if name == "bootstrap_value" else shape
            if tuple(array.shape) != expected:
                raise ConfigError(
                    f"{name} must have the shape {list(expected)}, since rewards have {list(shape)}: got "
                    f"{list(array.shape)}"
                )
            if name in _FLAGS and not str(array.dtype).endswith("bool"):
                raise ConfigError(f"{name} must be an array of bool, got {array.dtype}")
        if self.valid is not None:
            is_cut = self.valid[:-1] & ~self.valid[1:] & ~(self.terminated | self.truncated)[:-1]
            counts: Any = self.valid.cumsum(0)
            is_cut &= counts[:-1] < counts[-1]  # a later row is valid
            if bool(is_cut.any()):
                t, *column = np.argwhere(np.asarray(is_cut.tolist()))[0].tolist()
                raise ConfigError(
                    f"the step {[t + 1, *column]} is not valid, but no episode ends at {[t, *column]}: the value after "
                    f"that step is unknown. Set `terminated` or `truncated` at {[t, *column]}"
                )

    @classmethod
    def of(cls, samples: Samples, *, value: Any = None, bootstrap_value: Any = None, final_value: Any = None) -> Any:
        """The steps of `samples` `[T, B]`. `value`, `bootstrap_value` and `final_value` replace the recorded values.

        Raises `ConfigError` if one of these was not recorded, and you do not give it.
        """
        if not isinstance(samples, Samples):
            raise ConfigError(
                f"targets need samples or Steps, got a {type(samples).__name__}: obtain_samples returns (samples, "
                "traj_infos). With several policies, give the samples of one. For other data, make Steps(...)"
            )
        env, agent = samples.env, samples.agent
        info = agent.agent_info
        given = {"value": value, "bootstrap_value": bootstrap_value, "final_value": final_value}
        for name, source in (("value", info), ("bootstrap_value", agent), ("final_value", agent)):
            if given[name] is None and name not in source:
                remedy = (
                    "the agent does not report it: give Steps.of(samples, value=...)"
                    if name == "value"
                    else "call sampler.initialize(agent, bootstrap_value=True), and cut no rows off the end of a batch"
                )
                raise ConfigError(f"these samples have no {name}: {remedy}")
            given[name] = source[name] if given[name] is None else given[name]
        recorded: dict[str, Any] = {name: getattr(env, name) for name in ("reward", *_FLAGS)}
        return cls(**recorded, **given)


class Ends:
    """Where episodes end in `steps`, and the values after these ends. Rows that are not valid count as ends, too."""

    def __init__(self, steps: Steps[Any]) -> None:
        is_end: Any = steps.terminated | steps.truncated
        has_no_value: Any = steps.terminated
        if steps.valid is not None:
            is_end, has_no_value = is_end | ~steps.valid, has_no_value | ~steps.valid
        self._is_end, self._valid, self._module = is_end, steps.valid, _module_of(is_end)
        # The last step of a column, if its episode goes on and the batch has a row after it. None: there are no such.
        self._is_open: Any = None
        if steps.valid is not None and bool((is_open := ~is_end[:-1] & ~steps.valid[1:]).any()):
            self._is_open = self._module.concatenate([is_open, ~is_end[-1:] & False])
        self._end_value: Any = zero_where(has_no_value, steps.final_value)
        self._bootstrap_value: Any = steps.bootstrap_value

    def following(self, rows: Array) -> Any:
        """For each step, the row of `rows` after it: the value after the end of the episode, if the step is an end, and
        the bootstrap value for the last step of a column."""
        next_rows = self._module.concatenate([rows[1:], self._bootstrap_value[None]])
        if self._is_open is not None:
            next_rows = self._module.where(self._is_open, self._bootstrap_value, next_rows)
        return self._module.where(self._is_end, self._end_value, next_rows)

    def in_last_rows(self, these: Array, others: Array) -> Any:
        """`these` in the last row of each episode and of each column, `others` everywhere else."""
        is_last = self._is_end | (self._is_end if self._is_open is None else self._is_open)  # a copy
        is_last[-1] = True
        return self._module.where(is_last, these, others)

    def steps_only(self, rows: Array) -> Any:
        """`rows` with zero where there is no step."""
        return rows if self._valid is None else zero_where(~self._valid, rows)

    def summed_backwards(self, terms: Any, decay: Any) -> Any:
        """x[t] = terms[t] + decay[t] * x[t + 1], within each episode. `decay` is a number, or an array like `terms`."""
        arrays = terms, decay, self._is_end
        if self._module is np or not all(map(_is_plain, arrays)):
            return _summed_backwards(self._module, *arrays)
        # numpy gives the same bits and is faster: rows are short, so torch spends most of its time on the calls.
        return self._module.from_numpy(
            _summed_backwards(np, *(array if isinstance(array, float) else array.numpy() for array in arrays))
        )


def _summed_backwards(module: Any, terms: Any, decay: Any, is_end: Any) -> Any:
    later: Any = None
    rows = []
    for t in reversed(range(len(terms))):
        factor = decay if isinstance(decay, float) else decay[t]
        later = terms[t] if later is None else terms[t] + factor * zero_where(is_end[t], later)
        rows.append(later)
    return module.stack(rows[::-1])


def _is_plain(value: Any) -> bool:
    """Whether this is a number, or a tensor without gradients that numpy can read: it has no bfloat16, for example."""
    return isinstance(value, float) or (value.is_cpu and not value.requires_grad and value.itemsize in (1, 4, 8))


def _module_of(array: Array) -> Any:
    """numpy or torch. Both give the functions above the same names."""
    if isinstance(array, np.ndarray):
        return np
    import torch

    return torch


def zero_where(mask: Array, rows: Array) -> Any:
    """`rows` with zero where `mask` is True, also in place of NaN."""
    return np.where(mask, rows.dtype.type(0), rows) if isinstance(rows, np.ndarray) else rows.masked_fill(mask, 0)
