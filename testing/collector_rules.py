"""The rules of a collector that one trace shows: what was recorded is what happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from penstock.buffers.named import as_named, map_leaves
from penstock.collectors import TrajInfo
from penstock.testing.rules import Violation, leaves
from penstock.testing.traces import BatchTrace, Step, Trace, probe

__all__ = ["CONTINUITY_RULE", "STEPPED_RULE", "TRACE_RULES", "SteppedTrajInfo"]


def _cells(trace: Trace) -> Iterator[tuple[BatchTrace, int, int, Step]]:
    """Every step with its batch, t and column."""
    for batch in trace.batches:
        for b, steps in enumerate(batch.steps):
            for step in steps:
                yield batch, step.agent_call, b, step


def _at(batch: BatchTrace, t: int, b: int) -> str:
    return f"itr={batch.itr}, t={t}, env_rank={b}"


def _compare(name: str, found: Any, wanted: Any, where: str, source: str, remedy: str) -> None:
    for (path, a), (_, b) in zip(leaves(found, name), leaves(wanted, name), strict=True):
        if not np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"):
            raise Violation(f"{path} is {a} at {where}; {source} {b}", remedy)


def _zero_like(value: Any) -> Any:
    return map_leaves(np.zeros_like, value)


# ---- the order of things -------------------------------------------------------------------


def the_agent_is_told_of_the_batch(trace: Trace) -> None:
    """agent.sample_mode(itr) is called once at the beginning of every batch."""
    for batch in trace.batches:
        if list(batch.modes) != [(batch.itr, True)]:
            calls = ", ".join(f"sample_mode({itr})" + ("" if first else " after a step") for itr, first in batch.modes)
            raise Violation(f"{calls or 'no call'} in the batch itr={batch.itr}", "call self.begin_batch(itr) first")


def the_agent_acts_once_a_row(trace: Trace) -> None:
    """agent.step is called once for each row t, and every environment makes at most one step after it."""
    for batch in trace.batches:
        T = len(batch.samples.env.done)
        needed = 1 + max((t for t in range(T) if batch.samples.env.valid[t].any()), default=-1)
        if not needed <= len(batch.agent_steps) <= T:
            raise Violation(
                f"{len(batch.agent_steps)} calls of agent.step in the batch itr={batch.itr} of {T} rows",
                "call self.act(t) once for each t in range(self.batch_T)",
            )
        for b, steps in enumerate(batch.steps):
            calls = [step.agent_call for step in steps]
            if -1 in calls or len(set(calls)) < len(calls):
                t = next(t for i, t in enumerate(calls) if t == -1 or t in calls[:i])
                raise Violation(
                    f"a further environment step at {_at(batch, t, b)}",
                    "call self.envs.step once for each row, after self.act(t)",
                )


def environments_are_reset_at_the_end(trace: Trace) -> None:
    """An environment whose episode has ended is reset before it is stepped again."""
    for batch, t, b, step in _cells(trace):
        if step.past_end:
            raise Violation(
                f"a step at {_at(batch, t, b)}, whose episode was over",
                "reset in the hook that self.envs.step calls at an end: return self.reset_column(column)",
            )


def valid_marks_the_cells_that_hold_a_step(trace: Trace) -> None:
    """samples.valid is True where the environment made a step, and False elsewhere."""
    for batch in trace.batches:
        stepped = np.zeros_like(batch.samples.env.valid)
        for b, steps in enumerate(batch.steps):
            stepped[[step.agent_call for step in steps], b] = True
        for t, b in np.argwhere(stepped != batch.samples.env.valid):
            raise Violation(
                f"valid is {batch.samples.env.valid[t, b]} at {_at(batch, t, b)}, "
                f"where the environment made {'a' if stepped[t, b] else 'no'} step",
                "write self.samples.valid wherever the batch before may have left something else (it starts as True)",
            )


def episodes_go_on_from_batch_to_batch(trace: Trace) -> None:
    """The last observation of a batch is the first of the next: no episode is given up in between."""
    for batch, t, b, step in _cells(trace):
        if step.gave_up:
            raise Violation(
                f"the environment was reset in mid-episode before {_at(batch, t, b)}",
                "reset only what is done, or check with continues=False if giving episodes up is what it is for",
            )


# ---- what is recorded ----------------------------------------------------------------------


def observations_are_those_acted_on(trace: Trace) -> None:
    """observation[t] is what the environment showed before action[t] was taken."""
    for batch, t, b, step in _cells(trace):
        wanted = trace.row_of(trace.observation_space, step.before)
        remedy = "write row t + 1 after step t, with the new first observation where an episode has ended"
        found = batch.samples.env.observation[t, b]
        _compare("observation", found, wanted, _at(batch, t, b), "the environment showed", remedy)


def actions_are_those_taken(trace: Trace) -> None:
    """action[t] is what the environment was stepped with, whoever chose it."""
    for batch, t, b, step in _cells(trace):
        wanted = trace.row_of(trace.action_space, step.action)
        remedy = "write self.samples.action[t + 1] when self.prev_action is changed after self.act(t)"
        found = batch.samples.agent.action[t, b]
        _compare("action", found, wanted, _at(batch, t, b), "the environment took", remedy)


def rewards_are_those_given(trace: Trace) -> None:
    """reward[t] is what the environment gave for action[t]."""
    for batch, t, b, step in _cells(trace):
        remedy = "self.envs.write_rewards(self.samples.reward[t + 1]) after step t, and change nothing in it"
        found, wanted = batch.samples.env.reward[t, b], np.float32(step.reward)
        _compare("reward", found, wanted, _at(batch, t, b), "the environment gave", remedy)


def ends_are_those_reported(trace: Trace) -> None:
    """terminated[t] and truncated[t] are what the environment returned at step t, and False where it made none."""
    for name in ("terminated", "truncated"):
        for batch in trace.batches:
            wanted = np.zeros_like(batch.samples.env.valid)
            for b, steps in enumerate(batch.steps):
                for step in steps:
                    wanted[step.agent_call, b] = getattr(step, name)
            for t, b in np.argwhere(wanted != batch.samples.env[name]):
                raise Violation(
                    f"{name} is {not wanted[t, b]} at {_at(batch, t, b)}; the environment returned {wanted[t, b]}",
                    f"write self.samples.{name}[t, column] at an episode's end; self.begin_batch clears it",
                )


def done_is_terminated_or_truncated(trace: Trace) -> None:
    """done[t] is True where terminated[t] or truncated[t] is, and nowhere else."""
    for batch in trace.batches:
        env = batch.samples.env
        for t, b in np.argwhere(env.done != (env.terminated | env.truncated)):
            raise Violation(
                f"done is {env.done[t, b]} at {_at(batch, t, b)}, "
                f"terminated {env.terminated[t, b]}, truncated {env.truncated[t, b]}",
                "write self.samples.done[t, column] = True at either kind of end",
            )


def final_observations_are_kept(trace: Trace) -> None:
    """final_obs[t] is the last observation of the episode that ended at step t, and zero where none did."""
    for batch in trace.batches:
        ends: dict[tuple[int, int], Any] = {}
        for b, steps in enumerate(batch.steps):
            ends.update({(s.agent_call, b): s.after for s in steps if s.terminated or s.truncated})
        for t, b in np.ndindex(*batch.samples.env.done.shape):
            found = batch.samples.env.final_obs[t, b]
            wanted = trace.row_of(trace.observation_space, ends[t, b]) if (t, b) in ends else _zero_like(found)
            source = "the episode ended with" if (t, b) in ends else "no episode ended:"
            remedy = "self.finals.record(...) at an episode's end, before the reset, and self.begin_batch(itr) at first"
            _compare("final_obs", found, wanted, _at(batch, t, b), source, remedy)


def previous_rows_carry_over(trace: Trace) -> None:
    """prev_action[0] and prev_reward[0] are the last row of the batch before."""
    for last, batch in zip(trace.batches, trace.batches[1:], strict=False):
        for b in np.flatnonzero(last.samples.env.valid[-1]).tolist():
            where, remedy = _at(batch, 0, b), "call self.begin_batch(itr) first, and write row t + 1 at step t"
            agent, before = batch.samples.agent, last.samples.agent
            _compare("prev_action", agent.prev_action[0, b], before.action[-1, b], where, "the last was", remedy)
            reward = batch.samples.env.prev_reward[0, b], last.samples.env.reward[-1, b]
            _compare("prev_reward", *reward, where, "the last was", remedy)


# ---- the agent -----------------------------------------------------------------------------


def the_agent_sees_what_is_recorded(trace: Trace) -> None:
    """agent.step is given observation[t], and what it reports beside the action is agent_info[t]."""
    for batch, t, b, _ in _cells(trace):
        observation, _, _, agent_info = batch.agent_steps[t]
        recorded = batch.samples.env.observation[t, b]
        where, remedy = _at(batch, t, b), "let self.act(t) call the agent and record, or do as it does"
        _compare("agent.step's observation", observation[b], recorded, where, "recorded is", remedy)
        for name, leaf in batch.samples.agent.agent_info.leaves():
            wanted = np.asarray(dict(as_named(agent_info).leaves())[name])[b].astype(leaf.dtype)
            _compare(f"agent_info.{name}", leaf[t, b], wanted, where, "the agent reported", remedy)


def an_episode_begins_without_a_past(trace: Trace) -> None:
    """agent.step is given a zero prev_action and prev_reward at an episode's first step."""
    for batch, t, b, step in _cells(trace):
        if step.is_first:
            remedy = "self.reset_column(column) zeroes self.prev_action; zero self.prev_reward[column] after the row"
            _, action, reward, _ = batch.agent_steps[t]
            for name, found in (("prev_action", action[b]), ("prev_reward", reward[b])):
                source = "the episode begins there, so it should be"
                _compare(f"agent.step's {name}", found, _zero_like(found), _at(batch, t, b), source, remedy)


