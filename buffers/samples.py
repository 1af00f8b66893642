"""The samples buffer: memory for one batch `[T, B]`, and its views for the user and for collectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from penstock.buffers.named import NamedArrays, _make, map_leaves
from penstock.buffers.shared import ArraySpec, NamedMemory


class EnvSamples(NamedArrays):
    """What the environments reported. Every field is `[T, B, ...]`."""

    __slots__ = ()
    observation: Any  #: what the agent acted on at step t
    reward: Any  #: float32, for the action taken at t
    prev_reward: Any  #: `reward` one step earlier; row 0 is from before the batch
    terminated: Any  #: bool, Gymnasium's
    truncated: Any  #: bool, Gymnasium's
    done: Any  #: bool, terminated or truncated
    prev_done: Any  #: bool, `done` one step earlier; in row 0, True where an episode starts
    valid: Any  #: bool, False where the environment waited for a reset (`WaitResetCollector`)
    env_info: Any  #: the chosen entries of `info`; field `_name` is True where the environment returned `name`
    final_obs: Any  #: the true last observation where `done`, zero elsewhere


class AgentSamples(NamedArrays):
    """What the agent did. Fields are `[T, B, ...]`, except `bootstrap_value`, which is `[B]`."""

    __slots__ = ()
    action: Any  #: the action taken at t
    prev_action: Any  #: `action` one step earlier; row 0 is from before the batch
    agent_info: Any  #: what `agent.step` returned beside the action
    bootstrap_value: Any  #: `[B]`, value of the observation after the last step
    final_value: Any  #: value of `final_obs` where truncated and not terminated, zero elsewhere
    policy_version: Any  #: int64, the version of the parameters that acted; the same in all rows of a column

    def _field_index(self, name: str, loc: Any) -> Any:
        if name != "bootstrap_value":
            return loc
        # bootstrap_value has no time dimension, so the first index does not apply to it.
        has_columns = isinstance(loc, tuple) and len(loc) > 0 and loc[0] is not Ellipsis
        return loc[1:] if has_columns else ...


@dataclass(slots=True)
class BatchStatus:
    """The number of a batch, and whether its memory still holds it. The sampler writes it, and `Samples` shows it."""

    batch: int
    valid_until: int | None
    is_current: bool = True


class Samples(NamedArrays):
    """One batch: `samples.env` and `samples.agent`. An index applies to all fields: `samples[t0:t1, 3]`.

    The arrays are views of the buffer that the workers write into. A later batch overwrites them: see `is_current` and
    `valid_until`. `samples.copy()` copies the arrays.
    """

    __slots__ = ("_status",)
    env: EnvSamples
    agent: AgentSamples

    @property
    def batch(self) -> int | None:
        """The number of the batch, counted from 0; None for a copy."""
        status: BatchStatus | None = getattr(self, "_status", None)
        return None if status is None else status.batch

    @property
    def is_current(self) -> bool:
        """Whether the arrays still hold this batch. Always True for a copy."""
        status: BatchStatus | None = getattr(self, "_status", None)
        return status is None or status.is_current

    @property
    def valid_until(self) -> int | None:
        """The number of the batch that ends the validity of this one. The batch is valid until a synchronous sampler
        begins that batch, or until an asynchronous sampler hands it out. None for a copy, and while `hold` keeps it."""
        status: BatchStatus | None = getattr(self, "_status", None)
        return None if status is None else status.valid_until

    def __getitem__(self, loc: Any) -> Any:
        part = super().__getitem__(loc)
        return with_status(part, getattr(self, "_status", None)) if isinstance(part, Samples) else part

    def torch(self) -> Samples:
        return with_status(super().torch(), getattr(self, "_status", None))

    def numpy(self) -> Samples:
        return with_status(super().numpy(), getattr(self, "_status", None))


def with_status(samples: Samples, status: BatchStatus | None) -> Samples:
    """A new object with the same arrays and this status."""
    new = _make(type(samples), samples._values)
    if status is not None:
        object.__setattr__(new, "_status", status)
    return new


@dataclass(frozen=True)
class SampleSpec:
    """Examples of one environment's data at one step. The buffer has their shapes and dtypes."""

    observation: Any
    action: Any
    agent_info: NamedArrays
    bootstrap_value: bool = False
    final_obs: bool = True
    env_info: NamedArrays | None = None


class SamplesBuffer:
    """Storage for `n_slots` batches of `batch_T` steps of `batch_B` environments. Batch k is in slot `k % n_slots`.

    Observation, action, reward and done have `batch_T + 1` rows. `prev_action[t]` is row t of the array of actions,
    `action[t]` is row t + 1. The same holds for reward and done. The last row of the observations is the first row of
    the next batch. The user gets the views `batches`, one for each slot.
    """

    def __init__(self, spec: SampleSpec, batch_T: int, batch_B: int, *, shared: bool, n_slots: int = 1) -> None:
        fields = _slot_specs(spec, batch_T, batch_B)
        size = f"batch_T={batch_T}, batch_B={batch_B}" + (f", n_slots={n_slots}" if n_slots > 1 else "")
        self.memory = NamedMemory(
            NamedArrays({f"slot_{i}": fields for i in range(n_slots)}),
            shared=shared,
            purpose=f"a samples buffer of {size}",
        )
        self.slots: tuple[NamedArrays, ...] = self.memory.arrays.values()
        for arrays in self.slots:
            arrays.valid[...] = True
        self.batches = tuple(_public_view(arrays, batch_T) for arrays in self.slots)


