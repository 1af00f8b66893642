"""The rules of an agent: how its copies act, what they share, and how parameters travel."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import numpy as np

from penstock.agents import Agent
from penstock.buffers import NamedArrays
from penstock.buffers.named import map_leaves
from penstock.envs import ColumnStreams, Purpose, action_splitter, example_of
from penstock.errors import ConfigError
from penstock.samplers import GpuSampler, ParallelSampler, SerialSampler
from penstock.testing.rules import Violation, first_difference, leaves
from penstock.testing.subjects import Subject, Tape, act, stack, step

__all__ = [
    "ACTING_RULES",
    "CENTRAL_RULES",
    "COLUMN_RULE",
    "PARAMETER_RULES",
    "acts_for_central_samplers_as_here",
    "acts_in_a_worker_as_here",
]

_NOISE = "draw column b's noise from rngs[b] of seed_columns(rngs), and from nothing else"
_SELECT = "take of all that is kept per column what belongs to self.selected (None: all), and put it back there"
_STATE = "make all state per column anew in seed_columns or reset, never in __init__ or initialize"


def _same(left: NamedArrays, right: NamedArrays, when: str, remedy: str, *, close: bool = False) -> None:
    if left.keys() != right.keys():
        raise Violation(f"fields {left.keys()} and {right.keys()}, {when}", remedy)
    difference = first_difference([(name, leaf, right[name]) for name, leaf in left.items()], close=close)
    if difference is not None:
        raise Violation(f"{difference}, {when}", remedy)


def _value(agent: Agent, inputs: tuple[Any, Any, Any]) -> Any:
    """The agent's values, or None if it has no `value`."""
    try:
        return np.array(agent.value(*inputs))
    except ConfigError:
        return None


# ---- acting --------------------------------------------------------------------------------


def agent_info_keeps_its_shape(subject: Subject) -> None:
    """agent_info has the same fields of the same shape [B, ...] and dtype at each step, for any number of columns."""
    remedy = "report numeric arrays with one entry per column"
    many = subject.reference()
    few = act(subject.copy(columns=range(1)), subject.tape, columns=slice(0, 1))
    for found, B in ((many, subject.batch_B), (few, 1)):
        for name, leaf in found.items():
            if name.startswith("agent_info") and (leaf.ndim < 2 or leaf.shape[1] != B or leaf.dtype == object):
                raise Violation(f"{name} is {list(leaf.shape[1:])} {leaf.dtype} for {B} columns", remedy)
    kinds = [{name: (leaf.shape[2:], leaf.dtype) for name, leaf in found.items()} for found in (many, few)]
    if kinds[0] != kinds[1]:
        raise Violation(f"{kinds[0]} for {subject.batch_B} columns and {kinds[1]} for one", remedy)


def actions_have_the_spaces_shape(subject: Subject) -> None:
    """agent.step returns one action per column, in the structure, shape and kind of number of the action space."""
    found = subject.reference()
    example = NamedArrays(action=example_of(subject.agent.action_space, "action"))
    wanted = dict(example.leaves())
    given = {name: leaf for name, leaf in found.items() if name.split(".")[0] == "action"}
    if wanted.keys() != given.keys():
        raise Violation(
            f"actions of the fields {list(given)}; the space has {list(wanted)}", "return what the space has"
        )
    for name, leaf in given.items():
        shape = (subject.batch_B, *wanted[name].shape)
        if leaf.shape[1:] != shape:
            remedy = "return actions with leading dimension [B], and then the space's shape"
            raise Violation(f"{name} has shape {list(leaf.shape[1:])}; it must be {list(shape)}", remedy)
        if not np.can_cast(leaf.dtype, wanted[name].dtype, "same_kind"):
            remedy = "convert it in step: what is recorded would be cut"
            raise Violation(f"{name} is {leaf.dtype}, of another kind than the space's {wanted[name].dtype}", remedy)


def actions_lie_in_the_space(subject: Subject) -> None:
    """Every action is an element of the action space."""
    space = subject.agent.action_space
    actions, example = subject.reference(), example_of(space, "action")
    for t in range(subject.batch_T):
        row = map_leaves(lambda leaf: np.zeros((subject.batch_B, *leaf.shape), leaf.dtype), example)
        for name, target in leaves(row, "action"):
            target[...] = actions[name][t]  # as a collector records it
        for b, action in enumerate(action_splitter(space)(row)):
            if not space.contains(action):
                raise Violation(
                    f"the action at t={t}, env_rank={b} is {action}; the space is {space}", "clip it in step"
                )


