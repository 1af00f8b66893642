"""The rules of a collector that one trace shows: it records what really happened."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.buffers.named import ArrayTree, as_named, map_leaves
from penstock.buffers.tree import tree_leaves
from penstock.collectors import TrajInfo
from penstock.testing.rules import Violation
from penstock.testing.traces import BatchTrace, Step, Trace, place, probe


def _compare(name: str, found: object, wanted: object, where: str, source: str, remedy: str) -> None:
    for path, a, b in tree_leaves(found, name, wanted):
        if not np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"):
            raise Violation(f"{path} is {a} at {where}; {source} {b}", remedy)


def _grid(batch: BatchTrace, value: Callable[[Step], Any], dtype: npt.DTypeLike = bool) -> Any:
    """An array `[T, B]` with `value(step)` in the cell of each step, and zero elsewhere."""
    grid = np.zeros_like(batch.samples.env.valid, dtype)
    for step in batch.steps:
        grid[step.t, step.b] = value(step)
    return grid


def _compare_grids(name: str, batch: BatchTrace, found: Any, wanted: Any, remedy: str) -> None:
    for t, b in np.argwhere(~np.isclose(wanted, found)):
        raise Violation(f"{name} is {found[t, b]} at {place(batch.itr, t, b)}; it should be {wanted[t, b]}", remedy)


def _zero_like(value: ArrayTree) -> Any:
    return map_leaves(np.zeros_like, value)


# ---- the order of calls --------------------------------------------------------------------


def sample_mode_is_called_once_per_batch(trace: Trace) -> None:
    """agent.sample_mode(itr) is called once in every batch, before agent.step."""
    for batch in trace.batches:
        calls = [event for event in batch.events if event.kind in ("agent.sample_mode", "agent.step")]
        modes = [f"sample_mode({call.data})" for call in calls if call.kind == "agent.sample_mode"]
        if modes != [f"sample_mode({batch.itr})"] or calls[0].kind != "agent.sample_mode":
            is_late = bool(modes) and calls[0].kind == "agent.step"
            late = " after agent.step" if is_late else ""
            seen = f"{', '.join(modes) or 'no call'}{late} in the batch itr={batch.itr}"
            raise Violation(seen, "call self.begin_batch(itr) first")


def the_agent_acts_once_per_row(trace: Trace) -> None:
    """agent.step is called once for each row t, and every environment makes at most one step after it."""
    for batch in trace.batches:
        T = len(batch.samples.env.done)
        rows = np.flatnonzero(batch.samples.env.valid.any(1))
        needed = rows[-1] + 1 if rows.size else 0
        calls = sum(event.kind == "agent.step" for event in batch.events)
        if not needed <= calls <= T:
            raise Violation(
                f"{calls} calls of agent.step in the batch itr={batch.itr} of {T} rows",
                "call self.act(t) once for each t in range(self.batch_T)",
            )
        seen: set[tuple[int, int]] = set()
        for step in batch.steps:
            if step.t == -1 or (step.t, step.b) in seen:
                remedy = "call self.step_envs(t) once for each row, after self.act(t); repeat actions in a wrapper"
                raise Violation(f"an extra environment step at {step.where}", remedy)
            seen.add((step.t, step.b))


def environments_are_reset_after_an_episode(trace: Trace) -> None:
    """An environment whose episode has ended is reset before it is stepped again."""
    for step, _ in trace.cells():
        if step.after_end:
            raise Violation(
                f"a step at {step.where}, after the end of the episode",
                "begin_episodes must reset or park the environments of events.over: self.columns.reset(events.over)",
            )


def valid_marks_the_recorded_steps(trace: Trace) -> None:
    """samples.valid is True where the environment made a step, and False elsewhere."""
    remedy = (
        "self.act(t) writes self.samples.valid: do not change it; set waits = True in a collector whose begin_episodes "
        "parks environments"
    )
    for batch in trace.batches:
        wanted = _grid(batch, lambda step: True)
        _compare_grids("valid", batch, batch.samples.env.valid, wanted, remedy)


def episodes_continue_in_the_next_batch(trace: Trace) -> None:
    """The last observation of a batch is the first of the next: no episode is interrupted between them."""
    for step, _ in trace.cells():
        if step.interrupted:
            raise Violation(
                f"the environment was reset in the middle of an episode, before {step.where}",
                "reset only after an episode's end; if the collector interrupts episodes on purpose, check it with "
                "continues=False",
            )


# ---- what is recorded ----------------------------------------------------------------------


def observations_are_what_the_environment_returned(trace: Trace) -> None:
    """observation[t] is what the environment returned before action[t] was taken."""
    for step, samples in trace.cells():
        remedy = "write row t + 1 after step t, with the new first observation where an episode has ended"
        found, wanted = samples.env.observation[step.t, step.b], trace.row_of(trace.observation_space, step.before)
        _compare("observation", found, wanted, step.where, "the environment returned", remedy)


def actions_are_what_the_environment_took(trace: Trace) -> None:
    """action[t] is the action that the environment was stepped with."""
    for step, samples in trace.cells():
        remedy = "write self.samples.action[t + 1] when self.prev_action is changed after self.act(t)"
        found, wanted = samples.agent.action[step.t, step.b], trace.row_of(trace.action_space, step.action)
        _compare("action", found, wanted, step.where, "the environment took", remedy)


def rewards_are_what_the_environment_returned(trace: Trace) -> None:
    """reward[t] is what the environment returned for action[t]."""
    for step, samples in trace.cells():
        remedy = "call self.write_step(t) at the end of step t, and do not change self.samples.reward[t + 1]"
        found, wanted = samples.env.reward[step.t, step.b], np.float32(step.reward)
        _compare("reward", found, wanted, step.where, "the environment returned", remedy)


def ends_are_what_the_environment_returned(trace: Trace) -> None:
    """terminated[t] and truncated[t] are what the environment returned at step t, and False where no step was made."""
    for name in ("terminated", "truncated"):
        remedy = (
            f"call self.begin_batch(itr), which clears self.samples.{name}, and self.settle(t, events) after "
            "self.columns.step"
        )
        for batch in trace.batches:
            wanted = _grid(batch, operator.attrgetter(name))
            _compare_grids(name, batch, batch.samples.env[name], wanted, remedy)


def done_is_terminated_or_truncated(trace: Trace) -> None:
    """done[t] is True where terminated[t] or truncated[t] is, and False elsewhere."""
    remedy = "call self.settle(t, events) after self.columns.step, and do not change self.samples.done"
    for batch in trace.batches:
        env = batch.samples.env
        _compare_grids("done", batch, env.done, env.terminated | env.truncated, remedy)


def final_obs_is_the_last_observation(trace: Trace) -> None:
    """final_obs[t] is the last observation of an episode that ended at step t, and zero elsewhere."""
    for batch in trace.batches:
        ends = {(step.t, step.b): step.after for step in batch.steps if step.done}
        for t, b in np.ndindex(*batch.samples.env.done.shape):
            found = batch.samples.env.final_obs[t, b]
            wanted = trace.row_of(trace.observation_space, ends[t, b]) if (t, b) in ends else _zero_like(found)
            source = "the episode ended with" if (t, b) in ends else "no episode ended, so it should be"
            remedy = "call self.begin_batch(itr) first, and self.settle(t, events) before anything is reset"
            _compare("final_obs", found, wanted, place(batch.itr, t, b), source, remedy)


def previous_values_carry_over(trace: Trace) -> None:
    """prev_action[0] and prev_reward[0] are the last row of the batch before."""
    remedy = "call self.begin_batch(itr) first, and write row t + 1 at step t"
    for last, batch in zip(trace.batches, trace.batches[1:], strict=False):
        for b in np.flatnonzero(last.samples.env.valid[-1]).tolist():
            found, wanted = batch.samples[0, b], last.samples[-1, b]
            where, source = place(batch.itr, 0, b), "the last one was"
            _compare("prev_action", found.agent.prev_action, wanted.agent.action, where, source, remedy)
            _compare("prev_reward", found.env.prev_reward, wanted.env.reward, where, source, remedy)


# ---- the agent -----------------------------------------------------------------------------


def the_agent_sees_what_is_recorded(trace: Trace) -> None:
    """agent.step gets observation[t], and the agent_info that it returns is agent_info[t]."""
    for step, samples in trace.cells():
        observation, _, _, agent_info = step.agent_step
        recorded = samples.env.observation[step.t, step.b]
        remedy = "record with self.act(t), or do what it does"
        _compare("agent.step's observation", observation[step.b], recorded, step.where, "recorded is", remedy)
        for name, leaf in samples.agent.agent_info.leaves():
            wanted = np.asarray(dict(as_named(agent_info).leaves())[name])[step.b].astype(leaf.dtype)
            found = leaf[step.t, step.b]
            _compare(f"agent_info.{name}", found, wanted, step.where, "the agent returned", remedy)


def previous_values_are_zero_at_an_episodes_start(trace: Trace) -> None:
    """At an episode's first step, agent.step gets a zero prev_action and a zero prev_reward."""
    remedy = "self.settle zeroes self.prev_action at an episode's end, and self.write_step self.prev_reward: keep that"
    for step, _ in trace.cells():
        if step.last is None:
            for name, field in zip(("prev_action", "prev_reward"), step.agent_step[1:3], strict=True):
                found, source = field[step.b], "an episode starts there, so it should be"
                _compare(f"agent.step's {name}", found, _zero_like(found), step.where, source, remedy)


