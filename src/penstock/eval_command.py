"""`penstock eval`: evaluate policies from the command line."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import traceback
import warnings
import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.agents import RandomAgent
from penstock.buffers.reports import in_one_line
from penstock.errors import ConfigError, PenstockError
from penstock.evaluation import EvalResults, evaluate
from penstock.tools.by_name import load_named

HELP = "play episodes with a policy, and print a table of what it reaches"
_DESCRIPTION = """
Play episodes with a policy in worker processes, and print its mean return, or its share of successes, with the interval
of 95 %. See docs/evaluation.md.
"""
_STATUSES = """
exit status: 0 if all is well; 1 if a bound of --at-least is missed; 2 if the arguments are wrong, or nothing could be
evaluated; 130 after Ctrl-C. With --folder, the same command continues after any of them.
"""
_MISSED, _FAILED, _INTERRUPTED = 1, 2, 130
_POLICY = (
    "MODULE:NAME, a policy as penstock.evaluate takes it, or a class of policies, which is called without arguments; a "
    "file .zip of Stable-Baselines3, which may run code as it is loaded; or random"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.description, parser.epilog = _DESCRIPTION, _STATUSES
    add = parser.add_argument
    add("policy", metavar="POLICY", help=_POLICY)
    add("env", metavar="ENV", help="an environment id, MODULE:ID with the module that registers it, or MODULE:ENV_FN")
    add("--against", metavar="POLICY2", help="another policy: its difference is computed in pairs of the same episodes")
    add("--episodes", type=_episodes, default=200, metavar="N", help="for each task (200); FIRST:END for a part of them")
    add("--tasks", metavar="A,B", help="names of tasks, or MODULE:NAME of a dict of arguments of ENV_FN by name")
    add("--folder", metavar="F", help="keep each episode there; the same command continues")
    trust = "continue a folder that cannot be proved to be of this policy and environment"
    add("--trust-folder", action="store_true", help=trust)
    add("--workers", dest="n_workers", type=int, metavar="N", help="worker processes (as many as CPUs)")
    add("--seed", type=int, default=0, help="chooses the episodes (0)")
    add("--success", metavar="KEY", help="the key of the last info that says whether the episode was a success")
    at = "the step that must be a success: the last one (default), or any; the return is not cut"
    add("--success-at", choices=("last", "any"), default="last", help=at)
    add("--until-success", action="store_true", help="end an episode with the first step that is a success")
    add("--max-steps", type=int, metavar="N", help="truncate episodes")
    bound = "exit with 1 if the LOWER end of the interval of POLICY is below VALUE; may be repeated"
    add("--at-least", type=_bound, action="append", default=[], metavar="METRIC=VALUE", help=bound)
    add("--json", type=_file(".json"), metavar="FILE", help="write the results of all episodes")
    add("--csv", type=_file(".csv"), metavar="FILE", help="write a row for each episode")
    add("--algo", metavar="NAME", help="the class that saved a file .zip: PPO, or MODULE:CLASS (by default, found)")


def run(args: argparse.Namespace) -> int:
    """Evaluate. Returns the exit status."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _say_warning
            results = _evaluated(args)
        _print(results)
        for file in filter(None, (args.json, args.csv)):
            results.save(file)
        return _MISSED if _missed(results, args) else 0
    except KeyboardInterrupt:
        goes_on = f" The same command continues in {args.folder}." if args.folder else ""
        print(f"\nInterrupted.{goes_on}", file=sys.stderr)
        return _INTERRUPTED
    except PenstockError:
        raise
    except Exception:  # of the policy, or of what the module runs; its status must not be that of a missed bound
        traceback.print_exc()
        return _FAILED


def _evaluated(args: argparse.Namespace) -> EvalResults:
    texts = [args.against, args.policy] if args.against else [args.policy]  # the table subtracts the first
    if len(set(texts)) < len(texts):
        raise ConfigError(f"--against {args.against} is the policy itself: give another one")
    tasks = args.tasks
    if tasks is not None:
        tasks = load_named(tasks) if ":" in tasks else tasks.split(",")
    return evaluate(
        {text: _policy(text, args.algo) for text in texts},
        load_named(args.env),
        tasks=tasks,
        episodes=args.episodes,
        seed=args.seed,
        success=args.success,
        success_at=args.success_at,
        until_success=args.until_success,
        max_steps=args.max_steps,
        n_workers=args.n_workers,
        folder=args.folder,
        trust_folder=args.trust_folder,
        progress=sys.stderr.isatty(),
    )


