"""What a fork of the user's inherits: by os.fork, multiprocessing, a DataLoader. Each call there raises an error that
says what to do, and its parent notices nothing of the fork, of its calls and of its end."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="samplers need torch")

from gymnasium.spaces import Box, Discrete

from penstock import (
    AlternatingSampler,
    AsyncSampler,
    ClusterError,
    GameError,
    GpuSampler,
    ParallelSampler,
    PortLeaseError,
    RandomAgent,
    SamplerStateError,
    SerialSampler,
    start_evaluation,
)
from penstock.envs import CountingEnv
from penstock.errors import ConfigError
from penstock.games import EnvProcess, ServedGame, lease_port
from penstock.learning import Replay
from penstock.vector import ShmVectorEnv
from penstock.workers import claims

from ..children import exit_code_of, exit_code_of_fork
from ..distributed.support import needs_zmq
from ..games.games_support import SERVER, game, play
from ..support import assert_same, collect_with
from ..toy_games import Published

pytestmark = pytest.mark.xdist_group("ports")

SIZE: dict[str, Any] = {"batch_T": 5, "batch_B": 4, "max_decorrelation_steps": 0}
LIMIT = 60  # seconds for all calls of a fork
Call = Callable[[], Any]


class Kind:
    """One inherited object: `calls` raise `error` in a fork, `ends` do nothing there, and `check` is for the parent."""

    def __init__(
        self,
        error: type[Exception] | tuple[type[Exception], ...],
        calls: dict[str, Call],
        ends: list[Call],
        check: Call,
    ) -> None:
        self.error, self.calls, self.ends, self.check = error, calls, ends, check

    def use_in_fork(self) -> None:
        signal.alarm(LIMIT)
        for name, call in self.calls.items():
            began = time.monotonic()
            with pytest.raises(self.error) as caught:
                call()
            text = str(caught.value)
            assert any(word in text for word in ("fork", "another process", "workers")), f"{name}: {text}"
            assert time.monotonic() - began < 5, name
        for end in self.ends:
            end()
        self.calls.clear()
        self.ends.clear()
        del self.check
        gc.collect()


@contextlib.contextmanager
def game_socket(folder: Path) -> Iterator[Kind]:
    with game(reply_timeout=20.0) as own:
        connection, n = own.connect(), iter(range(1, 99))

        def check() -> None:
            assert play(connection, 1) == [next(n)]

        calls: dict[str, Call] = {
            "request": lambda: connection.request(b"[1]\n"),
            "send": lambda: connection.send(b"[1]\n"),
            "receive": lambda: connection.receive(1),
            "receive_line": connection.receive_line,
            "socket": lambda: connection.socket,
        }
        yield Kind(GameError, calls, [connection.close], check)


@contextlib.contextmanager
def game_process(folder: Path) -> Iterator[Kind]:
    with game(reply_timeout=20.0, spares=1) as own:
        connection, n = own.connect(), iter(range(1, 99))

        def check() -> None:
            assert play(connection, 1) == [next(n)]
            assert ("port", own.ports[0]) in claims.held
            assert own.end_episode() is False

        calls: dict[str, Call] = {
            "pid": lambda: own.pid,
            "ports": lambda: own.ports,
            "listeners": lambda: own.listeners,
            "wait_ready": own.wait_ready,
            "connect": own.connect,
            "rss": own.rss,
            "end_episode": own.end_episode,
            "renew": own.renew,
            "deadline": own.deadline(1).__enter__,
        }
        yield Kind(GameError, calls, [own.kill, own.close, own.close], check)


@contextlib.contextmanager
def served_game(folder: Path) -> Iterator[Kind]:
    env = ServedGame(Box(0, 99, (1,), np.float32), Discrete(3), wait=20.0)
    client = socket.create_connection(("127.0.0.1", env.port), timeout=20)
    lines, numbers = client.makefile("rb"), iter(range(2, 99))
    with contextlib.closing(env), client:
        client.sendall(b'{"hello": 2}\n{"n": 1, "begin": [0]}\n')
        assert env.reset(seed=3)[0] == [0]
        assert "welcome" in json.loads(lines.readline())
        stranger = socket.create_connection(("127.0.0.1", env.port), timeout=20)

        def check() -> None:
            number = next(numbers)
            client.sendall(b'{"n": %d, "obs": [%d], "reward": 1}\n' % (number, number))
            assert env.step(1)[0] == [number]
            assert json.loads(lines.readline()) == {"n": number - 1, "action": 1}

        calls: dict[str, Call] = {"port": lambda: env.port, "reset": env.reset, "step": lambda: env.step(0)}
        with stranger:
            yield Kind(GameError, calls, [env.close, env.close], check)


@contextlib.contextmanager
def env_process(folder: Path) -> Iterator[Kind]:
    with contextlib.closing(EnvProcess("penstock.envs:CountingEnv", step_timeout=20.0)) as env:
        plain = CountingEnv()
        for each in (env, plain):
            each.reset(seed=1)

        def check() -> None:
            np.testing.assert_array_equal(env.step(0)[0], plain.step(0)[0])

        calls: dict[str, Call] = {"reset": env.reset, "step": lambda: env.step(0), "call": lambda: env.call("x")}
        yield Kind(GameError, calls, [env.close], check)


@contextlib.contextmanager
def port_lease(folder: Path) -> Iterator[Kind]:
    with lease_port() as lease:
        number = lease.port

        def check() -> None:
            assert lease.is_active
            assert ("port", number) in claims.held
            code = "from penstock.games import lease_port; lease_port(number, number + 1, timeout=0)"
            assert exit_code_of("spawn", code, number=number) == 1, "another process gets the port"

        def leave() -> None:
            assert not lease.is_active
            lease.release()

        yield Kind(PortLeaseError, {"with": lease.__enter__}, [leave], check)


@contextlib.contextmanager
def of_sampler(cls: Any, agent: Any, **options: Any) -> Iterator[Kind]:
    how = {"seed": 0, "bootstrap_value": False}
    wanted = iter([batch for batch, _ in collect_with(SerialSampler, CountingEnv, agent, 4, **how, **SIZE)])
    sampler = cls(CountingEnv, n_workers=2, **SIZE, **options)
    with sampler:
        sampler.initialize(agent, **how)
        if cls is AsyncSampler:
            sampler.start()
        itr = iter(range(99))

        def check() -> None:
            assert_same(sampler.obtain_samples(next(itr))[0].numpy(), next(wanted))

        calls: dict[str, Call] = {
            "obtain_samples": lambda: sampler.obtain_samples(9),
            "call": lambda: sampler.call("close"),
            "get_attr": lambda: sampler.get_attr("x"),
            "set_attr": lambda: sampler.set_attr("x", [1] * 4),
            "evaluate_agent": lambda: sampler.evaluate_agent(0),
            "initialize": lambda: sampler.initialize(agent),
            "state_dict": sampler.state_dict,
            "load_state_dict": lambda: sampler.load_state_dict({}),
            "episode": lambda: sampler.episode(0, 0),
            "set_episode_plan": lambda: sampler.set_episode_plan(None),
        }
        if cls is AsyncSampler:
            calls |= {"poll_samples": sampler.poll_samples, "pause": sampler.pause, "hold": sampler.hold().__enter__}
        else:
            calls |= {"start_samples": lambda: sampler.start_samples(9), "wait_samples": sampler.wait_samples}
        yield Kind(SamplerStateError, calls, [sampler.shutdown, sampler.__exit__], check)


@contextlib.contextmanager
def vector_environment(folder: Path) -> Iterator[Kind]:
    with ShmVectorEnv([CountingEnv] * 4, n_workers=2) as envs, ShmVectorEnv([CountingEnv] * 4) as plain:
        for each in (envs, plain):
            each.reset(seed=0)

        def check() -> None:
            for found, right in zip(envs.step([0] * 4)[:4], plain.step([0] * 4)[:4], strict=True):
                np.testing.assert_array_equal(found, right)

        calls: dict[str, Call] = {
            "reset": envs.reset,
            "reset_async": envs.reset_async,
            "step": lambda: envs.step([0] * 4),
            "step_async": lambda: envs.step_async([0] * 4),
            "step_wait": envs.step_wait,
            "send": lambda: envs.send([0] * 4),
            "recv": envs.recv,
            "call": lambda: envs.call("close"),
            "get_attr": lambda: envs.get_attr("x"),
            "set_attr": lambda: envs.set_attr("x", 1),
            "render": envs.render,
        }
        yield Kind(SamplerStateError, calls, [envs.close, plain.close], check)


def batches(n: int) -> list[Any]:
    return [batch for batch, _ in collect_with(SerialSampler, CountingEnv, RandomAgent(), n, seed=0, **SIZE)]


@contextlib.contextmanager
def replay_in_a_file(folder: Path) -> Iterator[Kind]:
    replay, plain = Replay(40, file=folder / "steps", seed=0), Replay(40, seed=0)
    with SerialSampler(CountingEnv, **SIZE) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        itr = iter(range(99))

        def check() -> None:
            batch = sampler.obtain_samples(next(itr))[0]
            for each in (replay, plain):
                each.append(batch)
            assert len(replay) == len(plain)
            assert_same(replay.sample(32).numpy(), plain.sample(32).numpy())

        check()
        batch = sampler.obtain_samples(next(itr))[0]
        calls: dict[str, Call] = {
            "append": lambda: replay.append(batch),
            "sample": lambda: replay.sample(4),
            "contents": lambda: replay.contents,
            "save": lambda: replay.save(folder / "saved"),
            "update": lambda: replay.update([0], [1.0]),
        }
        yield Kind(SamplerStateError, calls, [], check)


@contextlib.contextmanager
def replay_that_is_fed(folder: Path) -> Iterator[Kind]:
    replay = Replay(400, seed=0)
    with AsyncSampler(CountingEnv, n_workers=2, replay=replay, **SIZE) as sampler:
        sampler.initialize(Published(), seed=0)
        sampler.start()

        def check() -> None:
            replay.sample(4)
            assert sampler.take_traj_infos() is not None

        check()
        calls: dict[str, Call] = {
            "sample": lambda: replay.sample(4),
            "save": lambda: replay.save(folder / "saved"),
            "take_traj_infos": sampler.take_traj_infos,
        }
        yield Kind((SamplerStateError, ConfigError), calls, [], check)


@contextlib.contextmanager
def evaluation(folder: Path) -> Iterator[Kind]:
    with start_evaluation(RandomAgent(), CountingEnv, episodes=3, seed=0) as running:

        def check() -> None:
            assert len(running.wait(60).episodes) == 3
            assert running.is_done

        calls: dict[str, Call] = {
            "is_done": lambda: running.is_done,
            "wait": running.wait,
            "wait a little": lambda: running.wait(0.0),
        }
        yield Kind(SamplerStateError, calls, [running.cancel, running.__exit__], check)


@contextlib.contextmanager
def remote_calls(folder: Path) -> Iterator[Kind]:
    from penstock.distributed import RpcClient, RpcServer

    with RpcServer() as server, RpcClient(server.connection) as client:
        server.register_handler("double", lambda x: 2 * x)

        def answered(future: Any) -> Any:
            while not future.done():
                server.handle_requests(0.1)
            return future.result()

        def check() -> None:
            assert answered(client.async_request("double", x=21)) == 42
            assert answered(waiting.pop()) == 2
            waiting.append(client.async_request("double", x=1))

        waiting = [client.async_request("double", x=1)]
        calls: dict[str, Call] = {
            "request": lambda: client.request("double", x=1),
            "async_request": lambda: client.async_request("double", x=1),
            "handle_requests": lambda: server.handle_requests(1.0),
            "a reply that was awaited before": lambda: next(iter(waiting)).result(),
        }
        yield Kind(ClusterError, calls, [client.close, server.close], check)


@contextlib.contextmanager
def control_panel(folder: Path) -> Iterator[Kind]:
    from penstock.distributed import ControlPanel, SampleConsumer, SampleProducer, Worker
    from penstock.distributed.names import NameClient

    with (
        ControlPanel("inherited", file=folder / "file", wire="zmq") as panel,
        ControlPanel.join(panel.connection) as far,
    ):
        names = far.names
        panel.names.add("a", 1)
        names.follow("a")
        consumer = SampleConsumer(panel.wire, panel.names, "steps", "c")
        producer = SampleProducer(far.wire, NameClient(far.wire, panel.connection.address), "steps")
        number = iter(range(99))

        def check() -> None:
            n = next(number)
            names.add(f"b/{n}", n)
            assert panel.names.find("b")[f"b/{n}"] == n
            assert producer.put(n, 20)
            assert consumer.get(20) == n
            assert panel.stats() == {}

        check()
        calls: dict[str, Call] = {}
        for each in (panel, far):
            calls |= {
                f"{each} {name}": call
                for name, call in {
                    "launch": lambda each=each: each.launch(Worker),
                    "connect": lambda each=each: each.connect(["x"]),
                    "autoconnect": each.autoconnect,
                    "request": lambda each=each: each.request("x", "do"),
                    "group_request": lambda each=each: each.group_request("do"),
                    "pulse": each.pulse,
                    "stats": each.stats,
                    "table": each.table,
                    "get_worker_status": lambda each=each: each.get_worker_status("x"),
                    "kill": lambda each=each: each.kill("x"),
                    "pid": lambda each=each: each.pid("x"),
                    "stacks": lambda each=each: each.stacks("x"),
                    "has_ended": lambda each=each: each.has_ended("x"),
                    "require_alive": lambda each=each: each.require_alive("x"),
                }.items()
            }
        calls |= {
            "add": lambda: names.add("c", 1),
            "write": lambda: names.write("c", 1),
            "flush": lambda: names.flush(9),
            "delete": lambda: names.delete("a"),
            "clear": lambda: names.clear("a"),
            "find": names.find,
            "get": lambda: names.get("a"),
            "wait": lambda: names.wait("a", 9),
            "reach": lambda: names.reach([panel.wire.address, panel.wire.id, "names"]),
            "follow": lambda: names.follow("c"),
            "followed": lambda: names.followed("a"),
            "keys": lambda: names.keys("a"),
            "newest": lambda: names.newest("a"),
            "put": lambda: producer.put(1, 9),
            "has_room": producer.has_room,
            "get piece": lambda: consumer.get(9),
        }
        yield Kind(ClusterError, calls, [consumer.close, far.close, panel.close], check)


SAMPLERS = {
    "parallel": (ParallelSampler, {}),
    "central": (GpuSampler, {}),
    "central process": (GpuSampler, {"server": "process"}),
    "alternating": (AlternatingSampler, {}),
    "asynchronous": (AsyncSampler, {"lag": None}),
}
KINDS: dict[str, Any] = {
    each.__name__: each
    for each in (
        game_socket,
        game_process,
        served_game,
        env_process,
        port_lease,
        vector_environment,
        replay_in_a_file,
        replay_that_is_fed,
        evaluation,
    )
}
FAR = [pytest.param(each.__name__, marks=needs_zmq) for each in (remote_calls, control_panel)]
KINDS |= {"remote_calls": remote_calls, "control_panel": control_panel}


def kind_of(name: str, folder: Path) -> Any:
    if name in KINDS:
        return KINDS[name](folder)
    cls, options = SAMPLERS[name]
    return of_sampler(cls, Published() if cls is AsyncSampler else RandomAgent(), **options)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    "name", [*(name for name in KINDS if name not in ("remote_calls", "control_panel")), *FAR, *SAMPLERS]
)
def test_a_fork_is_refused_and_its_parent_goes_on(name: str, tmp_path: Path) -> None:
    with kind_of(name, tmp_path) as kind:
        kind.check()
        assert exit_code_of_fork(kind.use_in_fork) == 0
        kind.check()
        assert exit_code_of_fork(lambda: exit_code_of_fork(kind.use_in_fork) == 0 or os._exit(1)) == 0, "a fork of it"
        kind.check()


PROGRAM = """
import multiprocessing, os, sys
from penstock import ParallelSampler, RandomAgent
from penstock.envs import CountingEnv
from penstock.games import GameProcess

