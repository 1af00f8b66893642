"""Saved runs: what a worker does to save its environments, agent and collector column by column, or to continue with
them; and what the main process does for `Sampler.state_dict` and `Sampler.load_state_dict`."""

from __future__ import annotations

import inspect
import pickle
import zlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, cast

from penstock.agents.agent import Agent
from penstock.arguments import integer
from penstock.buffers import pickling
from penstock.buffers.object_pipe import MessageKind, ObjectMessage
from penstock.buffers.reports import dump_exception, in_one_line
from penstock.collectors.collector import Collector, restart_agent
from penstock.collectors.evaluation import EvalCollector
from penstock.columns.builder import EnvBuilder
from penstock.columns.interface import Start
from penstock.envs.factory import EnvContext, EnvFactory, descriptions, env_factories
from penstock.envs.seeding import ColumnStreams, Purpose
from penstock.envs.state import StateKind, check_resumable, is_same, save_env
from penstock.errors import ConfigError, RepeatError, SamplerBrokenError, SamplerStateError, brief
from penstock.samplers.metrics import COUNTS
from penstock.samplers.refusals import STATES
from penstock.samplers.sampler_plan import SamplerPlan
from penstock.samplers.seating import Chooser, column_streams
from penstock.workers.control import Phase

if TYPE_CHECKING:
    from penstock.samplers.run import Run

#: How an environment continues: "get_state", "pickle" and "repeat" are exact.
RESEEDED = "reseeded"
ROW = "row"  #: it is exact too: a row of a batched environment that is saved in the column of its first row
KINDS = "get_state", "pickle", "repeat", ROW, RESEEDED


class SavedColumn(TypedDict):
    """One column of a saved run, as text and bytes."""

    kind: str  #: "get_state", "pickle", "repeat", "row" or "reseeded"
    why: str  #: why it is reseeded; empty otherwise
    #: Everything that the column needs to continue, pickled; None if it is reseeded. Not `b""`: torch.save writes empty
    #: bytes as a call, which torch.load refuses.
    data: bytes | None


@dataclass
class WorkerParts:
    """The parts of a worker's program that these messages use."""

    plan: SamplerPlan
    seed: int
    factories: Sequence[EnvFactory]
    builder: EnvBuilder
    collector: Collector
    eval_collector: EvalCollector | None
    #: What the checks of the environments have found so far: pairs of a factory, and why its environments cannot be
    #: saved (empty: they can).
    proofs: list[tuple[EnvFactory, str]]

    def context(self, column: int) -> EnvContext:
        """What the environment of this column was built for."""
        streams = self.collector.streams
        return EnvContext(
            streams.env_ranks[column], self.plan.worker_rank, streams.env_seeds(Purpose.TRAIN)[column], Purpose.TRAIN
        )


class StateMessage(ABC):
    """A message to all workers. Each answers with one result."""

    def perform(self, parts: WorkerParts) -> list[ObjectMessage]:
        """Call `answer`. If it raises, the exception is the result, and the worker continues."""
        parts.collector.progress.enter(Phase.CALLING)
        try:
            outcome = {"result": self.answer(parts)}
        except Exception as error:  # the user's code may raise anything
            outcome = {"error": dump_exception(error)}
        return [ObjectMessage(MessageKind.CALL_RESULT, 0, parts.plan.env_ranks[0], outcome)]

    @abstractmethod
    def answer(self, parts: WorkerParts) -> Any:
        """What the worker answers."""


@dataclass(frozen=True)
class ChooseMessage(StateMessage):
    """From the next game on, `chooser` says who plays which seat."""

    chooser: Chooser

    def answer(self, parts: WorkerParts) -> Any:
        """Nothing."""
        for collector in (parts.collector, parts.eval_collector):
            if collector is not None:
                collector.columns.chooser = self.chooser  # type: ignore[attr-defined]


@dataclass(frozen=True)
class PlanMessage(StateMessage):
    """From the next reset on, follow the newest episode plan."""

    def answer(self, parts: WorkerParts) -> Any:
        """Nothing."""
        assert parts.collector.columns.log_writer is not None
        parts.collector.columns.log_writer.read_plan()