def _missed(results: EvalResults, args: argparse.Namespace) -> bool:
    """Whether a bound is missed. Prints a line for each bound."""
    is_missed = False
    for metric, value in args.at_least:
        # The mean itself is above its bound in half of the runs of a policy that just reaches it. Episodes that failed
        # are in no mean: they count as the worst that they may be, which only a share has.
        least = None if results.is_share(metric) else -math.inf
        lower = min(results.mean(args.policy, metric).lower, results.bounds(args.policy, metric, least=least)[0])
        holds = lower >= value  # no NaN does
        is_missed |= not holds
        why = " (episodes failed, and may be worse than all others)" if lower == -math.inf else ""
        why = " (it needs two episodes of each task)" if math.isnan(lower) else why
        _print(f"at least {metric}={value:g}: {'yes' if holds else 'NO'}, the lower end is {lower:.10g}{why}")
    return is_missed


def _print(value: object) -> None:
    try:
        print(value, flush=True)
    except BrokenPipeError:  # such as of `head`: the files and the exit status are still wanted
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())


def _say_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"penstock eval: {message}", file=sys.stderr)


# ---- arguments ------------------------------------------------------------------------------------


def _episodes(text: str) -> int | range:
    first, colon, end = text.partition(":")
    try:
        return range(int(first), int(end)) if colon else int(first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not N or FIRST:END") from None


def _bound(text: str) -> tuple[str, float]:
    metric, _, value = text.rpartition("=")
    try:
        if math.isfinite(bound := float(value)):
            return metric, bound
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not METRIC=VALUE")


def _file(suffix: str) -> Any:
    """Checks before the first episode what would be refused after the last."""

    def file(text: str) -> Path:
        path = Path(text)
        if path.suffix != suffix or not path.absolute().parent.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r} must end in {suffix}, in a folder that is there")
        return path

    return file


# ---- policies -------------------------------------------------------------------------------------


class Sb3Policy:
    """A policy of Stable-Baselines3 as a function of observations. It takes the likeliest action."""

    def __init__(self, policy: Any) -> None:
        policy.set_training_mode(False)
        self.policy = policy

    def __call__(self, observation: Any) -> Any:
        """The actions `[k, ...]` for the observations `[k, ...]`."""
        return self.policy.predict(observation, deterministic=True)[0]


def _policy(text: str, algo: str | None) -> Any:
    if text == "random":
        return RandomAgent()
    if text.endswith(".zip"):
        return _of_sb3(text, algo)
    found = load_named(text)
    if isinstance(found, str):
        raise ConfigError(f"POLICY must be {_POLICY}; got {text!r}")
    return found() if isinstance(found, type) else found


def _of_sb3(file: str, algo: str | None) -> Sb3Policy:
    try:
        sb3 = import_module("stable_baselines3")
    except ImportError as error:
        raise ConfigError(f"{file} needs Stable-Baselines3: pip install stable-baselines3 ({error})") from error
    try:
        with zipfile.ZipFile(file) as content:
            saved = json.loads(content.read("data"))["policy_class"]["__module__"]
    except (OSError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{file} is no model that Stable-Baselines3 has saved: {in_one_line(error)}") from error
    cls: Any = _algorithm(saved, file) if algo is None else load_named(algo) if ":" in algo else getattr(sb3, algo, None)
    if not isinstance(cls, type) or not hasattr(cls, "load"):
        raise ConfigError(f"--algo {algo} is no algorithm: give the name of one of Stable-Baselines3, or MODULE:CLASS")
    # What only training needs: schedules of other versions of Python cannot be read, and a replay buffer is large.
    unused = {"learning_rate": 0.0, "lr_schedule": lambda _: 0.0, "clip_range": lambda _: 0.0}
    without_memory = {"buffer_size": 1} if issubclass(cls, sb3.common.off_policy_algorithm.OffPolicyAlgorithm) else {}
    try:
        return Sb3Policy(cls.load(file, custom_objects=unused, **without_memory).policy)
    except Exception as error:  # of another library, for a file of another algorithm or version
        raise ConfigError(f"{cls.__name__} cannot load {file}: {in_one_line(error)}") from error


def _algorithm(saved: str, file: str) -> Any:
    """The algorithm whose policies are in the module `saved`: `LIBRARY.ALGORITHM.policies`. PPO and A2C have the same
    policies, and these lie in `common`; so have TD3 and DDPG."""
    library, _, rest = saved.partition(".")
    name, _, last = rest.partition(".")
    if library in ("stable_baselines3", "sb3_contrib") and last == "policies":
        found = import_module(library)
        wanted = "ppo" if (library, name) == ("stable_baselines3", "common") else name
        for cls in map(found.__dict__.get, found.__all__):
            if isinstance(cls, type) and cls.__name__.lower() == wanted:
                return cls
    raise ConfigError(
        f"{file} has a policy of {saved}, which tells no algorithm that acts without masks and states: give --algo, or "
        "load the model in a module of yours, and name its policy"
    )
