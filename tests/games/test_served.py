"""A game with its own main loop: the protocol, clients that stall, vanish, come back, come twice or send rubbish."""

import contextlib
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st

from penstock import ConfigError, GameError, ParallelSampler, RandomAgent, SerialSampler, SpaceError
from penstock.errors import SamplerStateError
from penstock.games import ServedGame, host
from penstock.games.served import GameClient, decoded, encoded

from ..support import assert_same, collect, sampler_of, without_infos

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
FLOATS, ACTIONS = Box(-1, 1, (3,), np.float32), Discrete(4)


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


served_client = _load("served_client")


@pytest.fixture
def served() -> Iterator[Callable[..., ServedGame]]:
    """Makes environments, and closes them."""
    with contextlib.ExitStack() as stack:

        def make(observation: Any = FLOATS, action: Any = ACTIONS, **options: Any) -> ServedGame:
            env = ServedGame(observation, action, **{"wait": 20.0, **options})
            stack.callback(env.close)
            return env

        yield make


def framed(message: dict[str, Any], *, raw: bool = False) -> bytes:
    if not raw:
        return json.dumps(message).encode() + b"\n"
    return host.encoded(message)


class Raw:
    """A client that sends what it likes. It sends without waiting, so one thread holds both sides."""

    def __init__(self, env: ServedGame, **hello: Any) -> None:
        self.socket = socket.create_connection(("127.0.0.1", env.port), timeout=20)
        self.raw = False
        if hello:
            self.send(**hello)
        self.raw = hello.get("format") == "raw"

    def write(self, data: bytes) -> None:
        self.socket.sendall(data)

    def send(self, **message: Any) -> None:
        self.write(framed(message, raw=self.raw))

    def read(self) -> Any:
        """The next line; None at the end."""
        data = b""
        with contextlib.suppress(ConnectionError):
            while not data.endswith(b"\n") and (more := self.socket.recv(1)):
                data += more
        return json.loads(data) if data else None

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


OBS = [0.5, 0.0, -0.5]


def playing(env: ServedGame, **hello: Any) -> Raw:
    """A client whose first message is n=1, and which the environment has answered with nothing yet."""
    client = Raw(env, hello=2, **hello)
    client.send(n=1, begin=OBS)
    env.reset(seed=1)
    return client


@contextlib.contextmanager
def game(play: Callable[[], object]) -> Iterator[list[Any]]:
    """Runs `play` in a thread. Its result is in the list at the end; what it raises is raised there."""
    results: list[Any] = []
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(play)
        yield results
        results.append(running.result(10))


# ---- playing ---------------------------------------------------------------------------------


def _episodes(port: int, lengths: list[int], disturb: Any = None) -> list[Any]:
    """Plays with the client of the examples. Returns the actions."""
    client = served_client.Client(port)
    seen: list[Any] = []
    for length in lengths:
        action = client.begin(OBS, {"lives": 3})
        for t in range(length):
            seen.append(action)
            if disturb is not None:
                disturb(client, t)
            obs = [t / 1000, 0.0, float(action) / 4]
            if t == length - 1:
                with contextlib.suppress(served_client.Refused):  # the learner needs no more
                    client.end(obs, 1.0, "truncated" if length % 2 else "terminated")
            else:
                action = client.act(obs, 1.0, {"lives": 2})
    client.bye("played enough")
    return seen


def _play(env: ServedGame, n: int, seed: int = 5) -> list[Any]:
    """The learner's side of `_episodes`."""
    found = []
    for episode in range(n):
        observation, info = env.reset(seed=seed if episode == 0 else None)
        np.testing.assert_array_equal(observation, np.array(OBS, np.float32))
        assert info == {"lives": 3}
        t, over = 0, False
        while not over:
            action = (t * 7 + episode) % 4
            observation, reward, terminated, truncated, info = env.step(action)
            assert observation.dtype == np.float32
            np.testing.assert_array_equal(observation, np.array([t / 1000, 0, action / 4], np.float32))
            assert reward == 1.0
            found.append(action)
            over, t = terminated or truncated, t + 1
        assert truncated == bool(t % 2)
    return found


def test_a_lost_connection_loses_nothing_and_does_nothing_twice(served: Any) -> None:
    env = served()
    moments, port = random.Random(3), env.port

    def disturb(client: Any, t: int) -> None:
        if moments.random() < 0.1:
            client.socket.shutdown(socket.SHUT_RDWR)

    with game(lambda: _episodes(port, [300, 301], disturb) + _episodes(port, [3, 1, 8])) as seen:
        actions = _play(env, 2) + _play(env, 3)  # the first client says bye between two episodes, so another may come
        env.close()
    assert seen == [actions]


