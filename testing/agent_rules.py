"""The rules of an agent: how its copies act, what they share, and how parameters reach them.

The inputs of an agent are recorded on a tape (`agent_setup.py`).
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.agents import Agent
from penstock.buffers import NamedArrays, pickling
from penstock.buffers.named import map_leaves
from penstock.buffers.reports import in_one_line
from penstock.buffers.tree import tree_leaves
from penstock.envs import ColumnStreams, Purpose, action_splitter, example_of
from penstock.errors import ConfigError
from penstock.samplers import GpuSampler, ParallelSampler, SerialSampler
from penstock.testing.agent_setup import AgentSetup, act, stack, step
from penstock.testing.rules import Violation, first_difference

_NOISE = "draw column b's noise only from rngs[b] of seed_columns(rngs)"
_SELECT = "read and write only the state of the columns in self.selected (None: of all columns)"
_STATE = "create the state of the columns in seed_columns or reset, not in __init__ or initialize"


def _same(
    left: NamedArrays,
    right: NamedArrays,
    when: str,
    remedy: str,
    *,
    columns: slice | list[int] | npt.NDArray[Any] = slice(None),
    close: bool = False,
) -> None:
    if left.keys() != right.keys():
        raise Violation(f"fields {left.keys()} and {right.keys()}, {when}", remedy)
    pairs = [(name, leaf[:, columns], right[name][:, columns]) for name, leaf in left.items()]
    difference = first_difference(pairs, close=close)
    if difference is not None:
        raise Violation(f"{difference}, {when}", remedy)


def _value(agent: Agent, inputs: tuple[Any, Any, Any]) -> Any:
    """The agent's values, or None if it has no `value`."""
    try:
        return np.array(agent.value(*inputs))
    except ConfigError:
        return None


# ---- acting --------------------------------------------------------------------------------


def agent_info_keeps_its_shape(setup: AgentSetup) -> None:
    """agent_info has the same fields, with the same shapes [B, ...] and dtypes, at each step and for any number of
    columns."""
    many, few = setup.reference(), act(setup.copy(columns=range(1)), setup.tape, columns=slice(0, 1))
    remedy = "return numeric arrays with one entry per column"
    for outputs, B in ((many, setup.batch_B), (few, 1)):
        for name, leaf in outputs.items():
            if name.startswith("agent_info") and (leaf.ndim < 2 or leaf.shape[1] != B or leaf.dtype == object):
                raise Violation(f"{name} is {list(leaf.shape[1:])} {leaf.dtype} for {B} columns", remedy)
    kinds = [
        {name: f"{list(leaf.shape[2:])} {leaf.dtype}" for name, leaf in outputs.items()} for outputs in (many, few)
    ]
    for name in kinds[0] | kinds[1]:
        of_many, of_one = (kind.get(name, "missing") for kind in kinds)
        if of_many != of_one:
            raise Violation(f"{name} is {of_many} for {setup.batch_B} columns and {of_one} for one", remedy)


def actions_have_the_spaces_shape(setup: AgentSetup) -> None:
    """agent.step returns one action per column, in the structure, shape and kind of dtype of the action space."""
    example = NamedArrays(action=example_of(setup.agent.action_space, "action"))
    wanted = dict(example.leaves())
    given = {name: leaf for name, leaf in setup.reference().items() if name.split(".")[0] == "action"}
    if wanted.keys() != given.keys():
        seen = f"actions with the fields {list(given)}; the space has {list(wanted)}"
        raise Violation(seen, "return the fields of the space")
    for name, leaf in given.items():
        shape = (setup.batch_B, *setup.lead, *wanted[name].shape)
        if leaf.shape[1:] != shape:
            remedy = "return actions [B, ...]: one for each column, in the shape of the space"
            if setup.lead:
                remedy = "return actions [environments, agents, ...], since the agent is joint"
            raise Violation(f"{name} has shape {list(leaf.shape[1:])}; it must be {list(shape)}", remedy)
        if not np.can_cast(leaf.dtype, wanted[name].dtype, "same_kind"):
            remedy = "convert it in step, to a dtype of the space"
            raise Violation(f"{name} is {leaf.dtype}, not of the same kind as the space's {wanted[name].dtype}", remedy)


def actions_lie_in_the_space(setup: AgentSetup) -> None:
    """Every action is an element of the action space."""
    space = setup.agent.action_space
    actions, example = setup.reference(), example_of(space, "action")
    for t in range(setup.batch_T):
        n = math.prod((setup.batch_B, *setup.lead))
        row = map_leaves(lambda leaf: np.zeros((n, *leaf.shape), leaf.dtype), example)  # noqa: B023
        for name, target in tree_leaves(row, "action"):
            target[...] = actions[name][t].reshape(target.shape)  # as a collector records it
        for b, action in enumerate(action_splitter(space)(row)):
            if not space.contains(action):
                where = f"t={t}, env_rank={b * setup.batch_B // n}"
                seen = f"the action at {where} is {action}; the space is {space}"
                raise Violation(seen, "clip it in step")