# ---- saving ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SaveMessage(StateMessage):
    """Save every column: returns a `SavedColumn` by env_rank, and `{env_rank: (evaluations, generation)}` of the
    evaluation environments."""

    saves_envs: bool
    untrusted: str  #: why all columns are reseeded: see `_class_without_column_state`; empty if they need not be

    def answer(self, parts: WorkerParts) -> Any:
        """The columns by env_rank, and the counts of the evaluation environments."""
        env_ranks = parts.plan.env_ranks
        columns = {env_rank: self._save(parts, column) for column, env_rank in enumerate(env_ranks)}
        if not parts.collector.columns.can_step_one:  # rows of one environment continue together, or not at all
            lost = [column for column in columns.values() if column["kind"] == RESEEDED]
            columns = {rank: SavedColumn(**lost[0]) if lost else column for rank, column in columns.items()}
        evaluator = parts.eval_collector
        counts = (0, 0) if evaluator is None else (evaluator._n_evaluations, evaluator.streams.generation)
        return columns, dict.fromkeys(parts.plan.eval_env_ranks, counts)

    def _save(self, parts: WorkerParts, column: int) -> SavedColumn:
        if self.untrusted or not self.saves_envs:
            return SavedColumn(kind=RESEEDED, why=self.untrusted or 'env_state="never"', data=None)
        collector = parts.collector
        assert isinstance(collector, Collector)
        columns = collector.columns
        episodes = None if collector._log_writer is None else collector._log_writer.column_state(column)
        kind, env, why = ROW, b"", _why_not_resumable(parts, column)
        is_row = column > 0 and not columns.can_step_one  # the first row has the whole environment
        if not why and not is_row:
            try:
                kind, env = save_env(columns.envs[column])
            except ConfigError as error:
                why = str(error)
        if why:
            if episodes is None or episodes["n_missing"]:
                return SavedColumn(kind=RESEEDED, why=why, data=None)
            kind = "repeat"
        values = {
            "env": env,
            "columns": None if is_row else columns.save(column),
            "episodes": episodes,
            "collector": collector.column_state(column),
            "agents": collector.agent_states(column),
        }
        try:
            data = pickling.dumps(values)
            pickle.loads(data)
        except Exception as error:  # for example an attribute of a TrajInfo subclass
            return SavedColumn(kind=RESEEDED, why=f"its state cannot be pickled: {in_one_line(error)}", data=None)
        return SavedColumn(kind=kind, why="", data=data)


def _why_not_resumable(parts: WorkerParts, column: int) -> str:
    """Why the environment of this column cannot be saved; empty if a check has shown that it can. Columns with the same
    factory share one check."""
    factory = parts.factories[column]
    for other, why in parts.proofs:
        if other.fn is factory.fn and other.kwargs is factory.kwargs:
            return why
    progress, columns, why = parts.collector.progress, parts.collector.columns, ""
    build: Any = factory
    try:
        if not columns.can_step_one:
            save_env(columns.envs[0])  # where this fails, no second one is built
            build = partial(factory.batched, len(columns.env_ranks))
        check_resumable(build, parts.context(column), on_step=lambda: progress.enter(Phase.CALLING))
    except ConfigError as error:
        why = str(error)
    except Exception as error:  # the user's environment may raise anything
        why = f"the check of its state raised {in_one_line(error)}"
    parts.proofs.append((factory, why))
    return why


def _class_without_column_state(*classes: type) -> str:
    """Why one of these agents and collectors may have a state that its `column_state` does not save; empty if none
    has."""
    for start in classes:
        for cls in start.__mro__:
            if cls.__module__.split(".")[0] == "penstock" or "column_state" in vars(cls):
                break
            if any(inspect.isroutine(value) and not name.startswith("__") for name, value in vars(cls).items()):
                return f"{cls.__name__} does not define column_state and load_column_state"
    return ""


def _with_inner_agents(agents: Iterable[Agent]) -> list[Agent]:
    """These agents, and those that they wrap or have as attributes, whose states `Agent.column_state` saves too."""
    all_agents = list(agents)
    for agent in all_agents:  # it grows meanwhile
        all_agents += [
            part for part in vars(agent).values() if isinstance(part, Agent) and all(part is not a for a in all_agents)
        ]
    return all_agents


# ---- loading -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadMessage(StateMessage):
    """Continue saved columns; the others start again. Returns `{env_rank: why}` for those that start again."""

    columns: Mapping[int, SavedColumn]  #: by env_rank
    evaluations: tuple[int, int]  #: how many there have been, and the generation of their streams
    generation: int  #: of the streams of columns that start again

    def answer(self, parts: WorkerParts) -> Any:
        """By env_rank, why the column starts again."""
        collector, refused = parts.collector, dict[int, str]()
        parts.builder.seed_generators(self.generation)  # not the numbers of the saved run again
        streams = ColumnStreams(parts.seed, parts.plan.env_ranks, self.generation)
        for column, env_rank in enumerate(streams.env_ranks):
            saved = self.columns[env_rank]
            why = saved["why"] if saved["kind"] == RESEEDED else _load(parts, column, saved)
            if why:
                refused[env_rank] = why
        if refused:
            collector.restart_envs([rank - streams.env_ranks[0] for rank in refused], streams)
        if parts.eval_collector is not None:
            evaluator = parts.eval_collector
            evaluator._n_evaluations, generation = self.evaluations
            evaluator.streams = replace(evaluator.streams, generation=generation)
        return refused


