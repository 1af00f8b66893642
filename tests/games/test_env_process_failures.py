"""What an environment in a process of its own can do wrong: each failure is named, in time, and nothing is left."""

from __future__ import annotations

import gc
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import psutil
import pytest

from penstock import (
    ConfigError,
    EnvCallError,
    GameError,
    ParallelSampler,
    PenstockError,
    RandomAgent,
    SamplerStateError,
    SerialSampler,
    SpaceError,
    WorkerError,
)
from penstock.evaluation import evaluate
from penstock.games import EnvProcess, game_process

from ..children import exit_code_of_fork
from ..support import BOUND, PROGRAMS, until
from . import own_envs_support
from .games_support import processes
from .own_envs_support import assert_equal, here, own, own_envs, walk

for module in (own_envs_support, own_envs):
    cloudpickle.register_pickle_by_value(module)

SECONDS = 5.0  # in which a failure is named, on a machine with other work


@pytest.fixture(autouse=True)
def no_process_left() -> Any:
    before = set(processes("PATH="))
    yield
    until(lambda: set(processes("PATH=")) <= before)


def faulty(how: str, **options: Any) -> EnvProcess:
    return own("Faulty", kwargs={"how": how, "length": 9}, **options)


def fails(env: Any, error: type[PenstockError], says: str) -> str:
    """The text of the error of the third step. The next reset goes on."""
    env.reset(seed=1)
    env.step(0), env.step(0)
    began = time.monotonic()
    with pytest.raises(error, match=says) as caught:
        env.step(0), env.step(0)
    assert time.monotonic() < began + SECONDS
    if error is GameError:
        with pytest.raises(SamplerStateError, match="has failed: call reset, which starts it again"):
            env.step(0)
    assert_equal(env.reset(seed=1), here("Numbers").reset(seed=1))
    env.close()
    return str(caught.value)


# ---- the table ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("python", [None, sys.executable])
def test_an_exception_has_its_traceback_and_the_process_lives(python: Any) -> None:
    env = faulty("raise", python=python)
    pid = env.pid
    text = fails(env, EnvCallError, r"^the environment raised KeyError: 'missing' in step. The traceback there:\nTrace")
    assert "own_envs.py" in text
    assert "in do_raise\n" in text
    env = faulty("raise", python=python)
    env.reset(seed=1)
    with pytest.raises(EnvCallError, match=r"raised AttributeError: 'Faulty' object has no .* in call"):
        env.call("nothing")
    assert (env.call("double", 3), env.pid != pid) == (6, True)
    env.close()


def test_render_and_reset_may_raise() -> None:
    env = faulty("render")
    env.reset(seed=1)
    with pytest.raises(EnvCallError, match="raised RuntimeError: no screen in render"):
        env.render()
    with pytest.raises(EnvCallError, match=r"raised ValueError: .* in reset"):
        env.reset(seed=2**32)  # too large for np.random.seed
    assert_equal(env.reset(seed=1), here("Numbers").reset(seed=1))
    env.close()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("exit", r"^in step, the environment \(pid \d+, port \d+\) ended with exit code 3\n"),
        ("sysexit", r"ended with exit code 1\n(?s:.*)\| the simulator gives up"),
        ("kill", "ended with SIGKILL"),
        ("segv", r"ended with SIGSEGV(?s:.*)Segmentation fault(?s:.*) in do_segv\b"),
        ("closes", r"^in step, the environment .* (ended with|closed the connection)"),
        ("junk", r"^in step, the environment \(.*\) sent a broken message: 'a message of 1,802,401,130 by"),
    ],
)
def test_an_end_is_named_at_once(how: str, says: str) -> None:
    fails(faulty(how), GameError, says)


@pytest.mark.parametrize("how", ["hang", "stop", "fork_exit"])
def test_silence_is_named_after_the_limit(how: str) -> None:
    """With the stack, unless the process cannot run."""
    text = fails(faulty(how, step_timeout=1.5), GameError, r"^in step, the environment \(pid \d+, port \d+\) ")
    if how == "fork_exit":  # the fork holds the connection
        assert "ended with exit code 4" in text
    else:
        assert "sent no reply within step_timeout=1.5 s; it runs (0.0" in text
        assert ("in do_hang\n" in text) == (how == "hang")


