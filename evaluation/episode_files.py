"""The folder of an evaluation: what it was, and each episode as soon as it has ended.

- `evaluation.json`: the seed, the tasks, the policies and what else decides the episodes.
- `episodes.jsonl`: a line for each episode. Of two lines about the same episode, the last counts.
- `N.npz`: the actions and rewards of the episode in line N, and marks of its observations.
"""

from __future__ import annotations

import io
import json
import math
import os
import platform
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
from penstock.evaluation.jobs import EvaluationPlan, seed_of, tasks_of

_ABOUT, _LINES, _LOCK = "evaluation.json", "episodes.jsonl", "lock"
_FORMAT = 2  # of the files; a folder of another format is refused
_OF_EPISODES = ("seed", "success", "success_at", "until_success", "max_steps", "mask_key")  # what a plan has too
_Key = tuple[str, str, int]  # policy, task, episode
_held: set[Path] = set()  # the folders in use by this process, which its own locks do not keep out


class ResultFolder:
    """The folder of the evaluation that runs, in the hands of this process."""

    def __init__(self, path: Path, plan: EvaluationPlan, policies: Mapping[str, Any], *, trusted: bool) -> None:
        self._path, self._options = path, partial(_options_in, plan)
        about: Mapping[str, Any] = {
            "format": _FORMAT,
            "python": platform.python_version(),
            **{key: getattr(plan, key) for key in _OF_EPISODES},
            "tasks": list(plan.tasks),
            "environment": descriptions(plan.factories),
            "env_fn": digest([(factory.fn, factory.kwargs) for factory in plan.factories]),
            "policies": {name: f"{_name_of(policy)} {digest(policy)}" for name, policy in policies.items()},
            "wanted": {name: [[plan.episodes[0], plan.episodes[-1] + 1]] for name in policies},
            "unproven": [],
        }
        if (known := _read_about(path)) is not None:
            _require_same(path, known, about, with_code=not trusted)
            about = _joined(known, about)
        elif (path / _LINES).exists():
            raise ConfigError(f"{path} has {_LINES}, but no {_ABOUT}, so its policies are unknown: give another folder")
        results, n_bytes, self._n_lines = _read_lines(path, about)
        self.results: dict[_Key, EpisodeResult] = {}
        for key, (result, used) in results.items():
            if self._options(*key) not in (used, None):
                raise ConfigError(
                    f"{path} has episode {key[2]} of {key[1]!r} with other options of its reset: give another folder"
                )
            self.results[key] = result
        self._about = about
        self._write_about()
        if (lines := path / _LINES).exists():
            os.truncate(lines, n_bytes)  # the last line may have been cut off by the end of its process

    def append(self, result: EpisodeResult) -> None:
        """Write an episode that has ended. Its trace is the file then."""
        row = {**result.as_dict(), "options": self._options(result.policy, result.task, result.episode)}
        row["metrics"] = {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no NaN
            for key, value in result.metrics.items()
        }
        if (trace := result.played()) is not None:
            content = io.BytesIO()
            parts: dict[str, Any] = {f"action_{i}": part for i, part in enumerate(trace.actions)}
            np.savez(content, rewards=trace.rewards, checks=trace.checks, sums=trace.sums, **parts)
            row["file"] = f"{self._n_lines}.npz"
            _replace(self._path / row["file"], content.getvalue())
            result.trace = self._path / row["file"]
        line = memoryview(json.dumps(row, allow_nan=False).encode() + b"\n")
        with open(self._path / _LINES, "ab", buffering=0) as file:
            start = file.tell()
            try:
                while line:  # a disk that is nearly full takes a part of it
                    line = line[file.write(line) :]
            except BaseException:
                file.truncate(start)
                raise
        self._n_lines += 1

    def is_unproven(self, policy: str, task: str) -> bool:
        """Whether an episode of this policy and task was once different when it was played again."""
        return [policy, task] in self._about["unproven"]

    def note_unproven(self, policy: str, task: str) -> None:
        """Note that it was."""
        if not self.is_unproven(policy, task):
            self._about["unproven"].append([policy, task])
            self._write_about()

    def _write_about(self) -> None:
        _replace(self._path / _ABOUT, json.dumps(self._about, indent=1).encode())


@contextmanager
def opened(
    folder: str | os.PathLike[str] | None, plan: EvaluationPlan, policies: Mapping[str, Any], *, trusted: bool
) -> Iterator[ResultFolder | None]:
    """The folder, which no other process may use meanwhile. Raises `ConfigError` if another one does, if it cannot be
    written, or if it has another evaluation. The code of a `trusted` one is not compared."""
    if folder is None:
        yield None
        return
    if not os.fspath(folder):
        raise ConfigError("folder must be the path of a folder, got an empty text")
    path = Path(folder).absolute()  # it stays the same folder when the program goes to another one
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
        yield ResultFolder(path, plan, policies, trusted=trusted)
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
        _add(by_key, folder, newer)
        about = _joined(about, newer) if about else newer
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
    if about["unproven"]:
        warnings.warn(
            f"episodes of these policies and tasks were different when they were played again: "
            f"{brief(about['unproven'])}. Other runs give other results",
            RuntimeWarning,
            stacklevel=3,
        )
    if env_fn is not None:
        by_task = tasks_of(tasks)
        if list(by_task) != names:
            raise ConfigError(f"tasks must be {brief(names)}, as in the evaluation, got {brief(list(by_task))}")
        results._plan = EvaluationPlan.of(
            env_fn,
            by_task,
            policies=tuple(policies),
            episodes=sorted({result.episode for result in ordered}),
            options=options,
            **{key: about[key] for key in _OF_EPISODES},
        )
    return results


