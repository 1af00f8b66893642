"""The command line of penstock. Without a command, it describes this machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock import ConfigError, PenstockError, TuneReport, __version__, eval_command, tune
from penstock.tools import top
from penstock.tools.by_name import load_named
from penstock.tools.doctor import advice, describe_machine

_INTERRUPTED, _UNREAD = 130, 141  # the exit status of a program that Ctrl-C or SIGPIPE has ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="penstock", description=__doc__)
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("machine", help="the versions, and what this machine offers (also without a command)")
    commands.add_parser("doctor", help="the same, with advice for what is missing or slow")
    _add_tune(commands.add_parser("tune", help="try samplers with an environment, and recommend the fastest"))
    _add_check(commands.add_parser("check", help="check an environment: what repeats, what leaks, what is slow"))
    eval_command.add_arguments(commands.add_parser("eval", help=eval_command.HELP))
    _add_worker(commands.add_parser("worker", help="run a worker of a distributed experiment"))
    _add_join(commands.add_parser("join", help="take part in an experiment that runs on another machine"))
    top.add_arguments(commands.add_parser("top", help=top.HELP))
    args = parser.parse_args(arguments)
    functions = {"tune": _tune, "worker": _worker, "join": _join, "top": _top, "doctor": _doctor}
    functions |= {"eval": eval_command.run, "check": _check}
    try:
        status = functions.get(args.command, _machine)(args)
        sys.stdout.flush()
        return status
    except PenstockError as error:
        print(f"penstock {args.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # its reader has ended, as in `| head -1`
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())  # Python flushes it at the end
        return _UNREAD
    except KeyboardInterrupt:
        return _INTERRUPTED


def _machine(args: argparse.Namespace) -> int:
    print(f"penstock {__version__}")
    for name, value in describe_machine().items():
        print(f"{name:>24}  {value}")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    _machine(args)
    print()
    found = list(advice())
    for text in found or ["Nothing to improve was found."]:
        print(f"- {text}")
    return 0


def _add_tune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("env", metavar="ENV", help="MODULE:ENV_FN, or an environment id such as CartPole-v1")
    parser.add_argument("--seconds", type=float, default=20.0, help="time for the turns of all samplers (20)")
    parser.add_argument("--batch-T", type=int, default=128, metavar="T", help="time steps in a batch (128)")
    parser.add_argument("--batch-B", type=int, default=32, metavar="B", help="environments (32)")
    parser.add_argument("--n-workers", type=int, nargs="+", default=(), metavar="N", help="by default from the CPUs")
    parser.add_argument("--policy", default="mlp", help="random, mlp (default), or MODULE:MAKE_AGENT")
    parser.add_argument("--start-timeout", type=float, default=60.0, metavar="S", help="seconds of a start (60)")
    parser.add_argument("--step-timeout", type=float, default=20.0, metavar="S", help="seconds of a step (20)")


def _tune(args: argparse.Namespace) -> int:
    import torch

    torch.set_num_threads(1)  # as in the workers: more are slower for small policies
    report, status = TuneReport(), 0
    try:
        tune(
            load_named(args.env),
            policy=load_named(args.policy),
            batch_T=args.batch_T,
            batch_B=args.batch_B,
            n_workers=args.n_workers,
            seconds=args.seconds,
            start_timeout=args.start_timeout,
            step_timeout=args.step_timeout,
            report=report,
            say=lambda text: print(text, file=sys.stderr),
        )
    except KeyboardInterrupt:
        print("Interrupted: these are the figures so far.", file=sys.stderr)
        status = _INTERRUPTED
    if report.rows:
        print(report)
    return status or int(report.best is None)


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("env", metavar="ENV", help="MODULE:ENV_FN, or an environment id such as CartPole-v1")
    parser.add_argument("--batched", metavar="ENV", help="compare this batched environment with it, step by step")
    parser.add_argument("--close", action="store_true", help="with --batched: numbers may differ by rounding")
    parser.add_argument("--episodes", type=int, default=40, metavar="N", help="episodes that may leak (40)")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="most steps of an episode (200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first episode (0)")


def _check(args: argparse.Namespace) -> int:
    from penstock.testing import ConformanceError, check_batched, check_env

    env_fn = load_named(args.env)
    try:
        if args.batched is not None:
            n = check_batched(load_named(args.batched), env_fn, close=args.close, seed=args.seed)
            print(f"{args.batched} does what {args.env} does, in {n} episodes.")
        else:
            print(check_env(env_fn, n_episodes=args.episodes, max_steps=args.steps, seed=args.seed))
            print(f"{args.env} breaks no rule.")
    except ConformanceError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _add_worker(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", metavar="MODULE:CLASS/INDEX", help="a subclass of penstock.distributed.Worker")
    parser.add_argument("--join", metavar="FILE", required=True, help="the connection file of the control panel")
    parser.add_argument("--host", help="the address of this machine at which the others reach it (127.0.0.1)")
    parser.add_argument("--name", help="name of the worker (by default that of the class, in snake case)")


def _worker(args: argparse.Namespace) -> int:
    from penstock.distributed import Status, Worker
    from penstock.distributed.launched import snake

    path, _, index = args.worker.partition("/")
    cls = load_named(path)
    if not (isinstance(cls, type) and issubclass(cls, Worker) and (index or "0").isdigit()):
        raise ConfigError(f"{args.worker} is no subclass of penstock.distributed.Worker: give MODULE:CLASS/INDEX")
    connection = _connection(args.join, args.host)
    worker = cls()
    status = worker.run(connection, f"{args.name or snake(cls)}/{int(index or 0)}")
    print(f"{args.worker}: {status.value}", file=sys.stderr)
    return int(status is Status.ERROR or bool(worker.configure_error))


def _add_join(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the connection file of the run")
    parser.add_argument("experiment", metavar="MODULE:EXPERIMENT", help="the same experiment, on this machine")
    parser.add_argument("--as", dest="names", nargs="+", required=True, metavar="actor/INDEX", help="which actors")
    parser.add_argument("--host", help="the address of this machine at which the others reach it (by default, found)")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds to wait for the file and the run (60)")


def _join(args: argparse.Namespace) -> int:
    from penstock.distributed import Experiment

    experiment = load_named(args.experiment)
    if not isinstance(experiment, Experiment):
        raise ConfigError(f"{args.experiment} is no Experiment: give MODULE:NAME")
    endings = experiment.join(args.file, args.names, host=args.host, timeout=args.wait)
    for name, ending in endings.items():
        print(f"{name}: {ending}", file=sys.stderr)
    return int({*endings.values()} != {"exited with code 0"})


def _top(args: argparse.Namespace) -> int:
    if args.join is None:
        return top.run(args)
    from penstock.distributed import ControlPanel

    with ControlPanel.join(_connection(args.join, None)) as panel:
        return top.run(args, panel)


def _connection(file: str, host: str | None) -> Any:
    from penstock.distributed import Connection

    connection = Connection.read(file)
    # The file has the host of the panel's machine, which is not that of this one.
    return replace(connection, host=host or "127.0.0.1")


if __name__ == "__main__":
    sys.exit(main())
