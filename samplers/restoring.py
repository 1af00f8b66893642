"""Checks of the state that `Sampler.load_state_dict` gets, and its report."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.agents import Agent
from penstock.arguments import integer
from penstock.envs.seeding import ColumnStreams
from penstock.errors import ConfigError, brief
from penstock.samplers.column_states import KINDS, RESEEDED, restart_agent
from penstock.samplers.metrics import COUNTS

FORMAT = 4
_LARGEST_COUNT = 2**63
_MOST_LISTED = 5
#: What to do if the saved run had something else.
_REMEDIES = {
    "env_ranks": "use as many environments as the saved run, with the same env_ranks",
    "environments": "use the env_fn and the env_kwargs of the saved run",
    "spaces": "use the environments of the saved run",
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
        return text + (f": {reasons(self.reseeded)}" if self.reseeded else "")


def check_state(state: Mapping[str, Any], described: Mapping[str, Any], sampler: str) -> None:
    """Raise `ConfigError` if `state` is damaged, or that of another run than `described`. `sampler` is the name of the
    class."""
    if not isinstance(state, Mapping) or _differs(state.get("format"), FORMAT):
        raise ConfigError(f"load_state_dict needs what state_dict has returned, of format {FORMAT}")
    parts = ("batches", "episodes", "policy_version", "generation", "counts", "columns", "evaluations", "checksum")
    missing = [name for name in (*described, *parts) if name not in state]
    if missing:
        raise ConfigError(f"this state is damaged: it has no {', '.join(missing)}")
    for name in ("batches", "policy_version", "generation"):
        integer(f"{name} of the state", state[name], 0)
    for name, own in described.items():
        if name == "central" and state[name] is (not own):
            saved = "GpuSampler or AlternatingSampler" if state[name] else "SerialSampler or ParallelSampler"
            raise ConfigError(f"the state is that of a {saved}, this is a {sampler}: use a {saved}")
        if _differs(state[name], own):
            hint = _REMEDIES.get(name, "load what state_dict has returned")
            if name == "seed" and isinstance(state[name], int):
                hint = f"initialize(agent, seed={state[name]})"
            raise ConfigError(f"the state has {name}={brief(state[name])}, this sampler has {brief(own)}: {hint}")
    _check_columns(state)


def _differs(saved: object, own: object) -> bool:
    """Whether a part of a state is not equal to that of this sampler. No array or tensor with dimensions is."""
    parts = saved if isinstance(saved, list | tuple) else [saved]
    return any(getattr(part, "shape", ()) != () for part in parts) or bool(saved != own)


def checksum(columns: Mapping[int, Any]) -> int:
    """The checksum of the bytes of all columns."""
    found = 0
    for rank in sorted(columns):
        for part in ("data", "server"):
            found = zlib.crc32(columns[rank].get(part) or b"", found)
    return found


def _check_columns(state: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if one of the state's parts is damaged."""
    counts, columns, evaluations = (state[name] for name in ("counts", "columns", "evaluations"))
    if not all(isinstance(part, Mapping) for part in (counts, columns, evaluations, state["episodes"])):
        raise ConfigError("this state is damaged: its counts, columns, evaluations and episodes must be dicts")
    for name in COUNTS:
        if not (isinstance(counts.get(name), int | float) and 0 <= counts[name] <= _LARGEST_COUNT):
            raise ConfigError(
                f"this state is damaged: its counts have no number {name} of at least 0, but {brief(counts.get(name))}"
            )
    pairs = evaluations.values()
    if not all(
        isinstance(pair, list | tuple) and [type(n) for n in pair] == [int, int] and min(pair) >= 0 for pair in pairs
    ):
        raise ConfigError("this state is damaged: its evaluations must be pairs of integers")
    for rank in state["env_ranks"]:
        column = columns.get(rank)
        is_whole = isinstance(column, Mapping) and {"kind", "why", "data"} <= set(column)
        if not is_whole or str(column["kind"]) not in KINDS:
            raise ConfigError(f"this state is damaged: it has no column {rank}")
        if column["kind"] != RESEEDED and not isinstance(column["data"], bytes):
            raise ConfigError(f"this state is damaged: its column {rank} has no data")
        if state["central"] and not isinstance(column.get("server"), bytes):
            raise ConfigError(f"this state is damaged: its column {rank} has no state of the inference server")
    if _differs(state["checksum"], checksum({rank: columns[rank] for rank in state["env_ranks"]})):
        raise ConfigError("this state is damaged: the checksum of its columns differs. Load another one")


def load_server_agent(
    agent: Agent, columns: Mapping[int, Any], refused: Mapping[int, str], seed: int, generation: int
) -> None:
    """Continue the columns of the inference server's agent; those in `refused` start again."""
    agent.select(None)
    exact = {b: columns[rank]["server"] for b, rank in enumerate(columns) if rank not in refused}
    if refused:
        streams = ColumnStreams(seed, range(min(columns), max(columns) + 1), generation)
        restart_agent(agent, [b for b in range(len(columns)) if b not in exact], streams)
    for b, saved in exact.items():
        agent.load_column_state(b, pickle.loads(saved))


def reasons(reseeded: Mapping[int, str]) -> str:
    """Why these environments do not continue exactly. Each reason is named once."""
    ranks: dict[str, list[int]] = {}
    for rank, why in reseeded.items():
        ranks.setdefault(why, []).append(rank)
    parts = [f"env_rank {', '.join(map(str, own))}: {why}" for why, own in list(ranks.items())[:_MOST_LISTED]]
    return "; ".join(parts + ["..."] * (len(ranks) > _MOST_LISTED))