def _load(parts: WorkerParts, column: int, saved: SavedColumn) -> str:
    """Continue this column. Returns why that is impossible if a repeated episode differs; otherwise an empty text."""
    assert saved["data"] is not None
    collector, state = parts.collector, pickle.loads(saved["data"])
    assert isinstance(collector, Collector)
    columns, episodes = collector.columns, state["episodes"]
    if saved["kind"] == "repeat":
        start = Start(episodes["seed"], episodes["options"], (episodes["actions"], episodes["rewards"]))
    else:
        start = Start(state=(cast(StateKind, saved["kind"]), state["env"], state["columns"]))
    try:
        if saved["kind"] != ROW:
            columns.reset([column], [start])
    except RepeatError as error:
        return str(error)
    if saved["kind"] == "repeat" and not is_same(last := columns.save(column), state["columns"]):
        return f"its last observation differs after its episode was repeated: {brief(last)}"
    collector.load_column_state(column, state["collector"])
    collector.load_agent_states(column, state["agents"])
    if collector._log_writer is not None and episodes is not None:
        collector._log_writer.load_column_state(column, episodes)
    return ""


# ---- the main process ---------------------------------------------------------------------------

_FORMAT = 7
_LARGEST_COUNT = 2**63
_MOST_LISTED = 5
#: What to do if the saved run had something else.
_REMEDIES = {
    "env_ranks": "use as many environments as the saved run, with the same env_ranks",
    "environments": "use the env_fn and the env_kwargs of the saved run",
    "batched": "give batched as in the saved run",
    "spaces": "use the environments of the saved run",
    "policies": "let policy_of return the same policies for the same agents",
    "classes": "use an agent, a collector and a TrajInfo of the same classes",
    "seed_episodes": "give seed_episodes as in the saved run",
}


@dataclass(frozen=True)
class ResumeReport:
    """How the environments continue after `load_state_dict`, by env_rank."""

    exact: tuple[int, ...]  #: the environments that continue bit by bit
    #: The environments that began new episodes with new seeds, and the reason for each. Their running episodes are
    #: lost.
    reseeded: Mapping[int, str]

    def __str__(self) -> str:
        text = f"{len(self.exact)} environments continue exactly, {len(self.reseeded)} began new episodes"
        return text + (f": {_reasons(self.reseeded)}" if self.reseeded else "")


def save_run(run: Run, env_state: str) -> dict[str, Any]:
    """See `Sampler.state_dict`."""
    run.require(STATES)
    server = run.acting.server
    untrusted = _class_without_column_state(
        run.config.collector_cls, *map(type, _with_inner_agents(run.agents.values()))
    )
    answers = run.send(SaveMessage(env_state != "never", untrusted), "state_dict")
    columns = {rank: column for of_worker, _ in answers for rank, column in of_worker.items()}
    reseeded = {rank: column["why"] for rank, column in columns.items() if column["kind"] == RESEEDED}
    if env_state == "require" and reseeded:
        raise ConfigError(f'state_dict(env_state="require"): {_reasons(reseeded)}')
    if server is not None:
        for cells, column in zip(_server_cells(run), columns.values(), strict=True):
            column["server"] = pickle.dumps([server.agent.column_state(b) for b in cells])
    control = run.memory.control
    return {
        "format": _FORMAT,
        **described(run),
        "batches": run.batch,
        "episodes": dict(run.n_over),
        "policy_versions": [parameters.version for parameters in run.memory.parameters],
        "counts": run.metrics.counts(run.stats()),
        "generation": max(control.generation(plan.worker_rank) for plan in run.plans),
        "columns": columns,
        "plans": None if run.log_reader is None else run.log_reader.save_plans(),
        "checksum": checksum(columns),
        "evaluations": {rank: list(counts) for _, of_worker in answers for rank, counts in of_worker.items()},
    }