def _slot_specs(spec: SampleSpec, batch_T: int, batch_B: int) -> NamedArrays:
    def rows(n: int, example: Any) -> Any:
        return map_leaves(lambda leaf: ArraySpec.like(leaf, n, batch_B), example)

    flags = ArraySpec((batch_T, batch_B), np.dtype(np.bool_))
    value = np.zeros((), np.float32)
    fields: dict[str, Any] = {
        "observation": rows(batch_T + 1, spec.observation),
        "action": rows(batch_T + 1, spec.action),
        "reward": rows(batch_T + 1, value),
        "terminated": flags,
        "truncated": flags,
        "done": ArraySpec((batch_T + 1, batch_B), flags.dtype),
        "valid": flags,
        "agent_info": rows(batch_T, spec.agent_info),
        "policy_version": ArraySpec((batch_B,), np.dtype(np.int64)),
    }
    if spec.env_info is not None:
        fields["env_info"] = rows(batch_T, spec.env_info)
    if spec.final_obs:
        fields["final_obs"] = rows(batch_T, spec.observation)
    if spec.bootstrap_value:
        fields["bootstrap_value"] = ArraySpec((batch_B,), value.dtype)
        fields["final_value"] = rows(batch_T, value)
    return NamedArrays(fields)


def _public_view(arrays: NamedArrays, batch_T: int) -> Samples:
    views = dict(arrays.items())
    for name in ("action", "reward", "done"):  # row t + 1 is step t
        views[name], views[f"prev_{name}"] = arrays[name][1:], arrays[name][:batch_T]
    views["observation"] = arrays.observation[:batch_T]
    # One number for each column, which is shown as `batch_T` equal ones.
    version = arrays.policy_version
    views["policy_version"] = as_strided(version, (batch_T, *version.shape), (0, *version.strides))
    env, agent = (
        {name: views[name] for name in cls.__annotations__ if name in views} for cls in (EnvSamples, AgentSamples)
    )
    return Samples(env=EnvSamples(env), agent=AgentSamples(agent))


class BatchColumns:
    """One worker's columns of one slot of the samples buffer, as a collector writes them.

    `observation`, `action` and `reward` have `batch_T + 1` rows (see `SamplesBuffer`). At step t the collector reads
    `observation[t]`, and writes `action[t + 1]`, `reward[t + 1]` and `observation[t + 1]`. All other fields are written
    at `[t]`. `episode_start` `[B]`, True where an episode starts in row 0, is the row of `done` before the first.
    `observation_rows[t]`, `action_rows[t]` and `reward_rows[t]` are views of row t, made once.
    """

    def __init__(self, arrays: NamedArrays, columns: slice, *, is_poisoned: bool = False) -> None:
        """`is_poisoned`: the main process writes into memory that was given back (`debug=True`), so that every field
        must be cleared."""

        def own(name: str) -> Any:
            return arrays[name][:, columns] if name in arrays else None

        self.observation, self.action, self.reward = own("observation"), own("action"), own("reward")
        self.terminated, self.truncated, self.valid = own("terminated"), own("truncated"), own("valid")
        done = own("done")
        self.done, self.episode_start = done[1:], done[0]
        self.agent_info, self.env_info = own("agent_info"), own("env_info")
        self.final_obs, self.final_value = own("final_obs"), own("final_value")
        self.bootstrap_value = arrays.bootstrap_value[columns] if "bootstrap_value" in arrays else None
        self.policy_version, self._is_poisoned = arrays.policy_version[columns], is_poisoned
        self.batch_T, self.n_columns = self.done.shape
        self._last_done, self._last_valid = self.done[-1], self.valid[-1]
        flags = (self.terminated, self.truncated, self.done, self.final_value)
        self._cleared = [field for field in flags if field is not None]
        # Made once, because making a view takes as long as writing the row.
        self.observation_rows = [self.observation[t] for t in range(self.batch_T + 1)]
        self.action_rows = [self.action[t] for t in range(self.batch_T + 1)]
        self.reward_rows = [self.reward[t] for t in range(self.batch_T + 1)]

    def begin_batch(self, before: BatchColumns | None) -> None:
        """Clear the fields that are written only where an episode ends.

        Copy the last row of the batch `before` to the first row. `before` may be in the same slot. It is None for the
        first batch.
        """
        if before is not None:
            self.observation_rows[0][...] = before.observation_rows[-1]
            self.action_rows[0][...] = before.action_rows[-1]
            self.reward_rows[0][...] = before.reward_rows[-1]
            # A column that was parked at the end starts an episode now: where `done` is True or `valid` is False.
            np.less_equal(before._last_valid, before._last_done, out=self.episode_start)
        if self._is_poisoned:
            self.valid[...] = True
            if self.final_obs is not None:
                self.final_obs[...] = 0
        elif self.final_obs is not None:
            # Clear it only where it was written. That is faster, since few steps end an episode.
            t, b = np.nonzero(self.done)
            if t.size:
                self.final_obs[t, b] = 0
        for flags in self._cleared:
            flags[...] = 0
