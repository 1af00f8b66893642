"""One game: its start, its ports, its replies, its errors, its end. The server is tests/programs/faulty_game.py."""

from __future__ import annotations

import gc
import json
import os
import pickle
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock import ConfigError, GameError, ParallelSampler, RandomAgent, system
from penstock.envs import CountingEnv
from penstock.games import GameProcess, game_process, lease_port
from penstock.workers import marking

from ..children import exit_code_of_fork
from ..scale import scaled, some
from ..support import BOUND, PROGRAMS, until
from .games_support import COMMAND, SERVER, SHORT, game, play, processes

pytestmark = pytest.mark.xdist_group("ports")


@pytest.fixture(autouse=True)
def no_game_left(tmp_path: Path) -> Any:
    before = set(processes())
    yield
    assert set(processes()) <= before


def test_a_game_is_played_and_ends() -> None:
    with game() as own:
        connection = own.connect()
        assert play(connection, 3) == [1, 2, 3]
        assert own.tail() == ["starting ", "listening"]
        assert own.rss() > 1_000_000
        pid, ports = own.pid, own.ports
        assert list(processes(f"{SERVER}\0{ports[0]}")) == [pid]
    lease_port(ports[0], ports[0] + 1, timeout=0).release()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    own.close()
    with pytest.raises(GameError, match="was closed"):
        own.connect()


@pytest.mark.parametrize(
    ("fault", "says", "last"),
    [
        ("exit", "ended with exit code 7", "the fault is exit"),
        ("crash", "ended with SIGSEGV", "the fault is crash"),
        ("hang", r"sent no reply within reply_timeout=1 s; it runs \(0\.\d+ GB\)", "the fault is hang"),
        ("drip", r"sent no reply within reply_timeout=1 s; it runs", "the fault is drip"),
        ("spout", r"sent (no reply within|a line of more than 64 MiB)", "the fault is spout"),
        ("orphan", "ended with exit code 9", "the fault is orphan"),
        ("vanish", "closed the connection, but still runs", "the fault is vanish"),
        ("twice", r"sent \d+ bytes without being asked: b'\{", "the fault is twice"),
        ("die_at_start", "ended with exit code 3 before it was ready", "cannot open display"),
        ("never_ready", r"was not ready in start_timeout=1 s: it runs.*\(ready='listens'\)", "starting never_ready"),
    ],
)
def test_an_error_says_what_has_happened(fault: str, says: str, last: str) -> None:
    with game(fault, start_timeout=1.0 if fault == "never_ready" else 30.0) as own:
        pid, (port,) = own.pid, own.ports
        began = time.monotonic()
        with pytest.raises(GameError, match=says) as caught:
            play(own.connect(), 9)
        assert time.monotonic() - began < 8
        text = str(caught.value)
        assert text.startswith(f"the game (pid {pid}, port {port}) ")
        assert f"\n  command: {sys.executable} -I -S {SERVER} {port} {fault}\n" in text
        assert text.endswith(f"\n  | {last}")
        assert isinstance(pickle.loads(pickle.dumps(caught.value)), GameError)


@pytest.mark.slow
def test_after_an_error_no_late_reply_is_taken_for_another() -> None:
    with game("late", reply_timeout=0.1) as own:
        connection = own.connect()
        assert play(connection, 4) == [1, 2, 3, 4]
        with pytest.raises(GameError, match="sent no reply"):
            play(connection, 1)
        with pytest.raises(GameError, match="sent no reply"):
            play(connection, 1)
        own.renew()
        assert own.renewal == 1
        with pytest.raises(GameError, match="no reply"):
            play(connection, 1)
        connection = own.connect()
        play(connection, 4)
        with pytest.raises(GameError, match=r"\) \(renewal 1\) sent no reply"):
            play(connection, 1)


def test_a_reply_that_nobody_asked_for_is_noticed_before_the_next_request() -> None:
    with game() as own:
        connection = own.connect()
        connection.send(b"[1]\n")
        assert select.select([connection.socket], [], [], BOUND)[0]
        with pytest.raises(GameError, match=r"sent \d+ bytes without being asked: b'\{\"n\": 1"):
            connection.request(b"[2]\n")