@pytest.mark.parametrize("how", ["fork_back", "prints", "stdin", "spawn"])
def test_what_does_no_harm(how: str) -> None:
    """A fork that comes back ends. Output and reading stdin disturb nothing. Other programs end with the process."""
    actions = [1] * 20
    assert_equal(walk(faulty(how), actions), walk(here("Numbers", length=9), actions))


@pytest.mark.parametrize("how", ["raise", "exit"])
@pytest.mark.parametrize("renews", [None, 3])
def test_the_seed_after_a_failure(how: str, renews: Any) -> None:
    """A reset without a seed depends on the last one, and on the number of episodes since."""
    env = faulty(how, renew_every=renews)
    env.reset(seed=1)
    env.step(0), env.step(0)
    with pytest.raises((EnvCallError, GameError)):
        env.step(0), env.step(0)
    found = env.reset()
    env.close()
    if how == "exit" or renews:
        key = np.random.SeedSequence(1, spawn_key=(6, 1))
        assert_equal(found, here("Numbers").reset(seed=int(key.generate_state(1)[0])))


# ---- the start ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "options", "error", "says"),
    [
        ("own_envs:Faulty", {"kwargs": {"how": "start"}}, EnvCallError, "raised RuntimeError: no licence when it was"),
        ("no_such_module:make", {}, EnvCallError, "raised ModuleNotFoundError: No module named 'no_such_module'"),
        ("own_envs:Nothing", {}, EnvCallError, "raised AttributeError: module 'own_envs' has no attribute 'Nothing'"),
        ("a:b", {"python": "/opt/py38/bin/python"}, GameError, "command not found: '/opt/py38/bin/python'"),
        ("a:b", {"python": [sys.executable, "-S"]}, GameError, "exit code 1(?s:.*)No module named 'numpy'"),
        ("a:b", {"python": ["sh", "-c", '"$@" < /dev/null', "-", sys.executable]}, GameError, "stdin was empty"),
        (
            "a:b",
            {"python": ["sh", "-c", "exec sleep 1000"], "start_timeout": 0.5},
            GameError,
            "was not ready in start_",
        ),
        (
            "own_envs:Faulty",
            {"kwargs": {"how": "slow start"}, "start_timeout": 1.0},
            GameError,
            "was not ready in start_timeout=1 s",
        ),
    ],
)
def test_a_start_that_fails_is_named(target: str, options: Any, error: type[PenstockError], says: str) -> None:
    with pytest.raises(error, match=says):
        EnvProcess(target, path=[PROGRAMS], **options)


def test_with_spaces_the_first_reset_names_it_and_the_next_one_tries_again(tmp_path: Path) -> None:
    def make(marker: str) -> Any:
        if not os.path.exists(marker):
            open(marker, "w").close()
            raise OSError("no licence is free")
        return own_envs.Numbers()

    local = here("Numbers")
    spaces, kwargs = (local.observation_space, local.action_space), {"marker": str(tmp_path / "marker")}
    env = EnvProcess(make, kwargs=kwargs, spaces=spaces)
    with pytest.raises(EnvCallError, match="raised OSError: no licence is free when it was made"):
        env.reset(seed=1)
    assert_equal(env.reset(seed=1), local.reset(seed=1))
    env.close()


@pytest.mark.parametrize(
    ("sends", "says"),
    [
        (b"y" * 40, "was not the first at its port: another program connected"),
        (b"", "sent no reply within step_timeout=0.5 s"),
    ],
)
def test_another_program_that_connects_first_is_named(monkeypatch: pytest.MonkeyPatch, sends: bytes, says: str) -> None:
    kept: list[socket.socket] = []

    def create(*arguments: Any, server: Any = socket.create_server, **how: Any) -> Any:
        listener = server(*arguments, **how)
        kept.append(socket.create_connection(arguments[0]))
        kept[0].sendall(sends)
        return listener

    monkeypatch.setattr(game_process.socket, "create_server", create)
    with pytest.raises(GameError, match=says):
        own("Numbers", step_timeout=0.5)
    kept[0].close()