def _add(results: dict[_Key, EpisodeResult], folder: Path, about: Mapping[str, Any]) -> None:
    """Add the results of a folder. An episode that has ended counts more than the same one that failed."""
    for key, (result, _) in _read_lines(folder, about)[0].items():
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
    unproven = known["unproven"] + [pair for pair in about["unproven"] if pair not in known["unproven"]]
    policies = {**known["policies"], **about["policies"]}
    return {**about, "policies": policies, "wanted": wanted, "unproven": unproven}


def _name_of(policy: Any) -> str:
    kind = policy.func if isinstance(policy, partial) else policy
    return str(getattr(kind, "__qualname__", type(kind).__qualname__))


def _options_in(plan: EvaluationPlan, policy: str, task: str, episode: int) -> str | None:
    """The digest of an episode's options; "" without any, None for an episode that this evaluation does not have."""
    if task not in plan.tasks or episode not in plan.episodes:
        return None
    if not plan.options:
        return ""
    return digest(partial(dict, plan.job(plan.number(plan.policies[0], task, episode)).options))  # numbers count


_KINDS: dict[str, Any] = {
    "seed": int,
    "tasks": list,
    "environment": list,
    "env_fn": str,
    "policies": dict,
    "wanted": dict,
    "unproven": list,
    "python": str,
    "success_at": str,
    "until_success": bool,
    **dict.fromkeys(("success", "max_steps", "mask_key"), (str, int, type(None))),
}


def _read_about(path: Path) -> dict[str, Any] | None:
    """What the folder says of itself; None if it says nothing."""
    try:
        about = json.loads((path / _ABOUT).read_bytes())
        if about["format"] == _FORMAT:
            for key, kind in _KINDS.items():
                if not isinstance(about[key], kind):
                    raise ValueError(f"its {key} is {brief(about[key])}")
            _wanted(about)
            return about  # type: ignore[no-any-return]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path / _ABOUT} cannot be read: {type(error).__name__}: {error}") from error
    raise ConfigError(
        f"{path} was written by another version of penstock: its format is {brief(about['format'])}, and this one has "
        f"{_FORMAT}. Give another folder"
    )


def _require_same(path: Path, known: Mapping[str, Any], about: Mapping[str, Any], *, with_code: bool = True) -> None:
    """Raise `ConfigError` unless two evaluations play the same episodes, with the same policies of the same name. Code
    of another version of Python is not comparable."""
    with_code = with_code and known["python"] == about["python"]
    for key in ("tasks", "environment", *_OF_EPISODES, *["env_fn"] * with_code):
        if known[key] != about[key]:
            raise ConfigError(
                f"{path} has another evaluation. Its {key}: {brief(known[key])}; of this one: {brief(about[key])}. "
                "Give another folder"
            )
    for name in known["policies"].keys() & about["policies"].keys():
        if with_code and known["policies"][name] != about["policies"][name]:
            raise ConfigError(
                f"{path} has another policy of the name {name!r}: its code, its parameters, or other arrays or texts "
                f"that it holds, differ ({known['policies'][name]}, here {about['policies'][name]}). Give it another "
                "name, or another folder; or trust_folder=True if you know that it is the same"
            )


def _read_lines(path: Path, about: Mapping[str, Any]) -> tuple[dict[_Key, tuple[EpisodeResult, str]], int, int]:
    """The results in the folder, each with the digest of its options; the bytes of all complete lines; their number."""
    try:
        content = (path / _LINES).read_bytes()
    except FileNotFoundError:
        return {}, 0, 0
    lines = content[: content.rfind(b"\n") + 1].split(b"\n")[:-1]
    results: dict[_Key, tuple[EpisodeResult, str]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            result, options = _as_result(json.loads(line), path, about)
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError) as error:
            raise ConfigError(
                f"line {number} of {path / _LINES} cannot be read: {type(error).__name__}: {error}. Take the line out, "
                "and its episode is played again"
            ) from error
        results[result.policy, result.task, result.episode] = result, options
    return results, content.rfind(b"\n") + 1, len(lines)


def _as_result(row: dict[str, Any], path: Path, about: Mapping[str, Any]) -> tuple[EpisodeResult, str]:
    """What a line says, and the digest of the options. Raises whatever does not fit."""
    file, options = row.pop("file", None), row.pop("options")
    result = EpisodeResult(**row, trace=None if file is None else path / Path(file).name)
    result.metrics = {k: v if isinstance(v, bool) else float(v) for k, v in result.metrics.items()}
    if result.policy not in about["policies"] or result.task not in about["tasks"]:
        raise ValueError(f"{_ABOUT} does not have the policy {result.policy!r}, or the task {result.task!r}")
    if result.episode < 0 or result.length < 0 or not isinstance(result.failed, str):
        raise ValueError("a number is negative, or `failed` is no text")
    if result.seed != (wanted := seed_of(about["seed"], result.task, result.episode)):
        raise ValueError(f"its seed is {result.seed}, and that of this episode is {wanted}")
    return result, options


def _replace(path: Path, content: bytes) -> None:
    """Write a file, so that others see all of it or the one before."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