@pytest.mark.slow
def test_a_game_that_does_not_read() -> None:
    with game(reply_timeout=0.2) as own:
        connection = own.connect()
        connection.send(b'{"fault": "hang"}\n')
        with pytest.raises(GameError, match=r"did not read the request within reply_timeout=0\.2 s; it runs"):
            connection.request(b"1" * 20_000_000 + b"\n")


@pytest.mark.slow
def test_a_late_start_and_replies_in_parts() -> None:
    with game("late_start") as own:
        connection = own.connect()
        long = b"[" + b"1, " * 100_000 + b"1]\n"
        assert len(json.loads(connection.request(long))["got"]) == 100_001
        connection.send(b"[1]\n[2]\n")
        wanted = b'{"n": 2, "got": [1]}\n{"n": 3, "got": [2]}\n'
        assert connection.receive(len(wanted)) == wanted


def size_on_disk(own: GameProcess) -> int:
    log: Any = own._run.output
    return os.fstat(log.file.fileno()).st_blocks * 512


@pytest.mark.parametrize("has_holes", [True, False])
def test_a_log_stays_short_also_if_nobody_asks_the_game_anything(
    has_holes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_holes:
        monkeypatch.setattr(system, "punch", lambda *_: False)
    line, ready = "y" * 99, re.compile("y")
    with GameProcess(["yes", line], ports=0, ready=ready) as own, GameProcess(["yes", "z"], ports=0, ready=ready):
        log: Any = own._run.output
        sizes = list[int]()

        def has_grown() -> bool:  # without holes, the file begins again
            sizes.append(os.fstat(log.file.fileno()).st_size)
            return sizes[-1] > 100_000_000 if has_holes else sum(a > b for a, b in pairwise(sizes)) >= 3

        until(has_grown, "output")
        os.kill(own.pid, signal.SIGSTOP)
        until(lambda: size_on_disk(own) <= 2 << 20, "the cut of the log")
        until(lambda: own.tail(3)[1:2] == [line] and len(own.output(1 << 20)) >= 1 << 16, "the end of the output")


def test_a_log_with_a_name_keeps_everything(tmp_path: Path) -> None:
    with game("", log_file=tmp_path / "log") as own, game():
        own.connect().request(b'{"fault": "flood"}\n')
        assert own.end_episode() is False
    assert (tmp_path / "log").read_text().count("y" * 99 + "\n") == 30_000
    assert (tmp_path / "log").stat().st_blocks * 512 >= 3_000_000


def test_a_fork_of_a_dead_game_that_holds_the_connection_costs_no_timeout() -> None:
    for part in (b"", b'{"n":'):
        with game("", reply_timeout=60.0) as own:
            connection, began = own.connect(), time.monotonic()
            connection.request(b"[1]\n")
            connection.send(b'{"fault": "orphan"}\n')
            with pytest.raises(GameError, match="ended with exit code 9"):
                connection.receive_line() if not part else connection.receive(99)
            assert time.monotonic() - began < scaled(3, 10)


def test_a_slow_reply_and_the_socket_itself_have_the_whole_time() -> None:
    with game("late", "1", reply_timeout=10.0) as own:
        connection = own.connect()
        assert play(connection, 2) == [1, 2]
        connection.socket.sendall(b"[1]\n")
        assert connection.socket.recv(100) == b'{"n": 3, "got": [1]}\n'
        assert json.loads(connection.request(b'{"fault": "late"}\n'))["n"] == 4, "the reply comes after 0.4 s"
        assert play(connection, 1) == [5]
        connection.socket.close()
        with pytest.raises(GameError, match="was closed"):
            connection.request(b"[1]\n")


def test_the_memory_of_children_counts_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    n, search = list[int](), system.marked_with

    def counted(mark: str) -> list[int]:
        n.append(1)
        return search(mark)

    monkeypatch.setattr(system, "marked_with", counted)
    with game("", max_rss="900 MB") as own:
        connection = own.connect()
        n.clear()
        for _ in range(5):
            assert not own.end_episode()
        assert len(n) == 1
        before = own.rss()
        connection.request(b'{"fault": "child"}\n')
        until(lambda: own.rss() > before + 500_000, "the memory of both children")
        assert len(n) == 1
        own._require_started()._search_at = 0.0
        assert own._require_started().known() == {*own._require_started().members()}


@pytest.mark.parametrize("fault", ["child", "ignore_term", "flood"])
def test_it_ends_for_certain(fault: str) -> None:
    """Also what ignores SIGTERM, and processes in sessions of their own."""
    with game("", environ={"MARK": f"mark-{fault}-{os.getpid()}"}) as own:
        connection = own.connect()
        connection.request(json.dumps({"fault": fault}).encode() + b"\n")
        if fault == "flood":
            assert own.tail(2) == ["y" * 99] * 2
            until(lambda: size_on_disk(own) <= 2 << 20, "the cut of the log")
            assert own.tail(2) == ["y" * 99] * 2
            assert play(connection, 1) == [2]
        n = 3 if fault == "child" else 1
        # Not at once: while a process calls exec, its environment variables cannot be read.
        until(lambda: len(list(processes(f"mark-{fault}-{os.getpid()}"))) == n, f"{n} processes of the game")
        began = time.monotonic()
    assert time.monotonic() - began < 2
    assert list(processes(f"mark-{fault}-{os.getpid()}")) == []


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("xvfb-run"), reason="no X server without a screen: apt-get install xvfb xauth")
def test_a_game_with_a_display_ends_with_its_x_server() -> None:
    connects = (
        "import os, socket; s = socket.socket(socket.AF_UNIX); number = os.environ['DISPLAY'][1:].split('.')[0]\n"
    )
    connects += "s.connect('/tmp/.X11-unix/X' + number); print('display', number, flush=True); s.recv(1)"
    command = ["xvfb-run", "-a", sys.executable, "-I", "-c", connects]
    with GameProcess(command, ports=0, ready=re.compile(r"display \d+\n")) as own:
        own.wait_ready()
        number = own.tail()[-1].split()[1]
        assert Path(f"/tmp/.X{number}-lock").exists()
    assert not Path(f"/tmp/.X{number}-lock").exists(), "the server has ended by itself, and cleaned up"