def the_agent_gets_its_previous_values(trace: Trace) -> None:
    """Within an episode, agent.step gets the action and the reward of the step before."""
    remedy = "self.write_step(t) sets self.prev_reward after each step, and self.act(t) self.prev_action: keep that"
    for step, _ in trace.cells():
        if step.last is not None:
            action, reward = (field[step.b] for field in step.agent_step[1:3])
            last_action, last_reward = trace.row_of(trace.action_space, step.last.action), np.float32(step.last.reward)
            _compare("agent.step's prev_action", action, last_action, step.where, "the last one was", remedy)
            _compare("agent.step's prev_reward", reward, last_reward, step.where, "the last one was", remedy)


def the_agent_is_reset_with_its_environment(trace: Trace) -> None:
    """agent.reset_one(b) is called exactly once for each reset of environment b, before the agent acts again."""
    seen: set[int] = set()
    for step, _ in trace.cells():
        # A column's first step is left out: start_agent resets the whole agent after decorrelation.
        if step.b in seen and step.agent_resets != step.env_resets:
            raise Violation(
                f"{step.agent_resets} calls of agent.reset_one({step.b}) before {step.where}, "
                f"where the environment was reset {step.env_resets} times",
                "begin_episodes returns what self.columns.reset returns; elsewhere, call self.reset_now(envs)",
            )
        seen.add(step.b)