def test_a_command_that_starts_the_interpreter() -> None:
    """The stack is that of the environment, not of the shell."""
    env = faulty("hang", python=["sh", "-c", '"$@"; exit $?', "sh", sys.executable], step_timeout=1.0)
    assert psutil.Process(env.pid).cmdline()[0] == sys.executable
    assert "in do_hang\n" in fails(env, GameError, "sent no reply within step_timeout=1 s")


# ---- signals, forks, the end ---------------------------------------------------------------------------


class Interrupted(BaseException):
    pass


def test_after_an_interrupted_step_a_reset_starts_it_again() -> None:
    """A late answer would be taken for the next one."""

    def on_alarm(*_: object) -> None:
        raise Interrupted

    env = faulty("hang")
    env.reset(seed=1)
    env.step(0), env.step(0)
    before, pid = signal.signal(signal.SIGALRM, on_alarm), env.pid
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(Interrupted):
            env.step(0)
    finally:
        signal.signal(signal.SIGALRM, before)
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert_equal(env.reset(seed=1), here("Numbers").reset(seed=1))
    env.close()


def test_an_environment_that_hangs_in_close_is_ended() -> None:
    env = faulty("close", stop_timeout=0.5)
    env.reset(seed=1)
    pid, began = env.pid, time.monotonic()
    env.close()
    assert time.monotonic() < began + SECONDS
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("renews", [None, 1])
def test_death_between_two_episodes(renews: Any) -> None:
    env = own("Numbers", renew_every=renews)
    env.reset(seed=1)
    process = psutil.Process(env.pid)
    process.kill()
    until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    if renews is None:
        with pytest.raises(GameError, match=r"^in reset, the environment .* ended with SIGKILL"):
            env.reset(seed=2)
    assert_equal(env.reset(seed=2), here("Numbers").reset(seed=2))
    env.close()


def test_a_fork_of_the_learner_cannot_use_it() -> None:
    env, local = own("Numbers"), here("Numbers")
    env.reset(seed=1), local.reset(seed=1)

    def in_the_fork() -> None:
        for call in (lambda: env.step(0), lambda: env.reset(seed=2), lambda: env.call("length")):
            with pytest.raises((GameError, SamplerStateError)):
                call()
        env.close()

    assert exit_code_of_fork(in_the_fork) == 0
    assert_equal(env.step(0), local.step(0))
    env.close()


def test_far_too_much_memory_within_an_episode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.games.game_socket._WATCH_SECONDS", 0.0)
    with pytest.raises(GameError, match=r"^the environment .* more than twice max_rss=0.01 GB, in an episode"):
        own("Numbers", max_rss="10 MB")


def test_nothing_grows_from_one_environment_to_the_next() -> None:
    def state() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/dev/fd")), len(psutil.Process().children(recursive=True))

    def use() -> None:
        walk(own("Scene", kwargs={"shape": (128, 128, 4)}), [1, 1])

    use()
    before = state()
    for _ in range(3):
        use()
    assert state() == before


# ---- in samplers ----------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {"batch_T": 16, "batch_B": 4, "n_workers": 2, "max_decorrelation_steps": 0}


def rank_3_fails(context: Any, how: str) -> EnvProcess:
    return faulty(how if context.env_rank == 3 else "")


@pytest.mark.parametrize("on_game_failure", ["raise", "renew"])
@pytest.mark.parametrize(("how", "says"), [("raise", "KeyError: 'missing'"), ("start", "RuntimeError: no licence")])
def test_an_exception_is_an_error_of_the_worker_and_renews_nothing(how: str, says: str, on_game_failure: Any) -> None:
    make = partial(rank_3_fails, how=how)
    with ParallelSampler(make, on_game_failure=on_game_failure, **OPTIONS) as sampler:
        with pytest.raises(WorkerError, match=f"EnvCallError(?s:.*)env_rank 3(?s:.*)raised {says}") as caught:
            sampler.initialize(RandomAgent(), seed=1)
            sampler.obtain_samples(0)
        assert 'own_envs.py", line' in str(caught.value.__cause__)