# ---- ports ---------------------------------------------------------------------------------


def test_places_of_ports_are_filled() -> None:
    program = (
        "import os, sys, time; print(sys.argv[1:], os.environ['OWN'], os.environ['PENSTOCK_PORTS'])"
        "; print('ready', flush=True); time.sleep(99)"
    )
    command = [sys.executable, "-c", program, "{port}", "-a={port0}:{port1}", "{ports}", "{other}", "{}"]
    ports: dict[str, Any] = {"ports": 2, "consecutive": True, "protocol": "udp"}
    with GameProcess(command, ready=re.compile("ready"), environ={"OWN": "p{port1}"}, **ports) as own:
        own.wait_ready()
        a, b = own.ports
        assert b == a + 1
        assert own.tail()[0].strip() == f"{[str(a), f'-a={a}:{b}', f'{a},{b}', '{other}', '{}']} p{b} {a},{b}"
        with pytest.raises(ConfigError, match="needs a TCP port, but protocol is 'udp'"):
            own.connect()
    says = r"connect needs a TCP port, but the game has ports=0: use wait_ready\(\)"
    with GameProcess(["sleep", "99"], ports=0, ready=re.compile("x")) as own, pytest.raises(ConfigError, match=says):
        own.connect()


@pytest.mark.slow
def test_a_game_gets_only_the_variables_that_it_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUD_SECRET", "key")
    monkeypatch.setenv("WANTED", "yes")
    for inherit_env, kept in ((None, {"CLOUD_SECRET", "WANTED"}), (["WANTED", "MISSING"], {"WANTED"}), ((), set())):
        options: dict[str, Any] = {"environ": {"OWN": "1"}, "inherit_env": inherit_env}
        with GameProcess(["sh", "-c", "echo done; sleep 60"], ports=0, ready=re.compile("done"), **options) as own:
            own.wait_ready()
            variables = psutil.Process(own.pid).environ()
            found = variables.keys()
            assert found & {"CLOUD_SECRET", "WANTED", "MISSING"} == kept
            assert {"OWN", "PENSTOCK_PORTS"} <= found
            marks = [name for name in found if name.startswith("PENSTOCK_PROCESS_") and variables[name] == "1"]
            assert len(marks) == 2, "it ends with this process, and with its object"
            others = [name for name in found if not name.startswith("PENSTOCK_PROCESS_")]
            assert len(others) == 2 + len(kept) or inherit_env is None


