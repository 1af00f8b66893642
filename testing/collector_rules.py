"""The rules of a collector in one process: its calls, and that it records what the reference loop does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.buffers import NamedArrays
from penstock.buffers.named import map_leaves
from penstock.buffers.tree import tree_leaves
from penstock.collectors import TrajInfo
from penstock.testing.rules import Violation, differ
from penstock.testing.traces import Trace, calls_by_row

#: `itr` of a batch, policy, and the row; None if there are many.
_Where = tuple[int, str, int | None]


def _require_same(trace: Trace, where: _Where, left: Any, right: Any, name: str, source: str, remedy: str) -> None:
    """Raise `Violation` unless both are the same: arrays `[T, B, ...]`; or `[B, ...]`, if there is a t."""
    itr, policy, t = where
    for path, value, wanted in tree_leaves(left, name, right):
        differs = differ(value, wanted, close=trace.setup.agent is not None)
        if np.any(differs):
            at = tuple(np.argwhere(differs)[0])[: 2 if t is None else 1]
            place = trace.place(itr, at[0] if t is None else t, policy, at[-1])
            raise Violation(f"{path} is {value[at]} at {place}; {source} {wanted[at]}", remedy)


def _require(trace: Trace, names: Sequence[str], source: str, remedy: str) -> None:
    """Raise `Violation` unless the batches have what the loop has in these fields."""
    for batch, wanted in zip(trace.collected, trace.wanted, strict=True):
        for policy, fields in wanted.fields.items():
            for name in names:
                t = trace.setup.batch_T if name.startswith("bootstrap") else None
                left, right = batch.fields[policy][name], fields[name]
                _require_same(trace, (wanted.itr, policy, t), left, right, name, source, remedy)


# ---- the calls -----------------------------------------------------------------------------


class _Calls:
    """The calls of an agent in one batch."""

    def __init__(self) -> None:
        self.kinds = list[str]()
        self.modes = list[int]()  # the `itr` of each sample_mode
        self.inputs = list[NamedArrays]()  # of each step
        self.resets = [Counter[int]()]  # how often each column was reset before each step, and after the last one


def _calls(log: Sequence[Any]) -> dict[tuple[int, str], _Calls]:
    """By the number of the batch and the policy."""
    calls, k = dict[tuple[int, str], _Calls](), -1
    for event in log:
        if event.kind == "batch":
            k += 1
        elif event.kind.startswith("agent.") and k >= 0:
            policy_calls = calls.setdefault((k, event.who), _Calls())
            policy_calls.kinds.append(event.kind)
            if event.kind == "agent.sample_mode":
                policy_calls.modes.append(event.data)
            elif event.kind == "agent.step":
                policy_calls.inputs.append(event.data)
                policy_calls.resets.append(Counter())
            elif event.kind == "agent.reset_one":
                policy_calls.resets[-1][event.data] += 1
    return calls


def sample_mode_is_called_once_per_batch(trace: Trace) -> None:
    """agent.sample_mode(itr) is called once in every batch, before agent.step."""
    calls = _calls(trace.log)
    for k, batch in enumerate(trace.collected):
        for policy in batch.fields:
            policy_calls = calls.get((k, policy), _Calls())
            modes = [f"sample_mode({itr})" for itr in policy_calls.modes]
            is_late = (
                bool(modes) and "agent.step" in policy_calls.kinds[: policy_calls.kinds.index("agent.sample_mode")]
            )
            if modes != [f"sample_mode({batch.itr})"] or is_late:
                late = " after agent.step" if is_late else ""
                seen = f"{', '.join(modes) or 'no call'}{late} in the batch itr={batch.itr}"
                raise Violation(seen, "call self.begin_batch(itr) first")


def the_agent_acts_once_per_row(trace: Trace) -> None:
    """agent.step is called once for each row t, and every environment makes at most one step after it."""
    calls, T = _calls(trace.log), trace.setup.batch_T
    for k, batch in enumerate(trace.collected):
        for policy in batch.fields:
            n = len(calls.get((k, policy), _Calls()).inputs)
            if n != T:
                raise Violation(
                    f"{n} calls of agent.step in the batch itr={batch.itr} of {T} rows",
                    "call self.act(t) once for each t in range(self.batch_T)",
                )
    for (k, t), events in calls_by_row(trace.log).items():
        steps = Counter(event.who for event in events if event.kind == "env.step")
        for e, n in steps.items() if k >= 0 else ():
            if n > (t >= 0):
                rank = "" if e is None else f", env_rank={e}"
                remedy = "call self.step_envs(t) once for each row, after self.act(t); repeat actions in a wrapper"
                raise Violation(f"an extra environment step at itr={trace.collected[k].itr}, t={t}{rank}", remedy)


def environments_are_reset_after_an_episode(trace: Trace) -> None:
    """An environment whose episode has ended is reset before the next row; if it is parked, before the next batch."""
    for k, t, e in trace.left:
        raise Violation(
            f"no reset before {_at(trace, k, t, e)}, after the end of the episode",
            "begin_episodes must reset the environments of events.over, self.columns.reset(events.over), or park them; "
            "set waits = True in a collector that parks them",
        )


def episodes_continue_in_the_next_batch(trace: Trace) -> None:
    """The last observation of a batch is the first of the next: no episode is interrupted between them."""
    for k, t, e in trace.cut:
        raise Violation(
            f"the environment was reset in the middle of an episode, before {_at(trace, k, t, e)}",
            "reset only after an episode's end; if the collector interrupts episodes on purpose, check it with "
            "continues=False",
        )


def _at(trace: Trace, k: int, t: int, e: int) -> str:
    """The row after row t."""
    itr, T = trace.collected[k].itr, trace.setup.batch_T
    return f"itr={itr + (t + 1) // T}, t={(t + 1) % T}, env_rank={e}"


def the_agent_is_reset_with_its_environment(trace: Trace) -> None:
    """agent.reset_one(b) is called exactly once for each episode that begins in column b, before the agent acts
    there."""
    wanted = _calls(trace.wanted_log)
    for (k, policy), policy_calls in _calls(trace.log).items():
        for t, (resets, right) in enumerate(zip(policy_calls.resets, wanted[k, policy].resets, strict=True)):
            for b in sorted(resets | right):
                if resets[b] != right[b]:
                    stride = trace.columns[policy][1]
                    raise Violation(
                        f"{resets[b]} calls of agent.reset_one({b}) before "
                        f"{trace.place(trace.collected[k].itr, t, policy, b * stride)}, "
                        f"where {right[b]} episodes begin",
                        "begin_episodes returns what self.columns.reset returns; elsewhere, call self.reset_now(envs)",
                    )


# ---- what is recorded ----------------------------------------------------------------------


def valid_marks_the_recorded_steps(trace: Trace) -> None:
    """samples.valid is True where the environment made a step, and False elsewhere."""
    _require(trace, ["valid"], "it should be", "self.act(t) writes self.samples.valid: do not change it")


def observations_are_what_the_environment_returned(trace: Trace) -> None:
    """observation[t] is what the environment returned before action[t] was taken, and bootstrap_obs what it returned
    after the last row."""
    remedy = "write row t + 1 after step t, with the new first observation where an episode has ended"
    _require(trace, ["observation", "bootstrap_obs"], "the environment returned", remedy)


def actions_are_what_the_environment_took(trace: Trace) -> None:
    """action[t] is the action that the environment was stepped with."""
    remedy = "write self.samples.action[t + 1] when self.prev_action is changed after self.act(t)"
    _require(trace, ["action"], "the environment took", remedy)


def rewards_are_what_the_environment_returned(trace: Trace) -> None:
    """reward[t] is what the environment returned for action[t]."""
    remedy = "call self.settle(t, events) at the end of step t, and do not change self.samples.reward[t + 1]"
    _require(trace, ["reward"], "the environment returned", remedy)


def ends_are_what_the_environment_returned(trace: Trace) -> None:
    """terminated[t] and truncated[t] are what the environment returned at step t, and False where no step was made."""
    remedy = (
        "call self.begin_batch(itr), which clears the flags, and self.settle(t, events) after self.columns.step, "
        "before anything is reset"
    )
    _require(trace, ["terminated", "truncated"], "it should be", remedy)


def done_is_terminated_or_truncated(trace: Trace) -> None:
    """done[t] is True where terminated[t] or truncated[t] is, and False elsewhere."""
    remedy = "call self.settle(t, events) after self.columns.step, and do not change self.samples.done"
    _require(trace, ["done"], "it should be", remedy)


def prev_done_marks_the_first_step_of_an_episode(trace: Trace) -> None:
    """prev_done[t] is True where row t is the first step of an episode, and False in the other valid rows."""
    remedy = "where episodes begin between two batches, call self.reset_now(envs)"
    for batch, wanted in zip(trace.collected, trace.wanted, strict=True):
        for policy, fields in wanted.fields.items():
            flags = batch.fields[policy].prev_done & fields.valid
            where = wanted.itr, policy, None
            _require_same(trace, where, flags, fields.prev_done, "prev_done", "it should be", remedy)


def final_obs_is_the_last_observation(trace: Trace) -> None:
    """final_obs[t] is the last observation of an episode that ended at step t, and zero elsewhere."""
    remedy = "call self.begin_batch(itr) first, and self.settle(t, events) before anything is reset"
    _require(trace, ["final_obs"], "it should be", remedy)


def previous_values_carry_over(trace: Trace) -> None:
    """prev_action[t] and prev_reward[t] are those of row t - 1; prev_action[0] and prev_reward[0] are the last row of
    the batch before."""
    remedy = "call self.begin_batch(itr) first, and write row t + 1 at step t"
    _require(trace, ["prev_action", "prev_reward"], "the last one was", remedy)


# ---- the agent -----------------------------------------------------------------------------


def _require_inputs(trace: Trace, names: Sequence[str], source: str, remedy: str) -> None:
    """Raise `Violation` unless agent.step gets what the loop gives it, where the column is not idle."""
    wanted = _calls(trace.wanted_log)
    for (k, policy), policy_calls in _calls(trace.log).items():
        valid = trace.wanted[k].fields[policy].valid
        for t, (inputs, right) in enumerate(zip(policy_calls.inputs, wanted[k, policy].inputs, strict=True)):
            for name in names:
                left = map_leaves(np.copy, inputs[name])
                left[~valid[t]] = right[name][~valid[t]]
                where = trace.collected[k].itr, policy, t
                _require_same(trace, where, left, right[name], f"agent.step's {name}", source, remedy)


def the_agent_gets_its_previous_values(trace: Trace) -> None:
    """Within an episode, agent.step gets the action and the reward of the step before; at its first step, zeros."""
    remedy = (
        "self.act(t) and self.settle(t, events) set self.prev_action and self.prev_reward, to zero at an episode's "
        "end: keep that"
    )
    _require_inputs(trace, ["prev_action", "prev_reward"], "it should be", remedy)


def the_agent_sees_what_is_recorded(trace: Trace) -> None:
    """agent.step gets observation[t], and the agent_info that it returns is agent_info[t]."""
    remedy = "record with self.act(t), or do what it does"
    _require_inputs(trace, ["observation"], "recorded is", remedy)
    _require(trace, ["agent_info"], "the agent returned", remedy)


def values_are_of_the_next_observation(trace: Trace) -> None:
    """bootstrap_value is agent.value of the observation after the last row; final_value is agent.value of final_obs
    where an episode was truncated and not terminated, and zero elsewhere."""
    remedy = "call self.settle(t, events) before anything is reset, and self.end_batch() after the last row"
    _require(trace, ["bootstrap_value", "final_value"], "it should be", remedy)


# ---- trajectories --------------------------------------------------------------------------


class SteppedTrajInfo(TrajInfo):
    """Any subclass is called at every step, while `TrajInfo` itself is computed from the batch."""

    LastObservation: Any = None

    def terminate(self, final_observation: object) -> None:
        self.LastObservation = final_observation


def _require_infos(trace: Trace, remedy: str) -> None:
    for batch, wanted in zip(trace.collected, trace.wanted, strict=True):
        if len(batch.infos) != len(wanted.infos):
            raise Violation(
                f"{len(batch.infos)} trajectories were returned for the batch itr={batch.itr}, "
                f"in which {len(wanted.infos)} ended",
                remedy,
            )
        for info, right in zip(batch.infos, wanted.infos, strict=True):
            are_close = np.allclose(_figures(info), _figures(right), rtol=1e-4, atol=1e-5)
            if not are_close or _whose(info) != _whose(right):
                seen = f"{info!r} for the episode that ended in the batch itr={batch.itr}; it should be {right!r}"
                raise Violation(seen, remedy)
            last, right_last = (vars(record).get("LastObservation") for record in (info, right))
            for path, a, b in tree_leaves(last, "terminate's final_observation", right_last):
                if np.any(differ(np.asarray(a), np.asarray(b))):
                    raise Violation(f"{path} is {a} in the batch itr={batch.itr}; it ended with {b}", remedy)


def _figures(info: TrajInfo) -> list[float]:
    return [info.Length, info.Return, info.NonzeroRewards, info.DiscountedReturn]


def _whose(info: TrajInfo) -> tuple[Any, ...]:
    return info.env_rank, info.number, info.agent_id, info.policy


def each_episode_that_ends_gives_a_traj_info(trace: Trace) -> None:
    """Each episode that ends gives one TrajInfo, with its Length and Return; they are ordered by t, then env_rank."""
    _require_infos(trace, "call self.end_batch() last, and self.reset_now(envs) where episodes are interrupted")


def a_traj_info_subclass_sees_every_step(trace: Trace) -> None:
    """A TrajInfo subclass gets every environment step, and at the episode's end the last observation."""
    _require_infos(trace, "step with self.columns.step alone, and call self.settle(t, events) after it")


#: In this order, since later rules depend on earlier ones. First those of the calls, then those of the fields.
TRACE_RULES: tuple[Callable[[Trace], None], ...] = (
    sample_mode_is_called_once_per_batch,
    the_agent_acts_once_per_row,
    environments_are_reset_after_an_episode,
    episodes_continue_in_the_next_batch,
    valid_marks_the_recorded_steps,
    observations_are_what_the_environment_returned,
    actions_are_what_the_environment_took,
    rewards_are_what_the_environment_returned,
    ends_are_what_the_environment_returned,
    done_is_terminated_or_truncated,
    prev_done_marks_the_first_step_of_an_episode,
    final_obs_is_the_last_observation,
    previous_values_carry_over,
    the_agent_gets_its_previous_values,
    the_agent_sees_what_is_recorded,
    the_agent_is_reset_with_its_environment,
    values_are_of_the_next_observation,
    each_episode_that_ends_gives_a_traj_info,
)