def test_the_learner_ends_an_episode_and_keeps_gymnasiums_rules(served: Any) -> None:
    env = served(Box(0, 9, (2,), np.int64), Discrete(3))
    port = env.port

    def play() -> int:
        client, ended = served_client.Client(port), 0
        with contextlib.suppress(served_client.Refused):
            while True:
                generator = random.Random(client.seed)
                action = client.begin([generator.randrange(10), 0])
                while action is not None:
                    action = client.act([generator.randrange(10), int(action)], 0.5)
                ended += 1
        return ended

    with game(play) as ended:
        check_env(env, skip_render_check=True, skip_close_check=True)
        env.close()
    assert ended[0] >= 3


@pytest.mark.parametrize("form", ["json", "raw"])
def test_every_space_in_every_format(served: Any, form: str) -> None:
    space = Dict(
        {
            "image": Box(0, 255, (4, 5), np.uint8),
            "list": Box(-9, 9, (2,), np.float64),
            "parts": Tuple([Discrete(5), MultiBinary(3), MultiDiscrete([3, 4])]),
        }
    )
    env, image = served(space, space), np.arange(20, dtype=np.uint8).reshape(4, 5)
    packed = image if form == "raw" else image.tolist()
    wanted = {"image": image, "list": np.array([0.25, -1.0]), "parts": (4, np.array([1, 0, 1]), np.array([2, 3]))}
    value = {"image": packed, "list": [0.25, -1], "parts": [4, [1, 0, 1], [2, 3]]}
    with Raw(env, hello=2, format=form) as client:
        with game(lambda: env.reset(seed=1)[0]) as first:
            assert client.read()["welcome"] == 2
            client.send(n=1, begin=value)
        assert space.contains(first[0])
        np.testing.assert_equal(first[0], wanted)
        client.send(n=2, obs=value, reward=2)
        np.testing.assert_equal(env.step(wanted), (wanted, 2.0, False, False, {}))
        data = client.socket.recv(10_000)
        reply = json.loads(data) if form == "json" else host.decoded(data)
        parts = [4, np.array([1, 0, 1], np.int8), np.array([2, 3])]
        action = {**wanted, "parts": parts} if form == "raw" else {**value, "image": image.tolist()}
        np.testing.assert_equal(reply, {"n": 1, "action": action})


def test_raw_messages_written_by_hand(served: Any) -> None:
    """As a program in another language writes and reads them: see docs/served_games.md."""
    env = served(Box(0, 255, (2, 3), np.uint8), Box(-1, 1, (2,), np.float32))
    with socket.create_connection(("127.0.0.1", env.port), timeout=20) as client:
        client.sendall(b'{"hello": 2, "format": "raw"}\n')
        first = b'{"d": {"n": 1, "begin": {"a": ["|u1", [2, 3]]}}}'
        client.sendall(struct.pack("<I", len(first)) + b"\x06\x00\x00\x00" + b"\x00" + first)
        client.sendall(bytes([1, 2, 3, 4, 5, 255]))
        observation, info = env.reset(seed=1)
        np.testing.assert_array_equal(observation, np.array([[1, 2, 3], [4, 5, 255]], np.uint8))
        assert (observation.dtype, info) == (np.uint8, {})
        welcome = b""
        while not welcome.endswith(b"\n"):
            welcome += client.recv(1)
        assert json.loads(welcome)["welcome"] == 2
        second = (
            b'{"d": {"n": 2, "obs": [[0, 0, 0], [0, 0, 9]], "reward": 0.5, "info": {"d": {"x": {"a": ["<f8", []]}}}}}'
        )
        client.sendall(struct.pack("<IIB", len(second), 8, 0) + second + struct.pack("<d", 1.5))
        observation, reward, _, _, info = env.step(np.array([0.5, -0.25], np.float32))
        assert (observation[1, 2], reward, info) == (9, 0.5, {"x": 1.5})
        header, arrays, is_elsewhere = struct.unpack("<IIB", client.recv(9))
        assert (arrays, is_elsewhere) == (8, 0)
        assert json.loads(client.recv(header)) == {"d": {"n": 1, "action": {"a": ["<f4", [2]]}}}
        assert struct.unpack("<ff", client.recv(arrays)) == (0.5, -0.25)
        env.close()
        header, arrays, _ = struct.unpack("<IIB", client.recv(9))
        assert (json.loads(client.recv(header)), arrays) == ({"d": {"error": "the environment is closed"}}, 0)