def test_a_port_that_is_taken_at_the_last_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    thieves: list[socket.socket] = []
    steals = 1

    def stolen(command: Any, environ: Any, **how: Any) -> marking.MarkedProcess:
        if len(thieves) < steals:
            thieves.append(socket.create_server(("127.0.0.1", int(environ["PENSTOCK_PORTS"]))))
        return marking.MarkedProcess(command, environ, **how)

    monkeypatch.setattr(game_process, "MarkedProcess", stolen)
    with game() as own:
        assert play(own.connect(), 2) == [1, 2]
        assert own.ports[0] != thieves[0].getsockname()[1]
    steals = 10
    with game() as own, pytest.raises(GameError) as caught:
        own.connect()
    says = r"was started 3 times, and each time another program had its port. The last one: port \d+, "
    says += "a process that cannot be seen from here" if system.PORTABLE else rf"pid {os.getpid()} \(.*\), this process"
    says += r"\. Give start= and stop= a range that nobody else uses\n"
    assert re.search(says, str(caught.value))
    assert len(thieves) == 4
    for thief in thieves:
        thief.close()


@pytest.mark.parametrize("kind", ["connects", "prints", "answers"])
def test_other_ways_to_be_ready(kind: str) -> None:
    client = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])));\n"
    client += "for line in s.makefile('rb'): s.sendall(line.upper())"
    if kind == "connects":
        with GameProcess([sys.executable, "-c", client, "{port}"], ready="connects", **SHORT) as own:
            assert own.connect().request(b"hello\n") == b"HELLO"
            with pytest.raises(GameError, match=rf"made no connection to port {own.ports[0]} within reply_timeout=1 s"):
                own.connect()
        return

    def answers(ports: tuple[int, ...]) -> bool:
        with socket.create_connection(("127.0.0.1", ports[0])) as trial:
            trial.sendall(b"[1]\n")
            return trial.recv(99).endswith(b"\n")

    ready = {"prints": re.compile(r"(?m)^lis.*ing$"), "answers": answers}[kind]
    with game(ready=ready) as own:
        assert play(own.connect(), 2) == [1, 2]


def test_a_shell_has_its_own_variables() -> None:
    command = ["sh", "-c", 'port="{port}"; echo "a ${port}"; sleep 99']
    with GameProcess(command, ready=re.compile("a")) as own:
        own.wait_ready()
        assert own.tail() == [f"a {own.ports[0]}"]


def test_a_game_that_should_connect_and_ends() -> None:
    says = "ended with exit code 4 before it was ready"
    with GameProcess(["sh", "-c", "exit 4"], ready="connects") as own, pytest.raises(GameError, match=says):
        own.connect()


@pytest.mark.slow
@pytest.mark.parametrize("timeout", [1e-9, float("inf")])
def test_extreme_limits(timeout: float) -> None:
    with game("late", "2", reply_timeout=timeout, stop_timeout=timeout, quit=lambda own: None) as own:
        if timeout == float("inf"):
            assert play(own.connect(), 2) == [1, 2]
            with own.deadline(timeout):
                own.kill()
        else:
            with pytest.raises(GameError, match=r"accepts no connection|sent no reply within reply_timeout=1e-09 s"):
                play(own.connect(), 2)


# ---- renewal -------------------------------------------------------------------------------


