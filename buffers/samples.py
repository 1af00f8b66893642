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

    def _field_index(self, name: str, loc: Any) -> Any:
        if name != "bootstrap_value":
            return loc
        # bootstrap_value has no time dimension, so the first index does not apply to it.
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

    Observation, action, reward and done have `batch_T + 1` rows. `prev_action[t]` is row t of the array of actions,
    `action[t]` is row t + 1. The same holds for reward and done. The last row of the observations is the first row of
    the next batch. The user gets the view `samples`.
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


def _public_view(arrays: NamedArrays, batch_T: int) -> Samples:
    views = dict(arrays.items())
    for name in ("action", "reward", "done"):  # row t + 1 is step t
        views[name], views[f"prev_{name}"] = arrays[name][1:], arrays[name][:batch_T]
    views["observation"] = arrays.observation[:batch_T]
    env, agent = (
        {name: views[name] for name in cls.__annotations__ if name in views} for cls in (EnvSamples, AgentSamples)
    )
    return Samples(env=EnvSamples(env), agent=AgentSamples(agent))


class BatchColumns:
    """One worker's columns of the samples buffer, as a collector writes them.

    `observation`, `action` and `reward` have `batch_T + 1` rows (see `SamplesBuffer`). At step t the collector reads
    `observation[t]`, and writes `action[t + 1]`, `reward[t + 1]` and `observation[t + 1]`. All other fields are written
    at `[t]`. `episode_start` `[B]`, True where an episode starts in row 0, is the row of `done` before the first.
    `observation_rows[t]`, `action_rows[t]` and `reward_rows[t]` are views of row t, made once.
    """

    def __init__(self, arrays: NamedArrays, columns: slice) -> None:
        def own(name: str) -> Any:
            return arrays[name][:, columns] if name in arrays else None

        self.observation, self.action, self.reward = own("observation"), own("action"), own("reward")
        self.terminated, self.truncated, self.valid = own("terminated"), own("truncated"), own("valid")
        done = own("done")
        self.done, self.episode_start = done[1:], done[0]
        self.agent_info, self.env_info = own("agent_info"), own("env_info")
        self.final_obs, self.final_value = own("final_obs"), own("final_value")
        self.bootstrap_value = arrays.bootstrap_value[columns] if "bootstrap_value" in arrays else None
        self.batch_T, self.n_columns = self.done.shape
        self._last_done, self._last_valid = self.done[-1], self.valid[-1]
        # Made once, because making a view takes as long as writing the row.
        self.observation_rows = [self.observation[t] for t in range(self.batch_T + 1)]
        self.action_rows = [self.action[t] for t in range(self.batch_T + 1)]
        self.reward_rows = [self.reward[t] for t in range(self.batch_T + 1)]

    def begin_batch(self, *, carry_over: bool) -> None:
        """Clear the fields that are written only where an episode ends.

        With `carry_over`, copy the last row of the batch before to the first row. It is False in the first batch.
        """
        if carry_over:
            for rows in (self.observation_rows, self.action_rows, self.reward_rows):
                rows[0][...] = rows[-1]
            # A column that was parked at the end starts an episode now: where `done` is True or `valid` is False.
            np.less_equal(self._last_valid, self._last_done, out=self.episode_start)
        else:  # a worker that was killed before may have written one flag without the others
            np.logical_or(self.done, np.logical_or(self.terminated, self.truncated), out=self.done)
        # Clear only where an episode ended. That is faster, since few steps end one.
        t, b = np.nonzero(self.done)
        if t.size:
            for field in (self.terminated, self.truncated, self.done, self.final_value, self.final_obs):
                if field is not None:
                    field[t, b] = 0