def one_seed_gives_the_same_actions(subject: Subject) -> None:
    """Two copies with the same random streams do the same."""
    _same(subject.reference(), subject.reference(), "in two copies with the same random streams", _NOISE)


def inputs_are_left_alone(subject: Subject) -> None:
    """agent.step and agent.value do not write into their inputs."""
    agent = subject.copy()
    for t in range(subject.batch_T):
        for method in (agent.step, lambda *inputs: _value(agent, inputs)):
            inputs, kept = subject.tape.row(t), subject.tape.row(t)
            method(*inputs)
            names = ("observation", "prev_action", "prev_reward")
            difference = first_difference(list(zip(names, kept, inputs, strict=True)))
            if difference is not None:
                what = "step" if method == agent.step else "value"
                raise Violation(f"{difference} before and after agent.{what}, t={t}", "work on a copy of the input")


def inputs_are_not_kept(subject: Subject) -> None:
    """An agent keeps no reference to its inputs, whose memory is written again after the step."""
    agent, found = subject.copy(), []
    inputs = subject.tape.row(0)
    for t in range(subject.batch_T):
        for target, source in zip(inputs, subject.tape.row(t), strict=True):
            target[...] = source
        found.append(step(agent, *inputs))
        for _, leaf in (pair for field in inputs for pair in leaves(field, "")):
            leaf[...] = 0
        for b in np.flatnonzero(subject.tape.done[t]):
            agent.reset_one(int(b))
    remedy = "copy what is to be remembered of an input"
    _same(subject.reference(), stack(found), "with inputs of their own and in memory that is written again", remedy)


def value_gives_one_number_a_column(subject: Subject) -> None:
    """agent.value, where there is one, returns [B] floating-point numbers."""
    value = _value(subject.copy(), subject.tape.row(0))
    if value is not None and (value.shape != (subject.batch_B,) or value.dtype.kind != "f"):
        raise Violation(
            f"{list(value.shape)} {value.dtype} for B={subject.batch_B}", "return one floating-point number per column"
        )


def value_leaves_the_state_alone(subject: Subject) -> None:
    """agent.value changes nothing: the agent acts as if it had not been asked, noise included."""
    agent = subject.copy()
    found = act(agent, subject.tape, between=lambda t: _value(agent, subject.tape.row(t)))
    remedy = "compute values without touching what step remembers, and without drawing noise"
    _same(subject.reference(), found, "without and with calls of agent.value before each step", remedy)


# ---- columns -------------------------------------------------------------------------------


def column_copies_share_no_state(subject: Subject) -> None:
    """What one copy does, is shown or is reset to does not change what another does."""
    first, second = subject.copy(), subject.copy(seed=1)

    def disturb(t: int) -> None:
        second.step(*subject.other_tape.row(t))
        second.reset_one(t % subject.batch_B)
        if t == subject.batch_T // 2:
            subject.copy(seed=2).step(*subject.other_tape.row(t))

    found = act(first, subject.tape, between=disturb)
    _same(subject.reference(), found, "alone and with another copy acting in between", _STATE)


def reset_one_leaves_other_columns_alone(subject: Subject) -> None:
    """agent.reset_one(b) changes nothing for the columns other than b."""
    agent, t_reset, tape = subject.copy(), subject.batch_T // 2, subject.other_tape  # without ends, which reset too
    found = act(agent, tape, between=lambda t: agent.reset_one(1) if t == t_reset else None)
    others = np.arange(subject.batch_B) != 1
    left, right = (both.map(lambda leaf: leaf[:, others]) for both in (act(subject.copy(), tape), found))
    when = f"without and with reset_one(1) at t={t_reset} (columns: all others, in order)"
    _same(left, right, when, "touch index `column` of the state alone")


def _after(subject: Subject, tape: Tape, forget: Callable[[Agent], None]) -> NamedArrays:
    """What is done on the second half of the tape, with the first half of another, after `forget`."""
    agent, half = subject.copy(), subject.batch_T // 2
    act(agent, tape, range(half))
    forget(agent)
    return act(agent, subject.tape, range(half, subject.batch_T))


def reset_one_forgets_its_column(subject: Subject) -> None:
    """After agent.reset_one(b), what column b was shown before makes no difference to what it does."""
    left, right = (
        _after(subject, tape, lambda agent: agent.reset_one(1)) for tape in (subject.tape, subject.other_tape)
    )
    left, right = (both.map(lambda leaf: leaf[:, 1:2]) for both in (left, right))
    when = "in column 1 after two different pasts and reset_one(1) (t counted from there)"
    _same(left, right, when, "set the column's whole state back in reset_one", close=True)