def test_a_worker_is_restarted_after_an_exception_as_in_place(tmp_path: Path) -> None:
    def make(context: Any) -> Any:
        struck = tmp_path / str(context.env_rank)
        is_first = not struck.exists()
        struck.touch()
        return faulty("raise" if is_first and context.env_rank == 3 else "")

    with ParallelSampler(make, on_worker_failure="restart", **OPTIONS) as sampler:
        sampler.initialize(RandomAgent(), seed=1)
        for itr in range(2):
            sampler.obtain_samples(itr)
        assert sampler.stats().restarts == 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_death_is_renewed_and_the_others_go_on() -> None:
    def make(context: Any) -> EnvProcess:
        return own("Dying", kwargs={"rank": context.env_rank})

    found = []
    for cls, more in ((ParallelSampler, {"n_workers": 2}), (SerialSampler, {})):
        options = {**OPTIONS, **more, "on_game_failure": "renew", "max_renewals": 50}
        if cls is SerialSampler:
            del options["n_workers"]
        with cls(make, **options) as sampler:
            sampler.initialize(RandomAgent(), seed=1)
            batches = [sampler.obtain_samples(itr)[0].copy().numpy() for itr in range(2)]
            stats = sampler.stats()
        assert (stats.renewals > 0, stats.restarts) == (True, 0)
        assert all(batch.env.valid[:, 1:].all() for batch in batches)
        found.append(batches)
    for ours, others in zip(*found, strict=True):
        for (name, leaf), (_, other) in zip(ours.leaves(), others.leaves(), strict=True):
            np.testing.assert_array_equal(leaf, other, err_msg=name)


def test_an_evaluation_notes_an_exception_as_a_failed_episode() -> None:
    def choose(observations: Any) -> Any:
        return np.zeros(len(observations), int)

    with pytest.warns(RuntimeWarning, match=r"2 of 2 episodes failed by their environment(?s:.*)KeyError: 'missing'"):
        results = evaluate(choose, partial(faulty, "raise"), episodes=2, seed=1, n_workers=1, attempts=2)
    assert [bool(each.failed) for each in results.episodes] == [True, True]


MAIN = """
import sys
sys.path.append({programs!r})
from functools import partial
from penstock import EnvProcess, ParallelSampler, RandomAgent
def make(context):
    how = ["hang", "fork_back", "spawn", ""][context.env_rank]
    return EnvProcess("own_envs:Faulty", path=sys.path[-1:], kwargs={{"how": how, "length": 10**6}})
if __name__ == "__main__":
    with ParallelSampler(make, batch_T=2, batch_B=4, n_workers=2, max_decorrelation_steps=0) as sampler:
        sampler.initialize(RandomAgent(), seed=1)
        sampler.obtain_samples(0)
        print("up", flush=True)
        sampler.obtain_samples(1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("who", ["main", "worker"])
def test_a_kill_of_those_who_hold_it_leaves_nothing(who: str, tmp_path: Path) -> None:
    """There are an environment that hangs, one that starts another session, and workers."""
    script, mark = tmp_path / "script.py", f"KILLED={os.getpid()}-{who}"
    script.write_text(MAIN.format(programs=str(PROGRAMS)))
    environ = {**os.environ, **dict([mark.split("=")])}
    main = subprocess.Popen([sys.executable, script], stdout=-1, stderr=-1, env=environ, start_new_session=True)
    assert main.stdout is not None
    assert main.stderr is not None
    try:
        assert select.select([main.stdout], [], [], BOUND)[0], "it does not start"
        assert main.stdout.readline() == b"up\n", main.stderr.read().decode()
        until(lambda: any("sleep" in psutil.Process(pid).cmdline() for pid in processes(mark)))
        assert len(list(processes(mark))) >= 9
        hosts = [pid for pid in processes(mark) if "host.py" in " ".join(psutil.Process(pid).cmdline())]
        os.kill(main.pid if who == "main" else psutil.Process(hosts[0]).ppid(), signal.SIGKILL)
        until(lambda: not list(processes(mark)))
        text = main.stderr.read().decode()
        assert (main.wait(BOUND) == -signal.SIGKILL) == (who == "main")
        assert who == "main" or re.search("WorkerDiedError", text)
    finally:
        main.kill()
        main.wait()
        main.stdout.close(), main.stderr.close()


# ---- the end -------------------------------------------------------------------------------------------

UNCLOSED = """
import sys
sys.path.insert(0, sys.argv[1])
from penstock import EnvProcess
from penstock.games import GameProcess
if sys.argv[2] == "game":
    kept = GameProcess(["sleep", "100"], ports=0, ready=lambda ports: True, quit=lambda game: None)
    kept.wait_ready()
