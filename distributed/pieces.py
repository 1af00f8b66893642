"""Samples as messages, and back: a piece is what one actor puts into a sample stream at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.buffers import NamedArrays, PolicySamples, Samples
from penstock.buffers.named import as_named
from penstock.buffers.samples import PER_COLUMN, AgentSamples, EnvSamples
from penstock.buffers.tree import map_tree
from penstock.collectors import TrajInfo
from penstock.errors import brief


def to_tree(value: object) -> Any:
    """An array as it is, anything else as nested dicts, which can cross a wire. `as_named` is the opposite."""
    named = as_named(value)
    return named.to_dict() if isinstance(named, NamedArrays) else named


@dataclass(frozen=True)
class Batch:
    """What a trainer gets at once: the pieces of its sample stream, side by side.

    Attributes:
        samples: torch tensors `[T, B, ...]`; B counts the environments of all pieces. Several pieces may be of the same
            actor. With a dict of agents, these are `PolicySamples`.
        infos: figures of the trajectories that have finished, by name: `infos["Return"]` `[n]`. With a dict of agents,
            those of games; `infos["speaker/Return"]` has those of the agents that a policy has played. With one agent
            for all agents of an environment, those of both.
        versions: the version of the parameters of each piece, `[number of pieces]`. A trainer that was restarted
            counts its own versions: with `max_staleness`, all pieces are from after the restart.
    """

    samples: Samples
    infos: Mapping[str, np.ndarray[Any, Any]]
    versions: np.ndarray[Any, Any]


def piece_of(
    samples: Samples | PolicySamples, infos: Sequence[TrajInfo], version: tuple[int, int], actor: str
) -> dict[str, Any]:
    """A piece as a message. Its `policy_version` is what the inference stream has reported for each action, otherwise
    `version`: lineage and number. Its `lineage` is 0 if several lineages have acted."""
    policies = {"": samples} if isinstance(samples, Samples) else dict(samples.items())
    trees = {name: to_tree(part) for name, part in policies.items()}
    seen, groups = list[Any](), dict[str, list[TrajInfo]]()
    for name, part in policies.items():
        tree = trees[name]["agent"]
        reported = tree["agent_info"].pop("stream_version", None)
        versions = np.full((*part.agent.policy_version.shape, 2), version) if reported is None else reported
        tree["policy_version"] = versions[..., 1].copy()
        seen.append(versions[versions[..., 0] != 0])  # where an environment has waited, nobody has acted
    for info in infos:
        policy = None if "" in policies else info.policy
        groups.setdefault(f"{policy}/" if policy else "", []).append(info)
    lineages, numbers = np.concatenate(seen).T
    lineage = int(lineages[0]) if len(lineages) and (lineages == lineages[0]).all() else 0
    figures: dict[str, Any] = {}
    for head, group in groups.items():
        names = [name for name, value in vars(group[0]).items() if _is_figure(name, value)]
        figures |= {f"{head}{name}": np.array([getattr(info, name) for info in group], np.float64) for name in names}
    number = int(numbers.min(initial=2**62))
    named = {"samples": trees.get("", trees), "policies": [name for name in trees if name]}
    return {**named, "infos": figures, "lineage": lineage, "version": number, "actor": actor}


def _is_figure(name: str, value: object) -> bool:
    return not name.startswith("_") and isinstance(value, int | float | np.number)


def layout_of_piece(piece: Any) -> dict[str, str]:
    """Dtype and shape of each array of a piece, by path. Pieces of one layout can be joined. Raises `ValueError` or
    something else for what is no piece."""
    if not isinstance(piece["actor"], str):
        raise ValueError("actor must be a name")
    numbers = [piece["lineage"], piece["version"]]
    if not all(isinstance(number, int) and abs(number) < 2**63 for number in numbers):
        raise ValueError(f"lineage and version must be integers, got {brief(numbers)}")
    if any(figures.ndim != 1 or figures.dtype != np.float64 for figures in piece["infos"].values()):
        raise ValueError("infos must be arrays [n] of float64")
    policies = {name: piece["samples"][name] for name in piece["policies"]} or {"": piece["samples"]}
    trees = as_named({name: {part: tree[part] for part in ("env", "agent")} for name, tree in policies.items()})
    return {path.removeprefix("."): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in trees.leaves()}


def batch_of(pieces: Sequence[Mapping[str, Any]]) -> Batch:
    """Join pieces along B."""
    policies = {}
    for policy in pieces[0]["policies"] or [""]:
        trees = [piece["samples"][policy] if policy else piece["samples"] for piece in pieces]
        env, agent = (_joined([tree[part] for tree in trees]) for part in ("env", "agent"))
        policies[policy] = Samples(env=EnvSamples(env), agent=AgentSamples(agent)).torch()
    samples: Any = policies[""] if "" in policies else PolicySamples(policies)
    names = {name for piece in pieces for name in piece["infos"]}
    infos = {
        name: np.concatenate([piece["infos"][name] for piece in pieces if name in piece["infos"]])
        for name in sorted(names)
    }
    return Batch(samples, infos, np.array([piece["version"] for piece in pieces]))


def _joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fields of all pieces, joined along B."""

    def joined(name: str) -> Any:
        axis = 0 if name in PER_COLUMN else 1
        return as_named(map_tree(lambda *leaves: np.concatenate(leaves, axis), *(part[name] for part in parts)))

    return {name: joined(name) for name in parts[0]}