def reset_forgets_every_column(subject: Subject) -> None:
    """After agent.reset(), what was shown before makes no difference."""
    left, right = (_after(subject, tape, lambda agent: agent.reset()) for tape in (subject.tape, subject.other_tape))
    _same(left, right, "after two different pasts and reset()", "set the whole state back in reset", close=True)


def columns_do_not_depend_on_their_number(subject: Subject) -> None:
    """What a column does is the same, up to rounding in agent_info, whether its worker has others or not."""
    agent = subject.copy(columns=range(2))
    few = act(agent, subject.tape, columns=slice(0, 2))
    many = subject.reference().map(lambda leaf: leaf[:, :2])
    when = f"among {subject.batch_B} columns and among 2"
    remedy = f"{_NOISE}; check with batch_invariant=False if columns are to depend on each other"
    _same(many, few, when, remedy, close=True)


def columns_may_be_stepped_a_few_at_a_time(subject: Subject) -> None:
    """After agent.select(columns), step and value are for these columns alone, which do what they do among all."""
    agent, tape, rng = subject.copy(), subject.tape, np.random.default_rng(subject.seed)
    reference = subject.reference()
    found = reference.map(np.zeros_like)
    at = np.zeros(subject.batch_B, np.intp)  # each column has a t of its own
    while (running := np.flatnonzero(at < subject.batch_T)).size:
        columns = running[rng.random(running.size) < 0.6]
        if not columns.size:
            continue
        for b in columns:
            if at[b] and tape.done[at[b] - 1, b]:
                agent.reset_one(int(b))
        agent.select(None if columns.size == subject.batch_B else columns)
        rows = at[columns]
        fields = (tape.observation, tape.prev_action, tape.prev_reward)
        inputs = tuple(map_leaves(lambda leaf: leaf[rows, columns], field) for field in fields)  # noqa: B023
        try:
            _value(agent, inputs)
            done = dict(step(agent, *inputs).leaves())
        except Exception as error:
            raise Violation(f"{type(error).__name__}: {error}, for the columns {columns.tolist()}", _SELECT) from error
        for name, leaf in done.items():
            if len(leaf) != columns.size:
                raise Violation(f"{len(leaf)} rows of {name} for the columns {columns.tolist()}", _SELECT)
            found[name][rows, columns] = leaf
        at[columns] += 1
    _same(reference, found, "all at once and a few at a time", _SELECT, close=True)


def reseeded_columns_begin_anew(subject: Subject) -> None:
    """After agent.reseed_columns(columns, rngs) and reset_one of each, they do what columns of a new copy do that has
    these streams. Nothing changes for the others."""
    half, rest = subject.batch_T // 2, range(subject.batch_T // 2, subject.batch_T)
    agent, columns = subject.copy(), np.array([1])
    act(agent, subject.tape, range(half))
    streams = ColumnStreams(subject.seed + 1, range(subject.batch_B)).rngs(Purpose.ACTION)
    agent.reseed_columns(columns, [streams[b] for b in columns])
    for b in columns:
        agent.reset_one(int(b))
    found, fresh = act(agent, subject.tape, rest), act(subject.copy(seed=1), subject.tape, rest)
    before = subject.reference()
    remedy = "take the new streams in reseed_columns, and drop what was drawn from the old ones"
    for name, wanted, chosen in (
        ("reseeded", fresh, columns),
        ("other", before.map(lambda leaf: leaf[half:]), np.delete(np.arange(subject.batch_B), columns)),
    ):
        left, right = (both.map(lambda leaf: leaf[:, chosen]) for both in (wanted, found))  # noqa: B023
        _same(left, right, f"in the {name} columns, before and after reseed_columns", remedy, close=True)


# ---- parameters ----------------------------------------------------------------------------


def _perturbed(agent: Agent) -> dict[str, Any]:
    """Parameters other than the agent's own."""
    rng = np.random.default_rng(0)
    parameters = {name: np.array(value) for name, value in agent.read_parameters().items()}
    return {
        name: (value + rng.normal(0, 0.3, value.shape)).astype(value.dtype) if value.dtype.kind == "f" else value
        for name, value in parameters.items()
    }


def _check_parameters(wanted: Mapping[str, Any], agent: Agent, when: str, remedy: str) -> None:
    found = agent.read_parameters()
    if list(found) != list(wanted):
        raise Violation(f"parameters {list(found)} instead of {list(wanted)} {when}", "keep names and order fixed")
    difference = first_difference([(name, value, found[name]) for name, value in wanted.items()])
    if difference is not None:
        raise Violation(f"parameter {difference} {when}", remedy)