def test_the_client_in_python_sends_arrays_of_every_kind(served: Any) -> None:
    image = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    space = Dict(image=Box(0, 255, (2, 3, 4), np.uint8), more=Box(-9, 9, (3,), np.float64), flag=MultiBinary(2))
    env = served(space, space, reply_timeout=20.0)
    port = env.port

    def play() -> Any:
        client = served_client.Client(port)
        first = client.begin({"image": image[:, ::-1][:, ::-1], "more": array("d", [1, 2, 3]), "flag": b"\1\0"})
        second = client.act({"image": image.tolist(), "more": [1, 2, 3], "flag": [1, 0]}, np.float64(0.5))
        client.bye()
        return first, second

    with game(play) as seen:
        wanted = {"image": image, "more": np.array([1.0, 2, 3]), "flag": np.array([1, 0], np.int8)}
        np.testing.assert_equal(env.reset(seed=1)[0], wanted)
        np.testing.assert_equal(env.step(wanted)[:2], (wanted, 0.5))
        env._reply(action=encoded(space, wanted))
    assert seen[0] == ({name: each.tolist() for name, each in wanted.items()},) * 2


@given(data=st.data())
def test_changed_raw_messages_are_messages_or_one_short_error(data: Any) -> None:
    message = {"n": 1, "begin": {"a": np.zeros((2, 3), np.uint8), "b": [1.5, None]}, "info": {1: (2, b"x", 1j)}}
    sent = bytearray(host.encoded(message))
    for _ in range(data.draw(st.integers(1, 4))):
        sent[data.draw(st.integers(8, len(sent) - 1))] = data.draw(st.sampled_from(b'0123459-[]{}":,adtpbcgx<|fuSU '))
    found = messages_of(bytes(sent), [], "raw")
    assert all(isinstance(each, dict) for each in found[:-1])
    assert not found or isinstance(found[-1], dict) or len(found[-1]) < 300


@pytest.mark.parametrize("value", [np.zeros(0, "<U400000000"), np.zeros((0, 2)), np.zeros(2, "S9"), np.array([1j, 2])])
def test_an_observation_of_another_kind_is_refused_before_it_takes_memory(value: Any) -> None:
    with pytest.raises(ValueError, match=r"begin must have the shape \(2,\) and fit uint8"):
        decoded(Box(0, 255, (2,), np.uint8), value, "begin")


@pytest.mark.parametrize("dtype", ["|b1", "|i1", "<i2", ">i4", "<u8", "<f2", ">f4", "<f8"])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (0,), (2, 0, 3), (2, 3, 0)])
def test_the_client_in_python_reads_arrays_of_every_kind(dtype: str, shape: tuple[int, ...]) -> None:
    sent = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    assert served_client._value({"a": [dtype, list(shape)]}, [sent.tobytes()]) == sent.tolist()


# ---- programs that play ------------------------------------------------------------------------

LINE = Box(0, 10, (2,), np.float32), Discrete(3)
PYTHON = """
import sys
sys.path.insert(0, sys.argv[1])
from served_client import Client
client = Client()
while True:
    place, goal = 5, client.seed % 11
    action, t = client.begin([place, goal]), 0
    while action is not None:
        t, place = t + 1, min(10, max(0, place + action - 1))
        if place == goal or t == 20:
            client.end([place, goal], float(place == goal), "terminated" if place == goal else "truncated")
            break
        action = client.act([place, goal], 0.0)
"""


STARTED = [sys.executable, "-I", "-c", PYTHON, str(EXAMPLES)]


def command_of_client(language: str, folder: Path) -> list[str]:
    if language == "c":
        compiler = shutil.which("cc") or pytest.skip("no C compiler")
        warnings = ["-std=gnu99", "-Wall", "-Wextra", "-Werror"]
        subprocess.run([compiler, *warnings, "-O1", "-o", folder / "client", EXAMPLES / "served_client.c"], check=True)
        return [str(folder / "client")]
    if language == "godot":
        engine = shutil.which("godot3-server") or pytest.skip("no Godot: apt-get install godot3-server")
        return [engine, "--script", str(EXAMPLES / "served_client.gd")]
    return STARTED


def walk(env: ServedGame, n: int) -> list[int]:
    """Plays `n` episodes of the walk to a goal, the first with a seed and every fourth badly. Returns the goals."""
    goals = []
    for episode in range(n):
        (place, goal), _ = env.reset(seed=None if episode else 3)
        goals.append(int(goal))
        for t in range(1, 21):
            action = 2 if episode % 4 == 3 else int(np.sign(goal - place)) + 1
            expected = min(10, max(0, place + action - 1))
            (place, same_goal), reward, terminated, truncated, _ = env.step(action)
            assert (place, same_goal) == (expected, goal)
            assert reward == terminated == (place == goal)
            assert truncated == (t == 20 and not terminated)
            if terminated or truncated or (episode % 5 == 4 and t == 2):  # or the learner ends the episode
                break
    return goals