ends_as = sys.argv[1]
command = [sys.executable, "-I", "-S", sys.argv[2], "{port}"]
with GameProcess(command) as game, ParallelSampler(CountingEnv, batch_T=5, batch_B=2, n_workers=2) as sampler:
    connection = game.connect()
    sampler.initialize(RandomAgent(), seed=0)
    assert connection.request(b"[1]\\n") == b'{"n": 1, "got": [1]}'
    before = [game.pid, *sampler.worker_pids]
    if ends_as == "multiprocessing":
        child = multiprocessing.get_context("fork").Process(target=len, args=([],))
        child.start()
        child.join()
    elif ends_as == "loader":
        import torch

        assert len(list(torch.utils.data.DataLoader(range(8), num_workers=2, multiprocessing_context="fork"))) == 8
    elif (pid := os.fork()) == 0:
        sys.exit(5)  # it leaves the `with` block
    else:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    assert connection.request(b"[2]\\n") == b'{"n": 2, "got": [2]}'
    sampler.obtain_samples(0)
    assert before == [game.pid, *sampler.worker_pids]
print("done")
"""


@pytest.mark.parametrize(
    "ends_as", ["exit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("multiprocessing", "loader"))]
)
def test_the_end_of_a_fork_closes_nothing_of_its_parent(ends_as: str) -> None:
    command = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", PROGRAM, ends_as, SERVER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)