def pickling_changes_nothing(subject: Subject) -> None:
    """A worker's copy travels by cloudpickle and acts as before."""
    remedy = "build what cannot be pickled in initialize or seed_columns, or leave it out in copy_for_worker"
    try:
        travelled = cloudpickle.loads(cloudpickle.dumps(subject.agent.runtime.worker_copy()))
    except Exception as error:
        raise Violation(f"{type(error).__name__}: {error}", remedy) from error
    _same(subject.reference(), subject.reference(travelled), "before and after pickling", remedy)


def parameters_survive_a_round_trip(subject: Subject) -> None:
    """write_parameters(read_parameters()) of another agent makes an agent act like that one."""
    source, target = subject.agent, subject.new(subject.seed + 1)
    wanted = {name: np.array(value) for name, value in source.read_parameters().items()}
    target.write_parameters(wanted)
    remedy = "read and write everything that actions depend on: weights, tables, running statistics"
    _check_parameters(wanted, target, "after write_parameters", remedy)
    _same(subject.reference(source), subject.reference(target), "in an agent and in one with its parameters", remedy)


def parameters_are_copied(subject: Subject) -> None:
    """write_parameters copies the arrays: they are written again afterwards."""
    agent = subject.new(subject.seed + 1)
    given = _perturbed(agent)
    wanted = copy.deepcopy(given)
    agent.write_parameters(given)
    for value in given.values():
        value[...] = 0
    _check_parameters(wanted, agent, "when the arrays given are zeroed afterwards", "keep a copy of each array")


def a_workers_copy_follows_the_learner(subject: Subject) -> None:
    """A worker's copy acts on the parameters of the last sync_shared_memory: no sooner, and like the learner."""
    learner = subject.new(subject.seed)
    old, new = {name: np.array(value) for name, value in learner.read_parameters().items()}, _perturbed(learner)
    subscriber = learner.runtime.share_memory(shared=False)
    try:
        worker = learner.runtime.worker_copy()
        worker.runtime.attach(subscriber)
        worker.runtime.pull_shared_memory()
        follower = subject.settle(worker, range(subject.batch_B))
        learner.write_parameters(new)
        follower.runtime.pull_shared_memory()
        remedy = "override copy_for_worker: give the copy parameters that the learner does not share"
        _check_parameters(old, follower, "in a worker's copy before sync_shared_memory", remedy)
        learner.sync_shared_memory()
        follower.runtime.pull_shared_memory()
        remedy = "publish everything that actions depend on in read_parameters, and take it over in write_parameters"
        _check_parameters(new, follower, "in a worker's copy after sync_shared_memory", remedy)
        when = "in the learner and in a worker's copy after sync_shared_memory"
        _same(subject.reference(learner), act(follower, subject.tape), when, remedy)
    finally:
        learner.runtime.unshare_memory(subscriber)


def acts_in_a_worker_as_here(subject: Subject) -> None:
    """In worker processes the agent does what it does in this one, up to rounding in agent_info."""
    remedy = "leave nothing in module or class variables, which another process does not have"
    here = subject.sampled(SerialSampler)
    there = subject.sampled(ParallelSampler, n_workers=2, start_method=subject.start_method)
    _same(here, there, "in this process and in two workers", remedy, close=True)


def acts_for_central_samplers_as_here(subject: Subject) -> None:
    """Where it acts for environments as they become ready, the agent does what it does elsewhere, up to rounding in
    agent_info."""
    here = subject.sampled(SerialSampler)
    there = subject.sampled(GpuSampler, n_workers=2, min_ready=1, start_method=subject.start_method)
    _same(here, there, "in this process and as a central sampler's agent", _SELECT, close=True)


#: In the order in which they are applied: what others build upon comes first.
ACTING_RULES: tuple[Callable[[Subject], None], ...] = (
    agent_info_keeps_its_shape,
    actions_have_the_spaces_shape,
    actions_lie_in_the_space,
    one_seed_gives_the_same_actions,
    inputs_are_left_alone,
    inputs_are_not_kept,
    value_gives_one_number_a_column,
    value_leaves_the_state_alone,
    column_copies_share_no_state,
    reset_one_leaves_other_columns_alone,
    reset_one_forgets_its_column,
    reset_forgets_every_column,
)
CENTRAL_RULES: tuple[Callable[[Subject], None], ...] = (
    columns_may_be_stepped_a_few_at_a_time,
    reseeded_columns_begin_anew,
)
COLUMN_RULE: Callable[[Subject], None] = columns_do_not_depend_on_their_number
PARAMETER_RULES: tuple[Callable[[Subject], None], ...] = (
    pickling_changes_nothing,
    parameters_survive_a_round_trip,
    parameters_are_copied,
    a_workers_copy_follows_the_learner,
)