@pytest.mark.parametrize("language", ["python", "c", "godot"])
def test_a_client_plays_in(served: Any, language: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # Godot writes its logs here
    command, env, goals = command_of_client(language, tmp_path), served(*LINE, token="secret"), []
    environ = {**os.environ, "PENSTOCK_PORTS": str(env.port), "PENSTOCK_TOKEN": "secret"}
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        with contextlib.closing(env):
            for _ in range(3):
                if goals:
                    lose_connection(env)  # it comes back
                goals.append(walk(env, 20))
        assert "the environment is closed" in process.communicate(timeout=20)[1]
    assert goals[0] == goals[1] == goals[2]
    assert len(set(goals[0])) > 3


def lose_connection(env: Any) -> None:
    # The network's part: neither side has closed it.
    env._client._socket.shutdown(socket.SHUT_RDWR)


def pid_of_game(env: Any) -> int:
    return int(env._game.pid)


# ---- clients that do not come, stall, vanish, come back ---------------------------------------


def _error(call: Callable[[], object]) -> str:
    with pytest.raises(GameError) as caught:
        call()
    return str(caught.value)


def test_no_client_comes(served: Any) -> None:
    env = served(wait=0.2, reply_timeout=0.1)
    assert _error(env.reset) == f"no client came to port {env.port} within wait=0.2 s"
    with Raw(env) as silent:
        assert "did not say hello in time" in _error(env.reset)
        assert silent.read() == {"error": "it did not say hello in time"}


def test_a_client_is_silent(served: Any) -> None:
    env = served(reply_timeout=0.2)
    where = f"the client at port {env.port} sent nothing for reply_timeout=0.2 s after message"
    with Raw(env, hello=2) as client:
        assert _error(env.reset) == f"{where} 0"
        assert client.read()["welcome"] == 2
        assert client.read() == {"error": f"{where} 0"}
        assert client.read() is None
    with playing(env) as client:
        assert _error(lambda: env.step(0)) == f"{where} 1"
    with playing(env) as client:
        client.write(b'{"n": 2, "obs"')
        assert _error(lambda: env.step(0)) == f"""{where} 1; 14 bytes of a message came: b'{{"n": 2, "obs"'"""


def test_a_client_that_drips_is_too_slow(served: Any) -> None:
    env, stop = served(reply_timeout=0.3), threading.Event()
    with playing(env) as client:

        def drip() -> None:
            with contextlib.suppress(OSError):
                while not stop.wait(0.01):
                    client.write(b" ")

        with game(drip):
            assert "sent nothing for reply_timeout=0.3 s after message 1; " in _error(lambda: env.step(0))
            stop.set()


def test_beats_give_a_slow_client_time(served: Any) -> None:
    env = served(reply_timeout=0.3)
    with playing(env) as client:

        def beat() -> None:
            for _ in range(6):
                threading.Event().wait(0.1)
                client.send(beat=True)
            client.send(n=2, obs=OBS, reward=1)

        with game(beat):
            assert env.step(0)[1] == 1


def test_a_slow_learner_is_no_fault(served: Any) -> None:
    env = served(reply_timeout=0.2, reconnect=0.2)
    with playing(env) as client:
        assert client.read()["welcome"] == 2
        threading.Event().wait(0.5)
        client.send(beat=True)
        with game(lambda: (client.read(), client.send(n=2, obs=OBS, reward=1))):
            env.step(3)


def test_a_client_comes_back_with_its_session_only(served: Any) -> None:
    env = served()
    with playing(env) as client:
        session = client.read()["session"]
        client.send(n=2, obs=OBS, reward=1)
        env.step(3)
        assert client.read() == {"n": 1, "action": 3}
    with Raw(env, hello=2, session="0123") as wrong, Raw(env, hello=2, session=session) as again:
        again.send(n=2, obs=OBS, reward=1)  # the answer may have been lost
        with game(lambda: (again.read(), again.read(), again.send(n=3, obs=OBS, reward=2))) as seen:
            assert env.step(1)[1] == 2
        assert seen[0][1] == {"n": 2, "action": 1}
        assert wrong.read() == {"error": "another client plays here"}


def test_a_client_comes_back_before_the_loss_is_noticed(served: Any) -> None:
    env = served()
    with playing(env) as client:
        with Raw(env, hello=2, session=client.read()["session"]) as again:
            again.send(n=1, begin=OBS)
            with game(lambda: (again.read(), again.read(), again.send(n=2, obs=OBS, reward=2))) as seen:
                assert env.step(1)[1] == 2
            assert seen[0][1] == {"n": 1, "action": 1}
        assert client.read() in (None, {"n": 1, "action": 1})


def test_a_client_does_not_come_back(served: Any) -> None:
    env = served(reconnect=0.2)
    playing(env).close()
    text = f"the client at port {env.port} was lost after message 1, and did not come back within reconnect=0.2 s"
    assert _error(lambda: env.step(0)) == text
    with playing(env) as client:
        client.send(n=2, obs=OBS, reward=1, end="terminated")
        assert env.step(0)[2]


def test_a_second_client_is_refused_and_the_first_stays(served: Any) -> None:
    env = served()
    with playing(env) as client, Raw(env, hello=2) as second:
        with game(lambda: (second.read(), client.send(n=2, obs=OBS, reward=1))) as seen:
            env.step(0)
        assert seen[0][0] == {"error": "another client plays here"}


def test_many_connections_that_say_nothing_do_not_keep_a_client_out(served: Any) -> None:
    env = served()
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(Raw(env)) for _ in range(40)]
        stack.enter_context(playing(env))
        assert idle[0].read() == {"error": "too many others came before it said hello"}