def the_agent_is_given_its_past(trace: Trace) -> None:
    """agent.step is given the action and the reward of the step before, within an episode."""
    for batch, t, b, step in _cells(trace):
        if not step.is_first:
            remedy = "set self.prev_reward to the row of rewards after each step; self.act sets self.prev_action"
            _, action, reward, _ = batch.agent_steps[t]
            past = trace.row_of(trace.action_space, step.prev_action)
            _compare("agent.step's prev_action", action[b], past, _at(batch, t, b), "the last was", remedy)
            last = np.float32(step.prev_reward)
            _compare("agent.step's prev_reward", reward[b], last, _at(batch, t, b), "the last was", remedy)


def the_agent_is_reset_with_its_environment(trace: Trace) -> None:
    """agent.reset_one(b) is called exactly once for each reset of environment b, before the agent acts again."""
    began: set[int] = set()
    for batch, t, b, step in _cells(trace):
        # Before a column's first step in a batch the whole agent is reset, whatever decorrelation did.
        if b in began and step.agent_resets != step.env_resets:
            raise Violation(
                f"{step.agent_resets} calls of agent.reset_one({b}) before {_at(batch, t, b)}, "
                f"where the environment was reset {step.env_resets} times",
                "let self.reset_column(column) reset both",
            )
        began.add(b)


