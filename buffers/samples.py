"""The samples buffer: memory for one batch `[T, B]`, and its views for the user and for collectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.buffers.named import NamedArrays, map_leaves
from penstock.buffers.shared import ArraySpec, NamedMemory


class EnvSamples(NamedArrays):
    """What the environments reported. Every field is `[T, B, ...]`."""

    __slots__ = ()
    observation: Any  #: what the agent acted on at step t
    reward: Any  #: float32, for the action taken at t
    prev_reward: Any  #: `reward` one step earlier; row 0 is the last row of the batch before
    terminated: Any  #: bool, Gymnasium's
    truncated: Any  #: bool, Gymnasium's
    done: Any  #: bool, terminated or truncated
    prev_done: Any  #: bool, an episode starts here: `done` one step earlier; row 0 is from the batch before
    valid: Any  #: bool, False where a parked environment recorded nothing
    env_info: Any  #: the chosen entries of `info`; `_name` is True where the environment gave `name`
    final_obs: Any  #: the true last observation where `done`, zero elsewhere


class AgentSamples(NamedArrays):
    """What the agent did. Fields are `[T, B, ...]`, except `bootstrap_value`, which is `[B]`."""

    __slots__ = ()
    action: Any  #: the action taken at t
    prev_action: Any  #: `action` one step earlier; row 0 is the last row of the batch before
    agent_info: Any  #: what `agent.step` returned beside the action
    bootstrap_value: Any  #: `[B]`, value of the observation after the last step
    final_value: Any  #: value of `final_obs` where truncated and not terminated, zero elsewhere

    def _field_index(self, name: str, loc: Any) -> Any:
        if name != "bootstrap_value":
            return loc
        # It has no time dimension: the first index does not apply.
        has_columns = isinstance(loc, tuple) and len(loc) > 0 and loc[0] is not Ellipsis
        return loc[1:] if has_columns else ...


class Samples(NamedArrays):
    """One batch: `samples.env` and `samples.agent`. An index applies to all fields: `samples[t0:t1, 3]`.

    The arrays are views of the buffer that the workers write into. The next batch overwrites them; `samples.copy()` is
    not affected.
    """

    __slots__ = ()
    env: EnvSamples
    agent: AgentSamples


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
    """Storage for one batch of `batch_T` steps of `batch_B` environments.

    Observation, action, reward and done have one row more than the batch has steps: `prev_action[t]` and `action[t]`
    are rows t and t + 1 of one array, and the next batch starts from row `batch_T` of the observations. The user gets
    the view `samples`.
    """

    def __init__(self, spec: SampleSpec, batch_T: int, batch_B: int, *, shared: bool) -> None:
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
        }
        if spec.env_info is not None:
            fields["env_info"] = rows(batch_T, spec.env_info)
        if spec.final_obs:
            fields["final_obs"] = rows(batch_T, spec.observation)
        if spec.bootstrap_value:
            fields["bootstrap_value"] = ArraySpec((batch_B,), value.dtype)
            fields["final_value"] = rows(batch_T, value)
        self.memory = NamedMemory(
            NamedArrays(fields), shared=shared, purpose=f"a samples buffer of batch_T={batch_T}, batch_B={batch_B}"
        )
        self.memory.arrays.valid[...] = True
        self.samples = _public_view(self.memory.arrays, batch_T)

    def columns(self, columns: slice) -> BatchColumns:
        """The part of the buffer that one worker writes."""
        return BatchColumns(self.memory.arrays, columns)


def _public_view(arrays: NamedArrays, batch_T: int) -> Samples:
    def first(value: Any) -> Any:
        return value[:batch_T]

    env = {
        "observation": first(arrays.observation),
        "reward": arrays.reward[1:],
        "prev_reward": first(arrays.reward),
        "terminated": arrays.terminated,
        "truncated": arrays.truncated,
        "done": arrays.done[1:],
        "prev_done": first(arrays.done),
        "valid": arrays.valid,
    }
    agent = {
        "action": arrays.action[1:],
        "prev_action": first(arrays.action),
        "agent_info": arrays.agent_info,
    }
    for name in ("env_info", "final_obs"):
        if name in arrays:
            env[name] = arrays[name]
    for name in ("bootstrap_value", "final_value"):
        if name in arrays:
            agent[name] = arrays[name]
    return Samples(env=EnvSamples(env), agent=AgentSamples(agent))


class BatchColumns:
    """One worker's columns of the samples buffer, as a collector writes them.

    `observation`, `action` and `reward` have `batch_T + 1` rows (see `SamplesBuffer`). At step t the collector reads
    `observation[t]`, and writes `action[t + 1]`, `reward[t + 1]` and `observation[t + 1]`. All other fields are written
    at `[t]`. `episode_start` `[B]`, True where an episode starts in row 0, is the row of `done` before the first.
    `observation_rows[t]` is `observation[t]`, and so on: views made once.
    """

    def __init__(self, arrays: NamedArrays, columns: slice) -> None:
        def own(name: str) -> Any:
            return arrays[name][:, columns] if name in arrays else None

        self.observation = own("observation")
        self.action = own("action")
        self.reward = own("reward")
        self.terminated = own("terminated")
        self.truncated = own("truncated")
        done = own("done")
        self.done, self.episode_start = done[1:], done[0]
        self.valid = own("valid")
        self.agent_info = own("agent_info")
        self.env_info = own("env_info")
        self.final_obs = own("final_obs")
        self.final_value = own("final_value")
        self.bootstrap_value = arrays.bootstrap_value[columns] if "bootstrap_value" in arrays else None
        self.batch_T, self.n_columns = self.done.shape
        # For the loop over time: to make a view takes as long as to write the row.
        self.observation_rows = [self.observation[t] for t in range(self.batch_T + 1)]
        self.action_rows = [self.action[t] for t in range(self.batch_T + 1)]
        self.reward_rows = [self.reward[t] for t in range(self.batch_T + 1)]

    def begin_batch(self, *, carry_over: bool) -> None:
        """Clear the fields that are written at episode ends only. `carry_over` the last row of the batch before to the
        first, except in the first batch."""
        if carry_over:
            for field in (self.observation, self.action, self.reward):
                field[0] = field[self.batch_T]
            # A column that was parked at the end starts an episode now.
            np.logical_or(self.done[-1], ~self.valid[-1], out=self.episode_start)
        if self.final_obs is not None:
            # Only where it was written: at few steps of few environments.
            t, b = np.nonzero(self.done)
            if t.size:
                self.final_obs[t, b] = 0
        for flags in (self.terminated, self.truncated, self.done, self.final_value):
            if flags is not None:
                flags[...] = 0
