"""The samples buffer: memory for batches `[T, B]`, and how the user and the collectors see it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from penstock.buffers.named import NamedArrays, map_leaves
from penstock.buffers.samples import (
    AgentSamples,
    BatchStatus,
    EnvSamples,
    PolicySamples,
    Samples,
    parts_of,
    with_status,
)
from penstock.buffers.shared import ArraySpec, NamedMemory


@dataclass(frozen=True)
class SampleSpec:
    """Examples of one environment's data at one step. The buffer has their shapes and dtypes."""

    observation: Any
    action: Any
    agent_info: NamedArrays
    bootstrap_value: bool = False
    final_obs: bool = True
    env_info: NamedArrays | None = None
    extra: NamedArrays | None = None
    n_seats: int | None = None  #: agents in each environment if there may be several; 0: their numbers differ
    has_gaps: bool = False  #: steps that are not valid may stand between valid ones, as with several agents


class SamplesBuffer:
    """Storage for `n_slots` batches of `batch_T` steps of `batch_B` environments. Batch k is in slot `k % n_slots`.

    Observation, action, reward and done have `batch_T + 1` rows. `prev_action[t]` is row t of the array of actions,
    `action[t]` is row t + 1. The same holds for reward and done. The last row of the observations is the first row of
    the next batch. `batches` has a view of each slot, of which `for_user` makes what the user gets. Whatever the user
    writes into a batch does not change a later one: see `BatchColumns`.

    With several policies, `spec` and `batch_B` have an entry for each, by name, and so have the arrays of a slot.
    """

    def __init__(
        self,
        spec: SampleSpec | Mapping[str, SampleSpec],
        batch_T: int,
        batch_B: int | Mapping[str, int],
        *,
        shared: bool,
        n_slots: int = 1,
    ) -> None:
        if isinstance(spec, SampleSpec):
            assert isinstance(batch_B, int)
            fields = _slot_specs(spec, batch_T, batch_B)
        else:
            assert isinstance(batch_B, Mapping)
            fields = NamedArrays({name: _slot_specs(own, batch_T, batch_B[name]) for name, own in spec.items()})
            batch_B = sum(batch_B.values())
        size = f"batch_T={batch_T}, batch_B={batch_B}" + (f", n_slots={n_slots}" if n_slots > 1 else "")
        self.memory = NamedMemory(
            NamedArrays({f"slot_{i}": fields for i in range(n_slots)}),
            shared=shared,
            purpose=f"a samples buffer of {size}",
        )
        self.slots: tuple[NamedArrays, ...] = self.memory.arrays.values()
        for own in (own for arrays in self.slots for own in layouts_of(arrays)):
            own.valid[...] = True
        n_seats = spec.n_seats if isinstance(spec, SampleSpec) else {name: own.n_seats for name, own in spec.items()}
        self.batches = tuple(batch_view(arrays, batch_T, n_seats) for arrays in self.slots)


class _UserFields(dict[str, Any]):
    """The fields of an `EnvSamples` that the user gets. They note in `taken` when somebody takes `final_obs`: from then
    on it may be written into at any time, so that workers must clear all of it. This takes long where observations are
    large, and most learners need only `final_value`."""

    def __init__(self, fields: Mapping[str, Any], taken: npt.NDArray[np.bool_]) -> None:
        super().__init__(fields)
        self._taken = taken

    def __getitem__(self, name: str) -> Any:
        if name == "final_obs":
            self._taken[0] = True
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[str]:  # so that `dict(fields)` calls `__getitem__` too
        return super().__iter__()

    def values(self) -> Any:
        self._taken[0] = True
        return super().values()

    def items(self) -> Any:
        self._taken[0] = True
        return super().items()


def for_user(batch: Samples | PolicySamples, slot: NamedArrays) -> Any:
    """`batch` for the user. It has the memory of `slot`, and the workers are told when somebody takes `final_obs`."""
    found = []
    for samples, own in zip(parts_of(batch), layouts_of(slot), strict=True):
        env = copy.copy(samples.env)
        if "final_obs_taken" in own:
            object.__setattr__(env, "_values", _UserFields(env._values, own.final_obs_taken))
        found.append(with_status(Samples(env=env, agent=samples.agent), samples.status))
    return found[0] if isinstance(batch, Samples) else PolicySamples(dict(zip(batch.keys(), found, strict=True)))