def values_are_of_what_follows(trace: Trace) -> None:
    """bootstrap_value is agent.value of the observation after the last row; final_value that of final_obs
    where an episode was truncated and not terminated, and zero elsewhere."""

    def value_of(observation: Any) -> Any:
        row = trace.row_of(trace.observation_space, observation)
        return probe(map_leaves(lambda leaf: leaf[None], row))[0]

    for batch in trace.batches:
        remedy = "call self.finals.record(...) at an episode's end, and self.end_batch() when all rows are written"
        final = np.zeros_like(batch.samples.agent.final_value)
        for b, steps in enumerate(batch.steps):
            for step in steps:
                if step.truncated and not step.terminated:
                    final[step.agent_call, b] = value_of(step.after)
            if batch.following[b] is not None:
                found, where = batch.samples.agent.bootstrap_value[b], f"itr={batch.itr}, env_rank={b}"
                _compare("bootstrap_value", found, value_of(batch.following[b]), where, "it should be", remedy)
        for t, b in np.argwhere(~np.isclose(final, batch.samples.agent.final_value, equal_nan=False)):
            found = batch.samples.agent.final_value[t, b]
            raise Violation(f"final_value is {found} at {_at(batch, t, b)}; it should be {final[t, b]}", remedy)


# ---- trajectories --------------------------------------------------------------------------