else:
    kept = EnvProcess("own_envs:Numbers", path=[sys.argv[1]])
    kept.reset(seed=1)
print(kept.pid, flush=True)
if sys.argv[3] == "circle":
    kept.itself = kept
    del kept
elif sys.argv[3] == "raise":
    raise ValueError("as scripts do")
"""


@pytest.mark.parametrize("what", ["environment", "game"])
@pytest.mark.parametrize("how", ["module", "circle", "raise"])
def test_a_program_that_closes_nothing_ends(what: str, how: str) -> None:
    """When the interpreter exits, no thread can start any more: to wait for one is to wait for ever."""
    done = subprocess.run(
        [sys.executable, "-c", UNCLOSED, PROGRAMS, what, how], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == (1 if how == "raise" else 0), done.stderr
    until(lambda: not psutil.pid_exists(int(done.stdout)))


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_environment_that_nobody_has_any_more_ends_without_the_garbage_collector() -> None:
    env = own("Numbers")
    env.reset(seed=1)
    pid = env.pid
    gc.disable()
    try:
        del env
        until(lambda: not psutil.pid_exists(pid))
    finally:
        gc.enable()


def test_a_program_without_variables_in_the_group_of_the_environment_ends_with_it() -> None:
    env = own("Leaving")
    _, info = env.reset(seed=1)
    assert os.getpgid(info["pid"]) == os.getpgid(env.pid)
    env.close()
    until(lambda: not psutil.pid_exists(info["pid"]) or psutil.Process(info["pid"]).status() == psutil.STATUS_ZOMBIE)


# ---- what cannot be --------------------------------------------------------------------------------------


def test_an_observation_that_cannot_be_sent_is_an_error() -> None:
    env = own("Objects")
    env.reset(seed=1)
    with pytest.raises(SpaceError, match=r"an observation has a own_envs\._Simulator, which EnvProcess cannot send"):
        env.step(0)
    env.close()


def test_a_second_thread_gets_no_answer_of_the_first() -> None:
    env = faulty("hang", step_timeout=3)
    env.reset(seed=1)
    env.step(0), env.step(0)
    errors: list[Any] = []

    def first() -> None:
        with pytest.raises(GameError):
            env.step(0)

    thread = threading.Thread(target=first)
    thread.start()
    until(env._lock.locked)
    for call in (lambda: env.step(0), lambda: env.call("length"), env.render):
        with pytest.raises(SamplerStateError, match="another thread waits for an answer") as caught:
            call()
        errors.append(caught.value)
    thread.join()
    assert len(errors) == 3
    env.close()


@pytest.mark.parametrize("seed", [-1, 1.5, "a"])
def test_what_is_no_seed_is_refused_and_the_next_reset_goes_on(seed: Any) -> None:
    env = own("Numbers", renew_every=1)
    env.reset(seed=1)
    with pytest.raises(gym.error.Error, match="Seed must be"):
        env.reset(seed=seed)
    assert_equal(env.reset(seed=1), here("Numbers").reset(seed=1))
    env.reset()
    env.close()


@pytest.mark.parametrize("wrong", [{"path": "abc"}, {"python": []}])
def test_arguments_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"{next(iter(wrong))} must be"):
        EnvProcess("own_envs:Numbers", **wrong)