def layouts_of(arrays: NamedArrays, policies: Sequence[str] = ()) -> Sequence[Any]:
    """The arrays of each policy, out of the `arrays` of a slot. With the names of all `policies`: None for each policy
    that is not recorded."""
    if "valid" in arrays:
        return [arrays]
    recorded = dict(arrays.items())
    return [recorded.get(name) for name in policies or recorded]


def unrecorded_arrays(spec: SampleSpec, batch_T: int, n_columns: int) -> NamedArrays:
    """Arrays of the shapes of a slot, in private memory, for a policy that is not recorded. All rows of observation,
    action and agent_info share the memory of one row, which has what was written last."""

    def one_row(own: ArraySpec) -> Any:
        row = np.zeros(own.shape[1:], own.dtype)
        return as_strided(row, own.shape, (0, *row.strides))

    arrays: dict[str, Any] = {}
    small = replace(spec, bootstrap_value=False, final_obs=False, env_info=None)
    for name, field in _slot_specs(small, batch_T, n_columns).items():
        is_large = name in ("observation", "action", "agent_info")
        arrays[name] = map_leaves(one_row if is_large else lambda own: np.zeros(own.shape, own.dtype), field)
    arrays["valid"][...] = True
    return NamedArrays(arrays)


def batch_view(
    arrays: NamedArrays, batch_T: int, n_seats: int | Mapping[str, int | None] | None
) -> Samples | PolicySamples:
    """The batch as the user sees it, from the arrays of one slot; with several policies, the batch of each. `n_seats`:
    see `SampleSpec`; with several policies, that of each."""
    if not isinstance(n_seats, Mapping):
        return public_view(arrays, batch_T, n_seats)
    return PolicySamples({name: public_view(own, batch_T, n_seats[name]) for name, own in arrays.items()})


def _slot_specs(spec: SampleSpec, batch_T: int, batch_B: int) -> NamedArrays:
    def rows(n: int, example: object) -> Any:
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
    for name in ("env_info", "extra"):
        if (example := getattr(spec, name)) is not None:
            fields[name] = rows(batch_T, example)
    if spec.n_seats is not None or spec.has_gaps:
        fields["prev_done"] = flags
    if spec.final_obs:
        fields["final_obs"] = rows(batch_T, spec.observation)
        fields["final_obs_taken"] = ArraySpec((1,), flags.dtype)  # whether the learner may have written into it
    if spec.bootstrap_value:
        fields["bootstrap_value"] = ArraySpec((batch_B,), value.dtype)
        fields["final_value"] = rows(batch_T, value)
    return NamedArrays(fields)


def public_view(arrays: NamedArrays, batch_T: int, n_seats: int | None = None) -> Samples:
    """The batch of one policy as the user sees it, from its arrays of one slot."""
    views = dict(arrays.items())
    for name in ("action", "reward", "done"):  # row t + 1 is step t
        views[name] = arrays[name][1:]
        views.setdefault(f"prev_{name}", arrays[name][:batch_T])
    views["observation"], views["bootstrap_obs"] = arrays.observation[:batch_T], arrays.observation[batch_T]
    # One number for each column, which is shown as `batch_T` equal ones.
    version = arrays.policy_version
    views["policy_version"] = as_strided(version, (batch_T, *version.shape), (0, *version.strides))
    env, agent = (
        {name: views[name] for name in cls.__annotations__ if name in views} for cls in (EnvSamples, AgentSamples)
    )
    samples = Samples(env=EnvSamples(env), agent=AgentSamples(agent))
    return samples if n_seats is None else with_status(samples, BatchStatus(None, None, n_seats=n_seats))


class FirstRow:
    """What the next batch of one worker's columns begins with, beside the observations, which the columns keep: copies
    of the last action and reward `[B, ...]`, and `episode_start` `[B]`, True where an episode starts. The learner never
    sees this memory."""

    def __init__(self, samples: BatchColumns) -> None:
        self.action: Any = map_leaves(np.zeros_like, samples.action_rows[0])
        self.reward = np.zeros_like(samples.reward_rows[0])
        self.episode_start = np.ones(samples.n_columns, np.bool_)