# ---- games that the environment starts ---------------------------------------------------------


def test_the_environment_starts_its_game_and_starts_it_again(served: Any) -> None:
    env, goals = served(*LINE, token="secret", command=STARTED, wait=10), []
    pids = set()
    for _ in range(2):
        goals.append(walk(env, 6))
        pids.add(pid_of_game(env))
        os.kill(pid_of_game(env), signal.SIGKILL)
        text = _error(lambda: walk(env, 2))
        assert re.match(r"the game \(pid \d+, port \d+\) ended with SIGKILL\n  command: ", text)
    assert goals[0] == goals[1]
    assert len(pids) == 2
    env.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_nobody_but_the_game_that_the_environment_starts_can_be_the_client(served: Any) -> None:
    """Also without `token`: the game has a random one in its environment."""
    env = served(*LINE, command=STARTED, wait=10)
    with Raw(env) as stranger:
        stranger.write(b'{"hello": 2}\n{"n": 1, "begin": [0, 0, 0]}\n')
        goal = walk(env, 6)
        assert stranger.read() == {"error": "its token is wrong: it must be the text in the variable PENSTOCK_TOKEN"}
    env.close()
    again = served(*LINE, command=STARTED, wait=10, token="secret", inherit_env=["PATH"])
    assert walk(again, 6) == goal
    names = psutil.Process(pid_of_game(again)).environ().keys()
    assert "PENSTOCK_TOKEN" in names
    assert "HOME" not in names


@pytest.mark.parametrize(
    ("program", "what"),
    [
        ("print('no licence'); raise SystemExit(3)", "ended with exit code 3"),
        ("import time; time.sleep(60)", "was disconnected: no client came to port"),
        ("import os, socket\ns = socket.create_connection(('127.0.0.1', {port}))\n"
         "s.sendall(b'pong\\n')\nprint('no licence', flush=True)\ns.recv(999)", "no JSON object: b'pong"),
    ],
)  # fmt: skip
def test_a_game_that_does_not_play(served: Any, program: str, what: str) -> None:
    env = served(*LINE, command=[sys.executable, "-Ic", program], wait=0.8)
    text = _error(env.reset)
    assert what in text
    if "no licence" in program:
        assert "| no licence" in text


class Walk(ServedGame):
    def pid_of_game(self) -> int:
        return pid_of_game(self)


def make_walk(context: Any) -> Walk:
    return Walk(*LINE, command=STARTED, token="secret", wait=30)


@pytest.mark.slow
def test_served_games_in_a_sampler_play_the_same_batches_and_are_renewed() -> None:
    """Four environments in two workers or in one process, each with a game at a port of its own. One game is killed."""
    batches = []
    for cls in (SerialSampler, ParallelSampler):
        with sampler_of(cls, make_walk, batch_T=20, spaces=LINE, on_game_failure="renew") as sampler:
            sampler.initialize(RandomAgent(), seed=3)
            assert len(set(sampler.get_attr("port"))) == 4
            batches.append(without_infos(collect(sampler, 2)))
            if cls is ParallelSampler:
                os.kill(sampler.call("pid_of_game")[1], signal.SIGKILL)
                ((cut, _),) = collect(sampler, range(2, 3))
                assert np.argwhere(~cut.env.valid).tolist() == [[0, 1]]
                assert (sampler.stats().renewals, sampler.stats().cut_episodes) == (1, 1)
    assert_same(*batches)