def continue_run(run: Run, state: Mapping[str, Any], sampler: str) -> ResumeReport:
    """See `Sampler.load_state_dict`. `sampler` is the name of the class."""
    run.require(STATES)
    if run.batches.held:
        raise SamplerStateError("load_state_dict must be called after initialize, before the first batch")
    server, control = run.acting.server, run.memory.control
    _check_state(state, described(run), sampler)
    if run.config.batched:
        _check_rows(state["columns"], [plan.env_ranks[0] for plan in run.plans])
    counts = {tuple(pair) for pair in state["evaluations"].values()}
    generation = state["generation"] + 1
    # A worker that is replaced from now on gets streams that were never used.
    control.raise_generation(generation)
    try:
        if server is not None:
            server.resume(generation)
        # Where workers were replaced, the evaluations differ from column to column: begin new streams.
        evaluations = counts.pop() if len(counts) == 1 else (0, generation)
        if run.log_reader is not None and state["plans"] is not None:
            run.log_reader.load_plans(state["plans"])
            run.send(PlanMessage(), "load_state_dict")
        message = LoadMessage(state["columns"], evaluations, generation)
        refused = {rank: why for of_worker in run.send(message, "load_state_dict") for rank, why in of_worker.items()}
        if server is not None:
            streams = _server_streams(run, generation)
            _load_server_agent(server.agent, _server_cells(run), state["columns"], refused, streams)
    except SamplerBrokenError:
        raise
    except Exception as error:  # what the state contains may raise anything
        run.pool.close(broken=True)
        raise SamplerBrokenError(
            f"load_state_dict failed, so that some environments would continue the saved run and others not: "
            f"{in_one_line(error)}. The state is damaged, or belongs to another version of the environment: "
            "make a new sampler, and load another state"
        ) from error
    run.batch, run.n_over = state["batches"], defaultdict(int, state["episodes"])
    run.metrics.start_at(state["counts"])
    versions = state["policy_versions"]
    for parameters, version, agent in zip(run.memory.parameters, versions, run.agents.values(), strict=True):
        parameters.continue_at(version, agent.read_parameters())
    return ResumeReport(tuple(rank for rank in state["columns"] if rank not in refused), refused)


def _server_cells(run: Run) -> list[range]:
    """The columns of the inference server's agent in each environment."""
    return [run.seating.train.cells(0, range(b, b + 1)) for b in range(run.config.batch_B)]


def _server_streams(run: Run, generation: int) -> ColumnStreams:
    """The streams of the inference server's agent."""
    first, batch_B = run.plans[0].env_ranks[0], run.config.batch_B
    everyone: dict[str, Any] = {"columns": range(batch_B), "env_ranks": range(first, first + batch_B)}
    return column_streams(run.seating, replace(run.plans[0], **everyone, generation=generation), run.seed)


def described(run: Run) -> dict[str, Any]:
    """What a run must have in common with the run that continues it."""
    config, agent = run.config, run.agent
    return {
        "seed": run.seed,
        "env_ranks": [rank for plan in run.plans for rank in plan.env_ranks],
        "environments": descriptions(env_factories(config.env_fn, config.env_kwargs, config.batch_B)),
        "batched": config.batched,
        "spaces": [str(agent.observation_space), str(agent.action_space)],
        "agents": [list(agents) for agents in run.seating.train.agents] if run.seating.has_games else None,
        "policies": [list(run.agents), *(map(list, run.seating.train.policy) if run.seating.has_games else ())],
        "classes": [
            cls.__qualname__ for cls in (*map(type, run.agents.values()), config.collector_cls, config.traj_info_cls)
        ],
        "central": run.acting.is_central,
        "seed_episodes": config.seed_episodes,
    }


def _check_state(state: Mapping[str, Any], described: Mapping[str, Any], sampler: str) -> None:
    """Raise `ConfigError` if `state` is damaged, or that of another run than `described`. `sampler` is the name of the
    class."""
    if not isinstance(state, Mapping) or _differs(state.get("format"), _FORMAT):
        raise ConfigError(f"load_state_dict needs what state_dict has returned, of format {_FORMAT}")
    parts = ("batches", "episodes", "policy_versions", "generation", "counts", "columns", "evaluations", "checksum")
    missing = [name for name in (*described, *parts, "plans") if name not in state]
    _require(not missing, f"it has no {', '.join(missing)}")
    for name in ("batches", "generation"):
        integer(f"{name} of the state", state[name], 0)
    _require(isinstance(state["policy_versions"], list | tuple), "its policy_versions must be a list")
    for version in state["policy_versions"]:
        integer("policy_versions of the state", version, 0)
    for name, value in described.items():
        if name == "central" and state[name] is (not value):
            saved = "GpuSampler or AlternatingSampler" if state[name] else "SerialSampler or ParallelSampler"
            raise ConfigError(f"the state is that of a {saved}, this is a {sampler}: use a {saved}")
        if _differs(state[name], value):
            hint = _REMEDIES.get(name, "load what state_dict has returned")
            if name == "seed" and isinstance(state[name], int):
                hint = f"initialize(agent, seed={state[name]})"
            raise ConfigError(f"the state has {name}={brief(state[name])}, this sampler has {brief(value)}: {hint}")
    _check_columns(state)