class BatchColumns:
    """One worker's columns of one slot of the samples buffer, as a collector writes them.

    `observation`, `action` and `reward` have `batch_T + 1` rows (see `SamplesBuffer`). At step t the collector reads
    `observation[t]`, and writes `action[t + 1]`, `reward[t + 1]` and `observation[t + 1]`. All other fields are written
    at `[t]`. `extra` has the fields that the collector declares, and is zero when a batch begins. `episode_start`
    `[B]`, True where an episode starts in row 0, is the row of `done` before the first. If `has_gaps`, `prev_done`
    `[T, B]` has memory of its own: see `mark_starts`. `observation_rows[t]`, `action_rows[t]` and
    `reward_rows[t]` are views of row t, made once.

    Between two batches the learner holds this memory, and may have written into any field. So nothing in it counts
    when a batch begins: the first row comes from the columns and a `FirstRow`, and all that is not written at each step
    is cleared.
    """

    def __init__(self, arrays: NamedArrays, columns: slice, *, is_clean: bool = True) -> None:
        """`is_clean`: nobody has written into this memory yet."""

        def own(name: str) -> Any:
            return arrays[name][:, columns] if name in arrays else None

        self.observation, self.action, self.reward = own("observation"), own("action"), own("reward")
        self.terminated, self.truncated, self.valid = own("terminated"), own("truncated"), own("valid")
        done = own("done")
        self.done, self.episode_start = done[1:], done[0]
        self.agent_info, self.env_info = own("agent_info"), own("env_info")
        self.extra, self._prev_done = own("extra") or NamedArrays(), own("prev_done")
        self.has_gaps = self._prev_done is not None
        self.final_obs, self.final_value = own("final_obs"), own("final_value")
        self.bootstrap_value = arrays.bootstrap_value[columns] if "bootstrap_value" in arrays else None
        self.policy_version = arrays.policy_version[columns]
        self.batch_T, self.n_columns = self.done.shape
        # Where this object has written `final_obs` (t, column); None: anything may be there.
        self._finals: tuple[npt.NDArray[np.intp], ...] | None = (np.empty(0, np.intp),) * 2 if is_clean else None
        self._is_taken = memoryview(arrays.final_obs_taken) if "final_obs_taken" in arrays else (False,)
        flags = (self.terminated, self.truncated, self.done, self.final_value, self.extra or None)
        self._cleared = [field for field in flags if field is not None]
        rows = NamedArrays(o=self.observation, a=self.action, r=self.reward, i=self.agent_info).leaves()
        self._rows = [leaf if leaf.strides[0] else leaf[0] for _, leaf in rows]  # see `unrecorded_arrays`
        # Made once, because making a view takes as long as writing the row.
        self.observation_rows = [self.observation[t] for t in range(self.batch_T + 1)]
        self.action_rows = [self.action[t] for t in range(self.batch_T + 1)]
        self.reward_rows = [self.reward[t] for t in range(self.batch_T + 1)]
        self._last_valid, self._last_done = self.valid[-1], self.done[-1]

    def begin_batch(self, first: FirstRow) -> None:
        """Write the first row of action and reward, and clear the fields that are written only where an episode
        ends."""
        self.action_rows[0][...], self.reward_rows[0][...] = first.action, first.reward
        if self.final_obs is not None:
            # If the learner has not taken the field, clear it only where it was written: few steps end an episode.
            if self._finals is None or self._is_taken[0]:
                self.final_obs[...] = 0
            elif self._finals[0].size:
                self.final_obs[self._finals] = 0
        for flags in self._cleared:
            flags[...] = 0
        self.valid[...] = True
        self.episode_start[...] = first.episode_start

    def end_batch(self, first: FirstRow) -> None:
        """All rows are written. Keep in `first` what the next batch begins with: the learner gets this memory next."""
        first.action[...], first.reward[...] = self.action_rows[-1], self.reward_rows[-1]
        # A column that is parked at the end starts an episode next: where `done` is True or `valid` is False.
        np.less_equal(self._last_valid, self._last_done, first.episode_start)
        if self.final_obs is not None:
            self._finals = self.done.nonzero()

    def zero_rows(self) -> None:
        """Write zeros into all rows of observation, action, reward and agent_info."""
        for leaf in self._rows:
            leaf[...] = 0

    def mark_starts(self) -> None:
        """If `has_gaps`, when all rows are written: `prev_done` is True where an episode starts.

        It is not `done` one row up: while a column is idle, the rows above its first one have no `done`."""
        prev_done, valid = self._prev_done, self.valid
        np.logical_and(self.episode_start, valid[0], out=prev_done[0])
        np.less_equal(valid[:-1], self.done[:-1], out=prev_done[1:])  # idle before, or an end
        prev_done[1:] &= valid[1:]