# ---- rubbish ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"rubbish\n", r"no JSON object: b'rubbish\n'"),
        (b"\xff\xfe" + b"x" * 200 + b"\n", r"no JSON object: b'\xff\xfe" + "x" * 58 + "'"),
        (b"[1, 2]\n", "no JSON object"),
        (b"[" * 100_000 + b"\n", "no JSON object"),
        (b'{"n": ' + b"9" * 10_000 + b"}\n", "no JSON object"),
        (b'{"n": 3, "obs": [0, 0, 0], "reward": 1}\n', "a message with n=2 and 'obs' must follow, got {'n': 3"),
        (b'{"n": 1, "begin": [0, 0, 0]}\n', "a message with n=2 and 'obs' must follow, got {'n': 1"),
        (b'{"n": true, "obs": [0, 0, 0], "reward": 1}\n', "a message with n=2 and 'obs' must follow"),
        (b'{"n": 2, "begin": [0, 0, 0]}\n', "a message with n=2 and 'obs' must follow, got {'n': 2, 'begin'"),
        (b'{"bye": "tired"}\n', "a message with n=2 and 'obs' must follow, got {'bye': 'tired'}"),
        (b'{"n": 2, "obs": [0, 0], "reward": 1}\n', "obs must have the shape (3,) and fit float32, got [0, 0]"),
        (b'{"n": 2, "obs": [0, [1], 0], "reward": 1}\n', "obs must have the shape (3,)"),
        (b'{"n": 2, "obs": [0, null, 0], "reward": 1}\n', "obs must have the shape (3,)"),
        (b'{"n": 2, "obs": ["a", "b", "c"], "reward": 1}\n', "obs must have the shape (3,)"),
        (b'{"n": 2, "obs": [0, 0, 1e300], "reward": 1}\n', "obs must have the shape (3,) and fit float32"),
        (b'{"n": 2, "obs": {"a": ["<f4", [3]]}, "reward": 1}\n', "obs must have the shape (3,)"),
        (b'{"n": 2, "obs": [0, 0, 0]}\n', "reward must be a finite number, got None"),
        (b'{"n": 2, "obs": [0, 0, 0], "reward": true}\n', "reward must be a finite number, got True"),
        (b'{"n": 2, "obs": [0, 0, 0], "reward": NaN}\n', "reward must be a finite number, got nan"),
        (b'{"n": 2, "obs": [0, 0, 0], "reward": -Infinity}\n', "reward must be a finite number, got -inf"),
        (b'{"n": 2, "obs": [0, NaN, 0], "reward": 1}\n', "obs must have the shape (3,) and fit float32"),
        (b'{"n": 2, "obs": [0, 0, 0], "reward": 1' + b"0" * 400 + b"}\n", "int too large to convert to float"),
        (b'{"n": 2, "obs": [0, 0, 0], "reward": 1, "end": true}\n', 'end must be "terminated" or "truncated"'),
        (b'{"n": 2, "obs": [0, 0, 0], "reward": 1, "info": 3}\n', "info must have names and values, got 3"),
    ],
)
def test_rubbish_is_named(served: Any, line: bytes, what: str) -> None:
    env = served()
    with playing(env) as client:
        client.write(line)
        text = _error(lambda: env.step(0))
        assert text.startswith(f"the client at port {env.port} sent something wrong after message ")
        assert what in text
        assert client.read()["welcome"] == 2
        assert client.read() in ({"n": 1, "action": 0}, {"error": text})
    with playing(env):
        pass  # another client may come


@pytest.mark.parametrize(
    ("value", "fits"),
    [([1.0, 255], True), ([-1, 0], False), ([256, 0], False), ([0.5, 0], False), ([float("nan"), 0], False)],
)
def test_integers_keep_their_values(served: Any, value: list[Any], fits: bool) -> None:
    env = served(Box(0, 255, (2,), np.uint8))
    with Raw(env, hello=2) as client:
        client.send(n=1, begin=value)
        if fits:
            np.testing.assert_array_equal(env.reset()[0], np.array(value, np.uint8))
        else:
            assert "begin must have the shape (2,) and fit uint8" in _error(env.reset)


def test_an_action_that_json_cannot_hold_is_the_learners_fault(served: Any) -> None:
    env = served(action=Box(-1, 1, (2,), np.float32))
    with playing(env) as client:
        with pytest.raises(SpaceError, match="an action for a game must have finite numbers"):
            env.step(np.array([0, np.nan], np.float32))
        client.send(n=2, obs=OBS, reward=1)
        env.step(np.zeros(2, np.float32))


def test_a_client_waits_after_a_loss_and_not_only_after_its_call(served: Any) -> None:
    """The learner takes longer than the client's `wait`; then the connection is lost, and the client comes back."""
    env = served()
    port = env.port

    def play() -> Any:
        client = served_client.Client(port, wait=0.5)
        return client.begin(OBS), client.act(OBS, 1.0), client.bye()

    with game(play) as seen:
        env.reset(seed=1)
        threading.Event().wait(0.8)
        lose_connection(env)
        env.step(2)
        env._reply(action=3)
        env.close()
    assert seen[0][:2] == (2, 3)