def one_seed_gives_the_same_actions(setup: AgentSetup) -> None:
    """Two copies with the same random streams return the same actions and agent_info."""
    _same(setup.reference(), setup.reference(), "in two copies with the same random streams", _NOISE)


def inputs_are_not_changed(setup: AgentSetup) -> None:
    """agent.step and agent.value do not write into their inputs."""
    agent = setup.copy()
    for t in range(setup.batch_T):
        for method in ("step", "value"):
            given, kept = setup.tape.row(t), setup.tape.row(t)
            _ = agent.step(*given) if method == "step" else _value(agent, given)
            pairs = list(zip(("observation", "prev_action", "prev_reward"), kept, given, strict=True))
            difference = first_difference(pairs, axes=("env_rank",))
            if difference is not None:
                remedy = "work on a copy of the input"
                raise Violation(f"{difference} before and after agent.{method}, t={t}", remedy)


def inputs_are_not_kept(setup: AgentSetup) -> None:
    """An agent keeps no reference to its inputs: their memory is overwritten after the step."""
    agent, tape, outputs = setup.copy(), setup.tape, []
    inputs = tape.row(0)
    for t in range(setup.batch_T):
        for target, source in zip(inputs, tape.row(t), strict=True):
            target[...] = source
        outputs.append(step(agent, *inputs))
        for field in inputs:
            for _, leaf in tree_leaves(field, ""):
                leaf[...] = 0
        for b in np.flatnonzero(tape.done[t]):
            agent.reset_one(int(b))
    remedy = "copy every input that the agent keeps"
    _same(setup.reference(), stack(outputs), "with inputs in new memory and in memory that is overwritten", remedy)


def value_gives_one_number_per_column(setup: AgentSetup) -> None:
    """agent.value, if the agent has it, returns floating-point numbers [B], or [environments, agents] if it is
    joint."""
    value = _value(setup.copy(), setup.tape.row(0))
    if value is not None and (value.shape != (setup.batch_B, *setup.lead) or value.dtype.kind != "f"):
        seen = f"{list(value.shape)} {value.dtype} for B={setup.batch_B}"
        raise Violation(seen, "return one floating-point number per column")


def value_does_not_change_the_state(setup: AgentSetup) -> None:
    """agent.value changes nothing: the agent acts the same with and without calls of it, noise included."""
    agent = setup.copy()
    outputs = act(agent, setup.tape, between=lambda t: _value(agent, setup.tape.row(t)))
    remedy = "compute values without changing the state of the columns, and without drawing noise"
    _same(setup.reference(), outputs, "without and with calls of agent.value before each step", remedy)


# ---- columns -------------------------------------------------------------------------------


def copies_share_no_state(setup: AgentSetup) -> None:
    """The inputs, steps and resets of one copy do not change the actions of another."""
    first, second = setup.copy(), setup.copy(seed=1)

    def disturb(t: int) -> None:
        second.step(*setup.other_tape.row(t))
        second.reset_one(t % setup.batch_B)
        if t == setup.batch_T // 2:
            setup.copy(seed=2).step(*setup.other_tape.row(t))

    outputs = act(first, setup.tape, between=disturb)
    _same(setup.reference(), outputs, "alone and with another copy that acts between the steps", _STATE)


def reset_one_changes_no_other_column(setup: AgentSetup) -> None:
    """agent.reset_one(b) changes nothing for the other columns."""
    agent, t_reset = setup.copy(), setup.batch_T // 2
    tape = setup.other_tape  # it has no episode ends: no other resets disturb the comparison
    outputs = act(agent, tape, between=lambda t: agent.reset_one(1) if t == t_reset else None)
    when = f"without and with reset_one(1) at t={t_reset} (env_rank counts the columns without column 1)"
    others = np.arange(setup.batch_B) != 1
    _same(act(setup.copy(), tape), outputs, when, "change only index `column` of the state", columns=others)


def _compare_pasts(
    setup: AgentSetup,
    reset: Callable[[Agent], None],
    when: str,
    remedy: str,
    columns: slice | list[int] | npt.NDArray[Any],
) -> None:
    """Compare the outputs on the second half of the tape after two different pasts and `reset(agent)`."""
    outputs, half = [], setup.batch_T // 2
    for past in (setup.tape, setup.other_tape):
        agent = setup.copy()
        act(agent, past, range(half))
        reset(agent)
        outputs.append(act(agent, setup.tape, range(half, setup.batch_T)))
    _same(outputs[0], outputs[1], f"{when} (t is counted from there)", remedy, columns=columns, close=True)