@pytest.mark.slow
def test_planned_renewal() -> None:
    with game(renew_every=2) as own:
        assert play(own.connect(), 2) == [1, 2]
        assert [own.end_episode() for _ in range(5)] == [False, True, False, True, False]
        assert own.renewal == 2
        assert play(own.connect(), 2) == [1, 2]
    with game(max_rss="150 MB", reply_timeout=10.0) as own:
        connection = own.connect()
        assert not own.end_episode()
        connection.request(b'{"fault": "leak"}\n')
        connection.request(b'{"fault": "leak"}\n')
        assert own.rss() > 200_000_000
        assert own.end_episode()
        connection = own.connect()
        for _ in range(4):
            connection.request(b'{"fault": "leak"}\n')
        connection._watch_at = 0.0  # otherwise it looks after 5 s
        with pytest.raises(GameError, match=r"uses 0\.4\d GB, more than twice max_rss=0.15 GB, in an episode"):
            play(connection, 1)


@pytest.mark.slow
def test_spares_are_ready_and_end_with_the_last_game() -> None:
    with game(spares=1) as own, game(spares=1) as other:
        own.connect(), other.connect()
        assert len(set(processes())) == 3
        (spare,) = set(processes()) - {own.pid, other.pid}
        own.renew()
        assert own.pid == spare
        assert play(own.connect(), 1) == [1]
        (spare,) = set(processes()) - {own.pid, other.pid}
        os.kill(spare, signal.SIGKILL)
        until(lambda: spare not in processes())
        own.renew()
        assert own.pid != spare
        assert play(own.connect(), 1) == [1]
    assert set(processes()) == set()


@pytest.mark.slow
def test_games_of_one_process_start_side_by_side_also_in_threads() -> None:
    """Each takes 0.3 s until it listens."""
    began = time.monotonic()
    games = [game("late_start") for _ in range(8)]
    assert time.monotonic() - began < 8 * 0.3
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda own: play(own.connect(), 3), games)) == [[1, 2, 3]] * 8
        assert time.monotonic() - began < 8 * 0.3 + 2.0
        list(pool.map(GameProcess.close, games))


@pytest.mark.slow
def test_each_client_of_a_match_has_a_connection_of_its_own() -> None:
    """A step of this game waits for all of them, so all lines are sent before the first reply is read."""
    command = [sys.executable, "-I", "-S", str(PROGRAMS / "match_server.py"), "{port0}", "{port1}"]
    with GameProcess(command, ports=2, consecutive=True, **SHORT) as own:
        seats = [own.connect(port) for port in range(2)]
        for t in range(1, 4):
            for number, seat in enumerate(seats):
                seat.send(b"%d\n" % (10 * t + number))
            found = [json.loads(seat.receive_line()) for seat in seats]
            assert found == [{"t": t, "other": 10 * t + 1}, {"t": t, "other": 10 * t}]


def test_a_deadline_frees_a_library_that_blocks() -> None:
    with game() as own:
        connection = own.connect()
        with own.deadline(5.0):
            play(connection, 1)
        connection.socket.settimeout(60)
        says = r"was killed, because the block `with game.deadline\(0.2\)` took longer"
        with pytest.raises(GameError, match=says), own.deadline(0.2):
            connection.socket.recv(10)  # as a library in C
        own.renew()
        with pytest.raises(ValueError, match="mine"), own.deadline(5.0):
            raise ValueError("mine")