def values_are_of_the_next_observation(trace: Trace) -> None:
    """bootstrap_value is agent.value of the observation after the last row; final_value is agent.value of final_obs
    where an episode was truncated and not terminated, and zero elsewhere."""

    def value_of(observation: object) -> Any:
        row = trace.row_of(trace.observation_space, observation)
        return probe(map_leaves(lambda leaf: leaf[None], row))[0]

    def final_value(step: Step) -> Any:
        return value_of(step.after) if step.truncated and not step.terminated else 0

    remedy = "call self.settle(t, events) before anything is reset, and self.end_batch() after the last row"
    for batch in trace.batches:
        agent = batch.samples.agent
        for b, observation in enumerate(batch.following):
            if observation is not None:
                found, where = agent.bootstrap_value[b], f"itr={batch.itr}, env_rank={b}"
                _compare("bootstrap_value", found, value_of(observation), where, "it should be", remedy)
        wanted = _grid(batch, final_value, np.float32)
        _compare_grids("final_value", batch, agent.final_value, wanted, remedy)


# ---- trajectories --------------------------------------------------------------------------


class SteppedTrajInfo(TrajInfo):
    """Any subclass is called at every step, while `TrajInfo` itself is computed from the batch."""

    LastObservation: Any = None

    def terminate(self, final_observation: object) -> None:
        self.LastObservation = final_observation


def _compare_infos(trace: Trace, remedy: str) -> None:
    for batch in trace.batches:
        ends = sorted((step for step in batch.steps if step.done), key=lambda step: (step.t, step.b))
        if len(ends) != len(batch.infos):
            raise Violation(
                f"{len(batch.infos)} trajectories were returned for the batch itr={batch.itr}, "
                f"in which {len(ends)} episodes ended",
                remedy,
            )
        for info, step in zip(batch.infos, ends, strict=True):
            if info.Length != step.length or not np.isclose(info.Return, step.return_, rtol=1e-4, atol=1e-5):
                raise Violation(
                    f"{info!r} for the episode that ended at {step.where} "
                    f"with Length={step.length}, Return={step.return_}",
                    remedy,
                )
            if isinstance(info, SteppedTrajInfo):
                found, wanted = (trace.row_of(trace.observation_space, o) for o in (info.LastObservation, step.after))
                _compare("terminate's final_observation", found, wanted, step.where, "it ended with", remedy)


def each_episode_that_ends_gives_a_traj_info(trace: Trace) -> None:
    """Each episode that ends gives one TrajInfo, with its Length and Return; they are ordered by t, then env_rank."""
    _compare_infos(trace, "call self.end_batch() last, and self.reset_now(envs) where episodes are interrupted")


def a_traj_info_subclass_sees_every_step(trace: Trace) -> None:
    """A TrajInfo subclass gets every environment step, and at the episode's end the last observation."""
    _compare_infos(trace, "step with self.columns.step alone, and call self.settle(t, events) after it")


#: In this order, since later rules depend on earlier ones.
TRACE_RULES: tuple[Callable[[Trace], None], ...] = (
    sample_mode_is_called_once_per_batch,
    the_agent_acts_once_per_row,
    environments_are_reset_after_an_episode,
    valid_marks_the_recorded_steps,
    observations_are_what_the_environment_returned,
    actions_are_what_the_environment_took,
    rewards_are_what_the_environment_returned,
    ends_are_what_the_environment_returned,
    done_is_terminated_or_truncated,
    final_obs_is_the_last_observation,
    previous_values_carry_over,
    the_agent_sees_what_is_recorded,
    previous_values_are_zero_at_an_episodes_start,
    the_agent_gets_its_previous_values,
    the_agent_is_reset_with_its_environment,
    values_are_of_the_next_observation,
    each_episode_that_ends_gives_a_traj_info,
)