def reset_one_resets_its_column(setup: AgentSetup) -> None:
    """After agent.reset_one(b), the earlier inputs of column b make no difference to its actions."""
    when, remedy = "in column 1 after two different pasts and reset_one(1)", "reset the column's whole state"
    _compare_pasts(setup, lambda agent: agent.reset_one(1), when, remedy, columns=[1])


def reset_resets_every_column(setup: AgentSetup) -> None:
    """After agent.reset(), earlier inputs make no difference."""
    when, remedy = "after two different pasts and reset()", "reset the whole state of every column"
    _compare_pasts(setup, lambda agent: agent.reset(), when, remedy, columns=slice(None))


def columns_do_not_depend_on_the_batch_size(setup: AgentSetup) -> None:
    """A column's actions do not depend on the worker's number of columns; floating-point numbers may differ by
    rounding."""
    few = act(setup.copy(columns=range(2)), setup.tape, columns=slice(0, 2))
    many = setup.reference()[:, :2]
    remedy = f"{_NOISE}; if the columns depend on each other on purpose, check with batch_invariant=False"
    _same(many, few, f"among {setup.batch_B} columns and among 2", remedy, close=True)


def select_steps_only_some_columns(setup: AgentSetup) -> None:
    """After agent.select(columns), step and value act for these columns only, and return for them what they return
    without select."""
    agent, tape, rng = setup.copy(), setup.tape, np.random.default_rng(setup.seed)
    reference = setup.reference()
    outputs = reference.map(np.zeros_like)
    at = np.zeros(setup.batch_B, np.intp)  # each column has its own t
    while (running := np.flatnonzero(at < setup.batch_T)).size:
        columns = running[rng.random(running.size) < 0.6]
        if not columns.size:
            continue
        for b in columns:
            if at[b] and tape.done[at[b] - 1, b]:
                agent.reset_one(int(b))
        agent.select(None if columns.size == setup.batch_B else columns)
        rows = at[columns]
        fields = (tape.observation, tape.prev_action, tape.prev_reward)
        inputs = tuple(map_leaves(lambda leaf: leaf[rows, columns], field) for field in fields)  # noqa: B023
        try:
            _value(agent, inputs)
            done = dict(step(agent, *inputs).leaves())
        except Exception as error:
            raise Violation(f"{in_one_line(error)}, for the columns {columns.tolist()}", _SELECT) from error
        for name, leaf in done.items():
            if len(leaf) != columns.size:
                raise Violation(f"{len(leaf)} rows of {name} for the columns {columns.tolist()}", _SELECT)
            outputs[name][rows, columns] = leaf
        at[columns] += 1
    _same(reference, outputs, "all columns together and a few at a time", _SELECT, close=True)


def reseeded_columns_use_the_new_streams(setup: AgentSetup) -> None:
    """After agent.reseed_columns(columns, rngs) and reset_one of each, these columns act like columns of a new copy
    with these streams. The other columns do not change."""
    half, rest = setup.batch_T // 2, range(setup.batch_T // 2, setup.batch_T)
    agent, columns = setup.copy(), np.array([1])
    act(agent, setup.tape, range(half))
    streams = ColumnStreams(setup.seed + 1, range(setup.batch_B)).rngs(Purpose.ACTION)
    agent.reseed_columns(columns, [streams[b] for b in columns])
    for b in columns:
        agent.reset_one(int(b))
    outputs, fresh = act(agent, setup.tape, rest), act(setup.copy(seed=1), setup.tape, rest)
    remedy = "take the new streams in reseed_columns, and drop numbers drawn from the old ones"
    when = "in the reseeded columns, of a new copy and after reseed_columns"
    _same(fresh, outputs, when, remedy, columns=columns, close=True)
    when, others = "in the other columns, without and with reseed_columns", np.arange(setup.batch_B) != 1
    _same(setup.reference()[half:], outputs, when, remedy, columns=others, close=True)


# ---- parameters ----------------------------------------------------------------------------


def _parameters(agent: Agent, *, changed: bool = False) -> dict[str, Any]:
    """A copy of the agent's parameters, or of others with the same shapes."""
    parameters = {name: np.array(value) for name, value in agent.read_parameters().items()}
    rng = np.random.default_rng(0)
    for value in parameters.values() if changed else ():
        if value.dtype.kind == "f":
            value[...] = value + rng.normal(0, 0.3, value.shape)
    return parameters


def _check_parameters(wanted: Mapping[str, Any], agent: Agent, when: str, remedy: str) -> None:
    parameters = agent.read_parameters()
    if list(parameters) != list(wanted):
        raise Violation(f"parameters {list(parameters)} instead of {list(wanted)} {when}", "keep names and order fixed")
    pairs = [(name, value, parameters[name]) for name, value in wanted.items()]
    difference = first_difference(pairs, axes=("index",) * 8)
    if difference is not None:
        raise Violation(f"parameter {difference} {when}", remedy)


