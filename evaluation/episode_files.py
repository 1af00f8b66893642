"""The folder of an evaluation: what it was, and each episode as soon as it has ended.

- `evaluation.json`: the seed, the tasks, the policies and what else decides the episodes.
- `episodes.jsonl`: a line for each episode. Of two lines about the same episode, the last counts.
- `N.npz`: the actions and rewards of the episode in line N.
"""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from fasteners import InterProcessLock

from penstock.envs.factory import descriptions
from penstock.errors import ConfigError, brief
from penstock.evaluation.digests import digest
from penstock.evaluation.eval_results import EpisodeResult, EvalResults
from penstock.evaluation.jobs import EvaluationPlan, tasks_of

_ABOUT, _LINES, _LOCK = "evaluation.json", "episodes.jsonl", "lock"
_Key = tuple[str, str, int]  # policy, task, episode
_held: set[Path] = set()  # the folders in use by this process, which its own locks do not keep out


class ResultFolder:
    """The folder of the evaluation that runs, in the hands of this process."""

    def __init__(self, path: Path, about: Mapping[str, Any], options: Callable[[str, str, int], str | None]) -> None:
        """`options` is the digest of those of an episode."""
        self._path = path
        known = _read_about(path)
        if known is not None:
            _require_same(path, known, about)
            about = _joined(known, about)
        _replace(path / _ABOUT, json.dumps(about, indent=1).encode())
        results, n_bytes, self._n_lines = _read_lines(path)
        self._options = options
        self.results: dict[_Key, EpisodeResult] = {}
        for key, (result, used) in results.items():
            if options(*key) not in (used, None):
                raise ConfigError(
                    f"{path} has episode {key[2]} of {key[1]!r} with other options of its reset: give another folder"
                )
            self.results[key] = result
        if (lines := path / _LINES).exists():
            os.truncate(lines, n_bytes)  # the last line may have been cut off by the end of its process

    def append(self, result: EpisodeResult) -> None:
        """Write an episode that has ended. Its trace is the file then."""
        row = {**result.as_dict(), "options": self._options(result.policy, result.task, result.episode)}
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
) -> Iterator[ResultFolder | None]:
    """The folder, which no other process may use meanwhile. Raises `ConfigError` if another one does, if it cannot be
    written, or if it has another evaluation."""
    if folder is None:
        yield None
        return
    if not os.fspath(folder):
        raise ConfigError("folder must be the path of a folder, got an empty text")
    path = Path(folder).absolute()  # it stays the same folder when the program goes to another one
    about = {
        "seed": plan.seed,
        "success": plan.success,
        "success_at": plan.success_at,
        "until_success": plan.until_success,
        "max_steps": plan.max_steps,
        "mask_key": plan.mask_key,
        "tasks": list(plan.tasks),
        "environment": descriptions(plan.factories),
        "env_fn": digest([(factory.fn, dict(factory.kwargs)) for factory in plan.factories]),
        "policies": {name: f"{_name_of(policy)} {digest(policy)}" for name, policy in policies.items()},
        "wanted": {name: [[plan.episodes[0], plan.episodes[-1] + 1]] for name in policies},
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
        yield ResultFolder(path, about, partial(_options_in, plan))
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
    about: dict[str, Any] = {}
    by_key: dict[_Key, EpisodeResult] = {}
    for folder in [Path(name).absolute() for name in folders]:
        newer = _read_about(folder)
        if newer is None:
            raise ConfigError(f"{folder} has no {_ABOUT}: it is not a folder that evaluate has written")
        if about:
            _require_same(folder, newer, about)
        about = _joined(about, newer) if about else newer
        _add(by_key, folder)
    names, policies = list(about["tasks"]), list(about["policies"])
    ordered = sorted(by_key.values(), key=lambda r: (policies.index(r.policy), names.index(r.task), r.episode))
    results = EvalResults(ordered, policies, names, n_missing=len(_wanted(about) - by_key.keys()))
    if results.n_missing:
        warnings.warn(
            f"{results.n_missing} episodes have not been played yet. Those that have are the shorter ones, so do not "
            "trust the means: call evaluate with the same arguments, and it continues",
            RuntimeWarning,
            stacklevel=3,
        )
    if env_fn is not None:
        by_task = tasks_of(tasks)
        if list(by_task) != names:
            raise ConfigError(f"tasks must be {brief(names)}, as in the evaluation, got {brief(list(by_task))}")
        kept = ("seed", "success", "success_at", "until_success", "max_steps", "mask_key")
        results._plan = EvaluationPlan.of(
            env_fn,
            by_task,
            policies=tuple(policies),
            episodes=sorted({result.episode for result in ordered}),
            options=options,
            **{key: about[key] for key in kept},
        )
    return results


def _add(results: dict[_Key, EpisodeResult], folder: Path) -> None:
    """Add the results of a folder. An episode that has ended counts more than the same one that failed."""
    for key, (result, _) in _read_lines(folder)[0].items():
        known = results.get(key)
        if known is None or known.failed:
            results[key] = result
        elif not result.failed and (known.length, str(known.metrics)) != (result.length, str(result.metrics)):
            raise ConfigError(
                f"{folder} has another result of episode {key[2]} of {key[0]!r} and {key[1]!r} than an earlier folder: "
                "the policy or the environment depends on something else than its seed"
            )


def _wanted(about: Mapping[str, Any]) -> set[_Key]:
    """The episodes that the evaluations of a folder were asked for."""
    parts = [(name, start, stop) for name, ranges in about["wanted"].items() for start, stop in ranges]
    return {(name, task, k) for name, start, stop in parts for task in about["tasks"] for k in range(start, stop)}


def _joined(known: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """What a folder says after it has two evaluations."""
    wanted = {
        name: sorted({tuple(part) for content in (known, about) for part in content["wanted"].get(name, ())})
        for name in {**known["wanted"], **about["wanted"]}
    }
    return {**about, "policies": {**known["policies"], **about["policies"]}, "wanted": wanted}


def _name_of(policy: Any) -> str:
    kind = policy.func if isinstance(policy, partial) else policy
    return str(getattr(kind, "__qualname__", type(kind).__qualname__))


def _options_in(plan: EvaluationPlan, policy: str, task: str, episode: int) -> str | None:
    """The digest of an episode's options; "" without any, None for an episode that this evaluation does not have."""
    if task not in plan.tasks or episode not in plan.episodes:
        return None
    if not plan.options:
        return ""
    return digest(plan.job(plan.number(plan.policies[0], task, episode)).options)


def _read_about(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads((path / _ABOUT).read_bytes())  # type: ignore[no-any-return]
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path / _ABOUT} cannot be read: {error}") from error


def _require_same(path: Path, known: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless two evaluations play the same episodes, with the same policies of the same name."""
    keys = "seed", "tasks", "environment", "env_fn", "success", "success_at", "until_success", "max_steps", "mask_key"
    for key in keys:
        if known[key] != about[key]:
            raise ConfigError(
                f"{path} has another evaluation. Its {key}: {brief(known[key])}; of this one: {brief(about[key])}. "
                "Give another folder"
            )
    for name in known["policies"].keys() & about["policies"].keys():
        if known["policies"][name] != about["policies"][name]:
            raise ConfigError(
                f"{path} has another policy of the name {name!r}: its code, its parameters, or what else it holds, "
                f"differ ({known['policies'][name]}, here {about['policies'][name]}). Give it another name, or another "
                "folder"
            )


def _read_lines(path: Path) -> tuple[dict[_Key, tuple[EpisodeResult, str]], int, int]:
    """The results in the folder, each with the digest of its options; the bytes of all complete lines; their number."""
    try:
        content = (path / _LINES).read_bytes()
    except FileNotFoundError:
        return {}, 0, 0
    lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
    results: dict[_Key, tuple[EpisodeResult, str]] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            file, options = row.pop("file", None), row.pop("options")
            result = EpisodeResult(**row, trace=None if file is None else path / Path(file).name)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ConfigError(f"line {number} of {path / _LINES} cannot be read: {error}") from error
        results[result.policy, result.task, result.episode] = result, options
    return results, sum(map(len, lines)), len(lines)


def _replace(path: Path, content: bytes) -> None:
    """Write a file, so that others see all of it or the one before."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    part.replace(path)