def _differs(saved: object, current: object) -> bool:
    """Whether a part of a state is not equal to that of this sampler. No array or tensor with dimensions is."""
    parts = saved if isinstance(saved, list | tuple) else [saved]
    return any(getattr(part, "shape", ()) != () for part in parts) or bool(saved != current)


def checksum(columns: Mapping[int, Any]) -> int:
    """The checksum of the bytes of all columns."""
    value = 0
    for rank in sorted(columns):
        for part in ("data", "server"):
            value = zlib.crc32(columns[rank].get(part) or b"", value)
    return value


def _check_columns(state: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if one of the state's parts is damaged."""
    counts, columns, evaluations = (state[name] for name in ("counts", "columns", "evaluations"))
    are_dicts = all(isinstance(part, Mapping) for part in (counts, columns, evaluations, state["episodes"]))
    are_kinds = are_dicts and isinstance(state["plans"], bytes | None)
    _require(are_kinds, "its counts, columns, evaluations and episodes must be dicts, and its plans bytes")
    for name in COUNTS:
        is_count = isinstance(counts.get(name), int | float) and 0 <= counts[name] <= _LARGEST_COUNT
        _require(is_count, f"its counts have no number {name} of at least 0, but {brief(counts.get(name))}")
    for pair in evaluations.values():
        is_pair = isinstance(pair, list | tuple) and [type(n) for n in pair] == [int, int] and min(pair) >= 0
        _require(is_pair, "its evaluations must be pairs of integers")
    for rank in state["env_ranks"]:
        column = columns.get(rank)
        is_whole = isinstance(column, Mapping) and {"kind", "why", "data"} <= set(column)
        _require(is_whole and str(column["kind"]) in KINDS, f"it has no column {rank}")
        _require(column["kind"] == RESEEDED or isinstance(column["data"], bytes), f"its column {rank} has no data")
        has_server = not state["central"] or isinstance(column.get("server"), bytes)
        _require(has_server, f"its column {rank} has no state of the inference server")
    is_same = not _differs(state["checksum"], checksum({rank: columns[rank] for rank in state["env_ranks"]}))
    _require(is_same, "the checksum of its columns differs. Load another one")


def _require(fits: bool, damage: str) -> None:
    if not fits:
        raise ConfigError(f"this state is damaged: {damage}")


def _check_rows(columns: Mapping[int, Any], first_rows: list[int]) -> None:
    """Raise `ConfigError` unless each saved batched environment is that of one worker."""
    kinds = {rank: column["kind"] for rank, column in columns.items() if column["kind"] != RESEEDED}
    if any((kind == ROW) is (rank in first_rows) for rank, kind in kinds.items()):
        saved = [rank for rank, kind in kinds.items() if kind != ROW]
        raise ConfigError(
            f"the batched environments of the saved run begin at env_rank {brief(saved)}, those of this sampler at "
            f"{brief(first_rows)}, and their rows cannot be divided: use n_workers and rows_per_env as in the saved run"
        )


def _load_server_agent(
    agent: Agent, cells: Sequence[range], columns: Mapping[int, Any], refused: Mapping[int, str], streams: ColumnStreams
) -> None:
    """Continue the columns of the inference server's agent; those in `refused` start again, with `streams`. `cells` are
    the columns of each environment."""
    agent.select(None)
    lost = [b for env_cells, rank in zip(cells, columns, strict=True) if rank in refused for b in env_cells]
    if lost:
        restart_agent(agent, lost, streams)
    for env_cells, (rank, saved) in zip(cells, columns.items(), strict=True):
        if rank not in refused:
            for b, state in zip(env_cells, pickle.loads(saved["server"]), strict=True):
                agent.load_column_state(b, state)


def _reasons(reseeded: Mapping[int, str]) -> str:
    """Why these environments do not continue exactly. Each reason is named once."""
    ranks: dict[str, list[int]] = {}
    for rank, why in reseeded.items():
        ranks.setdefault(why, []).append(rank)
    parts = [f"env_rank {', '.join(map(str, same))}: {why}" for why, same in list(ranks.items())[:_MOST_LISTED]]
    return "; ".join(parts + ["..."] * (len(ranks) > _MOST_LISTED))