def pickling_changes_nothing(setup: AgentSetup) -> None:
    """A worker's copy can be pickled with cloudpickle, and then acts as before."""
    remedy = "create what cannot be pickled in initialize or seed_columns, or delete it in copy_for_worker"
    try:
        pickled = pickle.loads(pickling.dumps(setup.agent.runtime.worker_copy()))
    except Exception as error:
        raise Violation(in_one_line(error), remedy) from error
    _same(setup.reference(), setup.reference(pickled), "before and after pickling", remedy)


def parameters_survive_a_round_trip(setup: AgentSetup) -> None:
    """After agent.write_parameters(other.read_parameters()), the agent acts like the other."""
    source, target = setup.agent, setup.new(setup.seed + 1)
    wanted = _parameters(source)
    target.write_parameters(wanted)
    remedy = "read and write everything that actions depend on: weights, tables, running statistics"
    _check_parameters(wanted, target, "after write_parameters", remedy)
    when = "in an agent and in one with its parameters"
    _same(setup.reference(source), setup.reference(target), when, remedy)


def parameters_are_copied(setup: AgentSetup) -> None:
    """write_parameters copies the arrays: they are overwritten afterwards."""
    agent = setup.new(setup.seed + 1)
    given = _parameters(agent, changed=True)
    wanted = copy.deepcopy(given)
    agent.write_parameters(given)
    for value in given.values():
        value[...] = 0
    when, remedy = "when the given arrays are set to zero afterwards", "keep a copy of each array"
    _check_parameters(wanted, agent, when, remedy)


def worker_copies_follow_sync_shared_memory(setup: AgentSetup) -> None:
    """A worker's copy has the parameters of the last sync_shared_memory, and acts as the learner's agent did at that
    time."""
    learner = setup.new(setup.seed)
    old, new = _parameters(learner), _parameters(learner, changed=True)
    shared = learner.runtime.share_memory(shared=False)
    try:
        worker = learner.runtime.worker_copy()
        worker.runtime.attach(shared)
        worker.runtime.pull_shared_memory()
        follower = setup.column_copy(worker, range(setup.batch_B))
        learner.write_parameters(new)
        follower.runtime.pull_shared_memory()
        remedy = "set new arrays in write_parameters, or give the copy its own arrays in copy_for_worker"
        _check_parameters(old, follower, "in a worker's copy before sync_shared_memory", remedy)
        learner.sync_shared_memory()
        follower.runtime.pull_shared_memory()
        remedy = "return everything that actions depend on in read_parameters, and set it in write_parameters"
        _check_parameters(new, follower, "in a worker's copy after sync_shared_memory", remedy)
        when = "in the learner and in a worker's copy after sync_shared_memory"
        _same(setup.reference(learner), act(follower, setup.tape), when, remedy)
    finally:
        learner.runtime.unshare_memory(shared)


# ---- in samplers ---------------------------------------------------------------------------


def worker_processes_give_the_same_actions(setup: AgentSetup) -> None:
    """In worker processes the agent acts as in this process; floating-point numbers may differ by rounding."""
    remedy = "keep nothing in module or class variables: another process does not have them"
    here, there = setup.sampled(SerialSampler), setup.sampled(ParallelSampler, n_workers=2)
    _same(here, there, "in this process and in two workers", remedy, close=True)


def central_samplers_give_the_same_actions(setup: AgentSetup) -> None:
    """In a sampler with central inference, which serves environments as they become ready, the agent acts as in this
    process; floating-point numbers may differ by rounding."""
    here, there = setup.sampled(SerialSampler), setup.sampled(GpuSampler, n_workers=2, min_ready=1)
    _same(here, there, "in this process and in a GpuSampler", _SELECT, close=True)


Rules = tuple[Callable[[AgentSetup], None], ...]

#: In this order, since later rules depend on earlier ones.
ACTING_RULES: Rules = (
    agent_info_keeps_its_shape,
    actions_have_the_spaces_shape,
    actions_lie_in_the_space,
    one_seed_gives_the_same_actions,
    inputs_are_not_changed,
    inputs_are_not_kept,
    value_gives_one_number_per_column,
    value_does_not_change_the_state,
    copies_share_no_state,
    reset_one_changes_no_other_column,
    reset_one_resets_its_column,
    reset_resets_every_column,
)
PARAMETER_RULES: Rules = (
    pickling_changes_nothing,
    parameters_survive_a_round_trip,
    parameters_are_copied,
    worker_copies_follow_sync_shared_memory,
)
BATCH_SIZE_RULES: Rules = (columns_do_not_depend_on_the_batch_size, worker_processes_give_the_same_actions)
CENTRAL_RULES: Rules = (
    select_steps_only_some_columns,
    reseeded_columns_use_the_new_streams,
    central_samplers_give_the_same_actions,
)
