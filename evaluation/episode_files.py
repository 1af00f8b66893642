"""The folder of an evaluation: what it was, and each episode as soon as it has ended.

- `evaluation.json`: the seed, the tasks, the policies and what else decides the episodes.
- `episodes.jsonl`: a line for each episode. Of two lines about the same episode, the last counts.
- `N.npz`: the actions and rewards of the episode in line N.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from fasteners import InterProcessLock

from penstock.envs.factory import descriptions
from penstock.errors import ConfigError, brief
from penstock.evaluation.eval_results import EpisodeResult, EvalResults
from penstock.evaluation.jobs import EvaluationPlan, tasks_of
from penstock.evaluation.policies import fingerprint

_ABOUT, _LINES, _LOCK = "evaluation.json", "episodes.jsonl", "lock"
_Key = tuple[str, str, int]  # policy, task, episode
_held: set[Path] = set()  # the folders in use by this process, which its own locks do not keep out


class EpisodeFolder:
    """The folder of the evaluation that runs, in the hands of this process."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._path = path
        path.mkdir(parents=True, exist_ok=True)
        known = _read_about(path)
        if known is not None:
            _require_same(path, known, about)
            about = {**about, "policies": {**known["policies"], **about["policies"]}}
        _replace(path / _ABOUT, json.dumps(about, indent=1).encode())
        found, n_bytes, self._n_lines = _read_lines(path)
        self.results: dict[_Key, EpisodeResult] = found
        if (lines := path / _LINES).exists():
            os.truncate(lines, n_bytes)  # the last line may have been cut off by the end of its process

    def append(self, result: EpisodeResult) -> None:
        """Write an episode that has ended. Its trace is the file then."""
        row = result.as_dict()
        if (trace := result.played()) is not None:
            parts, rewards = trace
            content = io.BytesIO()
            arrays: dict[str, Any] = {"rewards": rewards, **{f"action_{i}": part for i, part in enumerate(parts)}}
            np.savez(content, **arrays)
            row["file"] = f"{self._n_lines}.npz"
            _replace(self._path / row["file"], content.getvalue())
            result.trace = self._path / row["file"]
        with open(self._path / _LINES, "ab", buffering=0) as file:
            file.write(json.dumps(row).encode() + b"\n")
        self._n_lines += 1


@contextmanager
def opened(
    folder: str | os.PathLike[str] | None, plan: EvaluationPlan, policies: Mapping[str, Any]
) -> Iterator[EpisodeFolder | None]:
    """The folder, which no other process may use meanwhile. Raises `ConfigError` if another one does, if it cannot be
    written, or if it has another evaluation."""
    if folder is None:
        yield None
        return
    path = Path(folder)
    about = {
        "seed": plan.seed,
        "success": plan.success,
        "until_success": plan.until_success,
        "max_steps": plan.max_steps,
        "environment": descriptions(plan.factories),
        "tasks": list(plan.tasks),
        "policies": {name: fingerprint(policy) for name, policy in policies.items()},
    }
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock, place = InterProcessLock(path / _LOCK), path.resolve()
        is_free = place not in _held and lock.acquire(blocking=False)
    except OSError as error:
        raise ConfigError(f"folder={os.fspath(folder)!r} cannot be written: {error}") from error
    if not is_free:
        if lock.lockfile is not None:
            lock.lockfile.close()
        raise ConfigError(f"folder={os.fspath(folder)!r} is in use by another evaluation: each needs its own")
    _held.add(place)
    try:
        yield EpisodeFolder(path, about)
    finally:
        _held.remove(place)
        lock.release()


def load_folders(
    folders: Sequence[str | os.PathLike[str]],
    env_fn: Any,
    tasks: Sequence[str] | Mapping[str, Mapping[str, Any]] | None,
    options: Callable[[str, int], Mapping[str, Any]] | None,
) -> EvalResults:
    """See `EvalResults.load`."""
    if not folders:
        raise ConfigError("load needs the folder of at least one evaluation")
    about: dict[str, Any] | None = None
    found: dict[_Key, EpisodeResult] = {}
    for folder in map(Path, folders):
        own = _read_about(folder)
        if own is None:
            raise ConfigError(f"{folder} has no {_ABOUT}: it is not a folder that evaluate has written")
        if about is not None:
            _require_same(folder, own, about)
            own["policies"] = {**about["policies"], **own["policies"]}
        about = own
        read = _read_lines(folder)[0]
        # An episode that has ended counts more than the same one that failed.
        found.update({key: result for key, result in read.items() if not (result.failed and key in found)})
    assert about is not None
    names, policies = list(about["tasks"]), list(about["policies"])
    ordered = sorted(found.values(), key=lambda r: (policies.index(r.policy), names.index(r.task), r.episode))
    results = EvalResults(ordered, policies, names)
    if env_fn is not None:
        by_task = tasks_of(tasks)
        if list(by_task) != names:
            raise ConfigError(f"tasks must be those of the evaluation, {brief(names)}, got {brief(list(by_task))}")
        results._plan = EvaluationPlan.of(
            env_fn,
            by_task,
            policies=tuple(policies),
            episodes=sorted({result.episode for result in ordered}),
            options=options,
            **{key: about[key] for key in ("seed", "success", "until_success", "max_steps")},
        )
    return results


def _read_about(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads((path / _ABOUT).read_bytes())  # type: ignore[no-any-return]
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path / _ABOUT} cannot be read: {error}") from error


def _require_same(path: Path, known: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless two evaluations play the same episodes, with the same policies of the same name."""
    for key in ("seed", "tasks", "environment", "success", "until_success", "max_steps"):
        if known[key] != about[key]:
            raise ConfigError(
                f"{path} has another evaluation. Its {key}: {brief(known[key])}; of this one: {brief(about[key])}. "
                "Give another folder"
            )
    for name in known["policies"].keys() & about["policies"].keys():
        if known["policies"][name] != about["policies"][name]:
            raise ConfigError(
                f"{path} has another policy of the name {name!r}: its class or its parameters differ "
                f"({known['policies'][name]}, here {about['policies'][name]}). Give it another name, or another folder"
            )


def _read_lines(path: Path) -> tuple[dict[_Key, EpisodeResult], int, int]:
    """The results in the folder, the bytes of all complete lines, and their number."""
    try:
        content = (path / _LINES).read_bytes()
    except FileNotFoundError:
        return {}, 0, 0
    lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
    found: dict[_Key, EpisodeResult] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            file = row.pop("file", None)
            result = EpisodeResult(**row, trace=None if file is None else path / Path(file).name)
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"line {number} of {path / _LINES} cannot be read: {error}") from error
        found[result.policy, result.task, result.episode] = result
    return found, sum(map(len, lines)), len(lines)


def _replace(path: Path, content: bytes) -> None:
    """Write a file, so that others see all of it or the one before."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    part.replace(path)