# ---- misuse, forks, ends -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "options", "says"),
    [
        ("./game --port", {}, r'command must be a list such as \["./game", "--port", "\{port\}"\]'),
        ([], {}, "command must be a list"),
        (["sh", 3], {}, "command must be a list"),
        (["sh", "{port1}"], {}, r"needs \{port1\}, but the game has ports=1"),
        (["sh", "{port}"], {"ports": 0, "ready": re.compile("x")}, r"needs \{port\}, but the game has ports=0"),
        (["sh"], {"ports": 0}, "does not fit ports=0"),
        (["sh"], {"ports": True}, "ports must be an integer"),
        (["sh"], {"ready": "listening"}, 'ready must be "listens", "connects", re.compile'),
        (["sh"], {"ready": re.compile(b"x")}, "ready must be"),
        (["sh"], {"ready": ["listens"]}, "ready must be"),
        (["sh"], {"ready": "connects", "protocol": "udp"}, "does not fit"),
        (["sh"], {"protocol": "sctp"}, 'protocol must be "tcp" or "udp"'),
        (["sh"], {"start_timeout": float("nan")}, "start_timeout must be a positive number of seconds"),
        (["sh"], {"reply_timeout": -1}, "reply_timeout must be"),
        (["sh"], {"max_rss": "4 apples"}, 'max_rss must be a number of bytes, or text such as "4 GB"'),
        (["sh"], {"max_rss": 0}, "max_rss must be"),
        (["sh"], {"renew_every": 0}, "renew_every must be"),
        (["sh"], {"spares": -1}, "spares must be"),
        (["sh"], {"quit": 3}, "quit must be a function"),
        (["sh", "\0"], {}, "command must be a list"),
        (["sh", "--port={prot}"], {}, r"'--port=\{prot\}' has \{prot\}: did you mean \{port\}\?"),
        (["sh"], {"environ": {"AT": "{PORTS}"}}, r"'\{PORTS\}' has \{PORTS\}: did you mean \{ports\}\?"),
        (["sh"], {"environ": ["DISPLAY"]}, r"environ must have names and texts, such as .*, got \['DISPLAY'\]"),
        (["sh"], {"environ": {"DISPLAY": 1}}, "environ must have names and texts"),
        (["sh"], {"environ": {"A=B": "1"}}, "environ must have names and texts"),
        (["sh"], {"inherit_env": "PATH"}, r"inherit_env must be a list of names, such as .*, got \'PATH\'"),
        (["sh"], {"inherit_env": [1]}, "inherit_env must be a list of names"),
        (["sh"], {"cwd": 3}, "cwd must be a path or None, got 3"),
        (["sh"], {"cwd": b"/"}, "cwd must be a path or None, got b'/'"),
        (["sh"], {"log_file": ["log"]}, "log_file must be a path or None"),
        (["sh"], {"start": 5, "stop": 3}, "start and stop must be"),
    ],
)
def test_arguments_that_cannot_work(command: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        GameProcess(command, **options)


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "game").write_text("")
    for name, text in (("script", "#!/no/such/shell"), ("nothing", "")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for command, cwd, says in (
        ("./none", tmp_path, f"command not found: './none' (cwd '{tmp_path}'). Give its full path"),
        ("./script", tmp_path, f"command not found: './script' (cwd '{tmp_path}'). Give its full path. If it is a"),
        ("./nothing", tmp_path, f"'./nothing' (cwd '{tmp_path}') cannot be started: [Errno 8] Exec format error"),
        ("no-such-command", None, f"command not found: 'no-such-command' (cwd {os.getcwd()!r})"),
        ("./game", tmp_path, f"'./game' (cwd '{tmp_path}') is not executable: run chmod +x on it"),
        ("sh", tmp_path / "no", f"cwd='{tmp_path}/no' is no folder: give one that exists"),
    ):
        with pytest.raises(GameError, match="^" + re.escape(says)):
            GameProcess([command], cwd=cwd)


def test_output_may_go_to_a_file(tmp_path: Path) -> None:
    with game(log_file=tmp_path / "{port}.txt") as own:
        own.connect()
        file = tmp_path / f"{own.ports[0]}.txt"
    assert file.read_text() == "starting \nlistening\n"
    says = f"log_file='{tmp_path}/no/log' cannot be written: No such file or directory. Create its folder, or"
    with pytest.raises(GameError, match=re.escape(says)):
        game(log_file=tmp_path / "no" / "log")


@pytest.mark.slow
def test_quit_asks_the_game(tmp_path: Path) -> None:
    def ask(own: GameProcess) -> None:
        asked.append(own.pid)
        connection.send(b'{"fault": "exit"}\n')

    asked: list[int] = []
    with game("ignore_term", quit=ask, stop_timeout=5.0, log_file=tmp_path / "log") as own:
        connection, pid = own.connect(), own.pid
    assert asked == [pid]
    assert "the fault is exit" in (tmp_path / "log").read_text()

    def fail(own: GameProcess) -> None:
        raise RuntimeError("no menu")

    with pytest.warns(RuntimeWarning, match="quit of the game raised RuntimeError: no menu"), game(quit=fail) as own:
        own.connect()
    stop = threading.Event()
    waits: tuple[Any, ...] = (lambda own: connection.socket.recv(1), lambda own: stop.wait())
    for slow in waits:
        own, began = game(quit=slow), time.monotonic()
        connection = own.connect()
        with pytest.warns(RuntimeWarning, match="quit of the game took more than 0.2 s, so the game was killed"):
            own.close()
        assert time.monotonic() - began < 10, "also if the end of the game does not end it"
    stop.set()


def test_a_game_that_is_dropped_ends_with_a_warning() -> None:
    own = game()
    with pytest.raises(TypeError, match="belongs to the process"):
        pickle.dumps(own)
    assert re.fullmatch(r"<GameProcess '.*', pid \d+, ports \[\d+\]>", repr(own))
    with pytest.warns(ResourceWarning, match="was not closed"):
        own.__del__()


@pytest.mark.slow
def test_a_fork_does_not_touch_the_game() -> None:
    with game() as own:
        connection = own.connect()

        def in_fork() -> None:
            own.close()
            with pytest.raises(GameError):
                own.connect()

        assert exit_code_of_fork(in_fork) == 0
        assert play(connection, 2) == [1, 2]


# Python itself closes an object that an interrupt has taken from its new owner, and warns. An interrupt in a `__del__`
# is reported only.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_interrupt_at_any_moment_of_the_start_leaves_nothing() -> None:
    for k in range(1, scaled(300, 30)):
        wait = k % 60 * 0.0005
        timer = threading.Timer(wait, signal.raise_signal, [signal.SIGINT])
        own = None
        try:
            timer.start()
            own = game()
            own.connect()
            timer.join()
        except KeyboardInterrupt:
            pass
        finally:
            timer.join()
            if own is not None:
                own.close()
        del own
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("spelling", some(["exit", "kill", "exception"], 2))
def test_a_game_ends_with_the_script_that_started_it(spelling: str) -> None:
    mark = f"script-{spelling}-{os.getpid()}"
    end = {"exit": "", "kill": "os.kill(os.getpid(), 9)", "exception": "raise SystemExit(3)"}[spelling]
    script = f"""
import os
from penstock.games import GameProcess
game = GameProcess({[*COMMAND, "", "1"]!r}, environ={{"MARK": {mark!r}}})
game.connect().request(b'{{"fault": "child"}}\\n')
print(game.pid, flush=True)
game.__class__.__del__ = lambda self: None  # the end of the process must be enough
{end}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip().isdigit(), done.stderr
    until(lambda: not list(processes(mark)), "the end of the game", 5.0)


class Saves(CountingEnv):
    """Its game saves for longer than a worker usually has to exit."""

    def __init__(self, saved: Path) -> None:
        super().__init__()

        def save(own: GameProcess) -> None:
            time.sleep(2)
            saved.touch()
            own.kill()

        self.game = GameProcess(["sleep", "1000"], ports=0, ready=lambda ports: True, quit=save, stop_timeout=30)

    def close(self) -> None:
        self.game.close()


@pytest.mark.slow
def test_a_game_may_save_in_a_worker_as_long_as_its_stop_timeout_says(tmp_path: Path) -> None:
    saved, example = tmp_path / "saved", CountingEnv()
    spaces = example.observation_space, example.action_space
    with ParallelSampler(partial(Saves, saved), batch_T=1, batch_B=1, spaces=spaces, close_timeout=0.1) as sampler:
        sampler.initialize(RandomAgent())
    assert saved.exists()