def test_a_client_that_does_not_wait_for_answers_is_named(served: Any) -> None:
    env = served()
    with Raw(env, hello=2) as client:
        for n in range(1, 4):
            client.send(n=n, **({"begin": OBS} if n == 1 else {"obs": OBS, "reward": 1}))
        env.reset()
        assert "it did not wait for the answer, but sent {'n': 2" in _error(lambda: [env.step(0), env.step(0)])


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        (b"GET / HTTP/1.1\n", "no JSON object: b'GET / HTTP/1.1\\n'"),
        (b"\x80\x04\x95" + b"\0" * 4093, "a message of 4,097 bytes or more, the limit is 4,096: b'\\x80\\x04\\x95"),
        (b'{"hello": 1}\n', "it must say hello with protocol 2, got {'hello': 1}"),
        (b'{"n": 1, "begin": [0, 0, 0]}\n', "it must say hello with protocol 2"),
        (b'{"hello": 2, "session": "17"}\n', "this session has ended"),
        (b'{"hello": 2, "format": "pickle"}\n', 'format must be "json" or "raw", got \'pickle\''),
        (
            b'{"hello": 2, "spaces": {"action": {"n": 5, "start": 0}}}\n',
            "the space of action is {'n': 4, 'start': 0} here",
        ),
        (b'{"hello": 2, "spaces": {"observation": {"shape": [4]}}}\n', "the space of observation is {'shape': [3]"),
        (b'{"hello": 2, "spaces": 5}\n', "and 5 in its hello"),
    ],
)
def test_a_wrong_hello_is_refused(served: Any, hello: bytes, why: str) -> None:
    env = served(wait=0.3)
    with Raw(env) as client:
        client.write(hello)
        assert why in _error(env.reset)
        assert why in client.read()["error"]


def test_a_token_is_checked_first_and_within_4_kib(served: Any) -> None:
    env = served(token="secret", wait=0.2)
    for hello in ({"hello": 2}, {"hello": 2, "token": "Secret"}, {"hello": 1, "token": ["secret"]}):
        with Raw(env, **hello) as client:
            assert "its token is wrong" in _error(env.reset)
            assert client.read() == {"error": "its token is wrong"}
    with Raw(env) as client:
        client.write(b" " * 4096 + b'{"hello": 2, "token": "secret"}\n')
        assert "a message of 4,097 bytes or more" in _error(env.reset)
    playing(env, token="secret", spaces={"action": {"n": 4, "start": 0}}).close()