class SteppedTrajInfo(TrajInfo):
    """Follows every step, where the stock class is computed from the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.FirstObservation: Any = None
        self.LastObservation: Any = None

    def step(self, observation: Any, *rest: Any) -> None:
        super().step(observation, *rest)
        if self.Length == 1:
            self.FirstObservation = observation

    def terminate(self, final_observation: Any) -> None:
        self.LastObservation = final_observation


def _compare_infos(trace: Trace, remedy: str) -> None:
    for batch in trace.batches:
        ends = sorted(
            ((s.agent_call, b, s) for b, steps in enumerate(batch.steps) for s in steps if s.terminated or s.truncated),
            key=lambda end: end[:2],
        )
        if len(ends) != len(batch.infos):
            raise Violation(
                f"{len(batch.infos)} trajectories were handed over in the batch itr={batch.itr}, "
                f"in which {len(ends)} episodes ended",
                remedy,
            )
        for info, (t, b, step) in zip(batch.infos, ends, strict=True):
            if info.Length != step.length or not np.isclose(info.Return, step.return_, rtol=1e-4, atol=1e-5):
                raise Violation(
                    f"{info!r} for the episode that ended at {_at(batch, t, b)} "
                    f"with Length={step.length}, Return={step.return_}",
                    remedy,
                )
            if isinstance(info, SteppedTrajInfo):
                seen, wanted = (trace.row_of(trace.observation_space, o) for o in (info.LastObservation, step.after))
                _compare("terminate's final_observation", seen, wanted, _at(batch, t, b), "it ended with", remedy)


def trajectories_are_those_that_ended(trace: Trace) -> None:
    """One TrajInfo is handed over for each done, with its episode's Length and Return, ordered by t, then env_rank."""
    _compare_infos(
        trace, "call self.end_batch() at last, and self.tracker.restart() where running episodes are given up"
    )


def a_stepped_trajectory_sees_every_step(trace: Trace) -> None:
    """A TrajInfo subclass is stepped with every environment step and told of the end, with its last observation."""
    _compare_infos(trace, "give self.envs.step the tracker's on_step, and call self.tracker.on_episode_end at each end")


#: In the order in which they are held against a trace: what others build upon comes first.
TRACE_RULES: tuple[Callable[[Trace], None], ...] = (
    the_agent_is_told_of_the_batch,
    the_agent_acts_once_a_row,
    environments_are_reset_at_the_end,
    valid_marks_the_cells_that_hold_a_step,
    observations_are_those_acted_on,
    actions_are_those_taken,
    rewards_are_those_given,
    ends_are_those_reported,
    done_is_terminated_or_truncated,
    final_observations_are_kept,
    previous_rows_carry_over,
    the_agent_sees_what_is_recorded,
    an_episode_begins_without_a_past,
    the_agent_is_given_its_past,
    the_agent_is_reset_with_its_environment,
    values_are_of_what_follows,
    trajectories_are_those_that_ended,
)
STEPPED_RULE: Callable[[Trace], None] = a_stepped_trajectory_sees_every_step
CONTINUITY_RULE: Callable[[Trace], None] = episodes_go_on_from_batch_to_batch