def test_messages_have_a_limit(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env = served()
    with playing(env, format="raw") as client:
        client.write(struct.pack("<IIB", 5, (64 << 20) - 13, 0))
        assert "a message of 67,108,865 bytes or more" in _error(lambda: env.step(0))
    with playing(env, format="raw") as client:
        client.write(struct.pack("<IIB", 5, 1 << 31, 0))
        assert "2,147,483,648 bytes of arrays is too large" in _error(lambda: env.step(0))
    monkeypatch.setattr("penstock.games.served.MAX_MESSAGE", 100_000)
    with playing(env) as client:
        client.write(b"[" + b" " * 100_000)
        assert "a message of 100,001 bytes or more, the limit is 100,000: b'[   " in _error(lambda: env.step(0))


# ---- any bytes, cut anywhere -------------------------------------------------------------------


class Pieces:
    """A socket that gives bytes in pieces of these sizes, and then no more."""

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self.data, self.sizes = data, sizes

    def recv(self, n: int) -> bytes:
        n = min(n, self.sizes.pop(0)) if self.sizes else n
        piece, self.data = self.data[:n], self.data[n:]
        return piece

    def send(self, data: bytes) -> int:
        return len(data)

    def setblocking(self, flag: bool) -> None: ...

    def setsockopt(self, *_: object) -> None: ...


def messages_of(data: bytes, sizes: list[int], form: str, limit: int = 0) -> list[Any]:
    """What a connection makes of the bytes: dicts, and an error at the end if there is one."""
    connection, found = GameClient(Pieces(data, list(sizes)), 1.0), list[Any]()  # type: ignore[arg-type]
    connection.begin({}, form)
    if limit:
        connection._limit = limit
    is_open = True
    while is_open:
        is_open = connection.read()
        try:
            while (message := connection.message()) is not None:
                found.append(message)
        except ValueError as error:
            return [*found, str(error)]
    return found


sizes = st.lists(st.integers(1, 9), max_size=200)
forms = st.sampled_from(["json", "raw"])
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(sent=st.lists(st.dictionaries(st.text(), plain, max_size=4), max_size=5), sizes=sizes, form=forms)
def test_messages_do_not_depend_on_how_they_are_cut(sent: list[Any], sizes: list[int], form: str) -> None:
    data = b"".join(framed(message, raw=form == "raw") for message in sent)
    assert messages_of(data, sizes, form) == sent


@given(data=st.binary(max_size=400), sizes=sizes, form=forms, limit=st.sampled_from([0, 20, 100]))
def test_rubbish_gives_messages_or_one_short_error(data: bytes, sizes: list[int], form: str, limit: int) -> None:
    found = messages_of(data, sizes, form, limit)
    assert all(isinstance(message, dict) for message in found[:-1])
    assert not found or isinstance(found[-1], dict) or len(found[-1]) < 300


@given(cut=st.integers(0, 200), sizes=sizes, form=forms)
def test_a_message_that_was_cut_is_none(cut: int, sizes: list[int], form: str) -> None:
    data = framed({"n": 2, "obs": [0.5] * 30, "reward": 1.0}, raw=form == "raw")
    assert messages_of(data[: min(cut, len(data) - 1)], sizes, form) == []


spaces = st.sampled_from(
    [FLOATS, Box(0, 255, (2, 3), np.uint8), Discrete(4), MultiBinary(3), Box(-1, 1, (), np.float32)]
)


@given(space=spaces, value=plain | st.binary() | st.builds(np.array, st.lists(st.floats(), max_size=3)))
def test_any_value_becomes_an_observation_of_the_space_or_an_error(space: Any, value: Any) -> None:
    with contextlib.suppress(ValueError):
        found = np.asarray(decoded(space, value, "obs"))
        assert (found.shape, found.dtype) == (space.shape, space.dtype)


@given(space=spaces | st.just(Dict(a=FLOATS, b=Tuple([Discrete(2), FLOATS]))), seed=st.integers(0, 99), form=forms)
def test_samples_come_back_as_they_were(space: Any, seed: int, form: str) -> None:
    space.seed(seed)
    value = space.sample()
    sent = (
        encoded(space, value)
        if form == "raw"
        else json.loads(json.dumps(encoded(space, value), default=np.ndarray.tolist))
    )
    (message,) = messages_of(framed({"obs": sent}, raw=form == "raw"), [], form)
    np.testing.assert_equal(decoded(space, message["obs"], "obs"), value)


# ---- arguments, order, end ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"port": True}, "port must be an integer"),
        ({"port": 70_000}, "port must be at most 65,535"),
        ({"token": ""}, "token must be a text"),
        ({"token": "x" * 513}, "token must be a text of 1 to 512"),
        ({"token": 'a"b'}, "without spaces, quotes and backslashes"),
        ({"token": "\u00e9"}, "signs of ASCII"),
        ({"token": b"x"}, "token must be a text"),
        ({"host": "0.0.0.0"}, "other machines can connect to host '0.0.0.0': give token="),
        ({"host": "example.org"}, "other machines can connect"),
        ({"wait": 0}, "wait must be a positive number of seconds"),
        ({"reply_timeout": float("nan")}, "reply_timeout must be a positive number"),
        ({"reconnect": -1}, "reconnect must be a positive number"),
        ({"observation": Text(3)}, "a ServedGame cannot send values of Text"),
    ],
)
def test_wrong_arguments(served: Any, options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(what)):
        served(**options)


def test_calls_out_of_order(served: Any) -> None:
    env = served()
    with pytest.raises(SamplerStateError, match="call reset"):
        env.step(0)
    with playing(env) as client:
        client.send(n=2, obs=OBS, reward=1, end="truncated")
        assert env.step(0)[3]
        with pytest.raises(SamplerStateError, match="call reset"):
            env.step(0)
        with pytest.raises(ValueError):  # the action's fault, not the client's
            client.send(n=3, begin=OBS)
            env.reset()
            env.step([1, 2])
        client.send(n=4, obs=OBS, reward=1)
        env.step(1)


def test_closing_frees_the_port_at_once(served: Any) -> None:
    """Also while a client is connected, or has just been refused: no connection stays in TIME_WAIT."""
    env = served()
    port = env.port
    for _ in range(3):
        with playing(env) as client, Raw(env):
            env.close()
            env.close()
            assert client.read()["welcome"] == 2
            assert client.read() == {"error": "the environment is closed"}
        env = served(port=port)
        assert env.port == port


def test_listening_at_other_addresses(served: Any) -> None:
    env = served(host="0.0.0.0", token="secret")
    playing(env, token="secret").close()
    if socket.has_ipv6:
        env = served(host="::1")
        with socket.create_connection(("::1", env.port)):
            pass
