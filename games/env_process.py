"""EnvProcess: a Gymnasium environment in a process of its own, and if wanted in a Python of its own."""

from __future__ import annotations

import hmac
import mmap
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces as kinds

from penstock import system
from penstock.arguments import must_be, seconds
from penstock.buffers import pickling
from penstock.buffers.descriptors import InheritedFd
from penstock.envs.examples import checked_spaces
from penstock.envs.seeding import Purpose, fresh_seed
from penstock.errors import ConfigError, EnvCallError, GameError, SamplerStateError, SpaceError, brief
from penstock.games import host
from penstock.games.game_process import GameProcess
from penstock.games.game_socket import GameSocket
from penstock.games.host import INLINE, PREFIX, NotSent, decoded, encoded, length

# Each environment has its process, and others have the other CPUs.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_STACK_SECONDS = 0.5  # at most, until the stack of a hang is printed


class EnvProcess(gym.Env[Any, Any]):
    """An environment in a process of its own: it may run in another Python, and starts again before it uses too much
    memory. It ends with this object, or with this process.

    Args:
        target: what makes the environment, such as "my_envs:make"; "gym:make" with `kwargs={"id": ...}` needs no code.
            It returns an environment of Gymnasium, or of a gym from 0.21 on. Without `python`, it may be a function.
        python: the interpreter, or a command such as `["uv", "run", "--python", "3.8", "--with", "gym==0.21",
            "python"]`. It needs Python 3.7 or later, and numpy. None: the interpreter of this process.
        kwargs: arguments of the target: numbers, texts, arrays, and lists, tuples and dicts of these.
        spaces: `(observation_space, action_space)`. With them the constructor does not wait, and the environments of a
            worker start at the same time. None: the environment says its spaces.
        renew_every: a reset starts the process again after so many episodes.
        max_rss: bytes, or text such as "4 GB": a reset starts the process again if it uses more.
        step_timeout: seconds for each step, reset and call.
        start_timeout: seconds for the start, in which the environment is made.
        path: folders where the target's module may be.
        environ, inherit_env, cwd, log_file, stop_timeout: as in `GameProcess`. With `python`, the variables PYTHONPATH
            and PYTHONHOME are empty. Numerical libraries have one thread, unless a variable sets another number.

    With `renew_every` or `max_rss`, a reset without a seed gets one that depends on the last seed and on the number of
    episodes since, so one seed gives the same episodes whenever the process was started again.

    Raises `EnvCallError` for what the environment raises, with its traceback. Raises `GameError` if the process does
    not start, ends, or is silent for too long; then the next `reset` starts it again. Raises `ConfigError` for
    arguments that cannot work, and `SpaceError` for a space that cannot be sent.
    """

    _game: GameProcess | None = None
    _channel: GameSocket | None = None
    _memory: Any = None  # of both sides, as an array of bytes
    _wanted = 0  # the size of the next one; 0 if there is no need of another
    _can_share = True
    _base: int | None = None  # the last seed that was given, or drawn
    _episode = 0  # how many resets there were since this seed
    _is_begun = _has_failed = False
    _pid = 0  # of the environment: `python` may be a command that starts it

    def __init__(
        self,
        target: str | Callable[..., Any],
        *,
        python: str | Path | Sequence[str | Path] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        spaces: tuple[gym.Space[Any], gym.Space[Any]] | None = None,
        renew_every: int | None = None,
        max_rss: int | str | None = None,
        step_timeout: float = 60.0,
        start_timeout: float = 120.0,
        stop_timeout: float = 2.0,
        path: Sequence[str | Path] = (),
        environ: Mapping[str, str] | None = None,
        inherit_env: Collection[str] | None = None,
        cwd: str | Path | None = None,
        log_file: str | Path | None = None,
    ) -> None:
        own = [sys.executable] if python is None else [python] if isinstance(python, str | Path) else [*python]
        must_be("python", python, bool(own), "an interpreter, or a command that starts one")
        is_list = isinstance(path, Sequence) and not isinstance(path, str | bytes)
        must_be("path", path, is_list, "a list of folders")
        self._lock = threading.Lock()  # one question at a time
        self._token = secrets.token_hex(16).encode()  # another user of this machine could connect first
        self._renews = renew_every is not None or max_rss is not None
        seconds("step_timeout", step_timeout)
        variables = {name: os.environ.get(name, "1") for name in _THREADS}
        variables |= {} if python is None else {"PYTHONPATH": "", "PYTHONHOME": ""}
        variables |= environ if isinstance(environ, Mapping) else {}
        try:
            self._game = _Process(
                [*own, "-u", host.__file__, "{port}"],
                ready="connects",
                reply_timeout=step_timeout,
                environ=variables if environ is None or isinstance(environ, Mapping) else environ,
                stdin=_first_message(self._token.decode(), target, kwargs, path, is_own=python is None),
                quit=_close_connections,
                renew_every=renew_every,
                max_rss=max_rss,
                start_timeout=start_timeout,
                stop_timeout=stop_timeout,
                inherit_env=inherit_env,
                cwd=cwd,
                log_file=log_file,
            )
            if (given := checked_spaces("spaces", spaces)) is None:
                self._connect()
            else:
                self.observation_space, self.action_space = given
        except BaseException:
            self.close()
            raise

    # ---- the environment -----------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        game, is_seeded = self._open(), self._renews or self._has_failed
        seed = int(seed) if isinstance(seed, np.integer) else seed
        super().reset(seed=seed)  # wrappers draw from its generator; it refuses what is no seed
        if self._has_failed:
            game.renew()
            self._has_failed = False
        elif self._is_begun and game.end_episode():
            self._disconnect()
        self._is_begun, self._episode = True, self._episode + 1
        if seed is not None:
            self._base, self._episode = seed, 0
        elif is_seeded:
            self._base = fresh_seed() if self._base is None else self._base
            key = np.random.SeedSequence(self._base, spawn_key=(Purpose.EPISODE, self._episode))
            seed = int(key.generate_state(1)[0])
            super().reset(seed=seed)
        result: tuple[Any, dict[str, Any]] = _require_sent(self._ask("reset", seed, options))
        return result

    def step(self, action: Any) -> Any:
        return _require_sent(self._ask("step", action))

    def render(self) -> Any:
        return self._ask("render")

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the environment, or read an attribute. The name may have dots: "unwrapped.set_task"."""
        return self._ask("call", name, args, kwargs)

    def close(self) -> None:
        """Close the environment and end its process. It may be called twice."""
        game, self._game = self._game, None
        try:
            if game is not None:
                game.close()
        finally:
            self._disconnect()

    @property
    def pid(self) -> int:
        """The id of the environment's process. `reset` may change it."""
        self._require_connected()
        return self._pid

    # ---- the process ---------------------------------------------------------------------------

    def _open(self) -> GameProcess:
        if self._game is None:
            raise SamplerStateError("this EnvProcess is closed: make a new one")
        return self._game

    def _require_connected(self) -> None:
        if self._has_failed:
            raise SamplerStateError("the process of this EnvProcess has failed: call reset, which starts it again")
        _ = self._open().pid  # raises in a fork of this process, which must not take the connection
        if self._channel is None:
            self._connect()

    def _connect(self) -> None:
        game = self._open()
        try:
            self._channel = game.connect()
            if not hmac.compare_digest(self._channel.receive(len(self._token)), self._token):
                raise game.error("was not the first at its port: another program connected")
        except GameError as error:
            raise self._lost(error) from None
        except BaseException:
            self._lose()
            raise
        told = self._answer("make")
        try:
            pid, *texts, self.render_mode, self.metadata = told
            found = [_space(text) for text in texts]
            self._pid = pid if pid in game._require_started().members() else game.pid
            for name, space in zip(("observation_space", "action_space"), found, strict=True):
                if (known := getattr(self, name, space)) != space:
                    raise SpaceError(f"{name}: the environment has {space}, but `spaces` of EnvProcess says {known}")
                setattr(self, name, known)  # a user may have seeded it
        except SpaceError:
            self._lose()
            raise
        except Exception as error:  # of many classes: it may have sent anything
            raise self._lost(game.error(f"sent no spaces: {type(error).__name__}: {brief(str(error))}")) from None

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Ask the environment, and return its answer."""
        if not self._lock.acquire(False):
            raise SamplerStateError(f"{name} of EnvProcess: another thread waits for an answer of this environment")
        try:
            return self._ask_alone(name, *arguments)
        finally:
            self._lock.release()

    def _ask_alone(self, name: str, *arguments: Any) -> Any:
        self._require_connected()
        if self._wanted:
            self._share(self._wanted)
        try:
            message = encoded((name, arguments), self._memory, strict=True)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"{name} of EnvProcess: {error}") from None
        return self._answer(name, message)

    def _answer(self, name: str, message: bytes = b"") -> Any:
        game, channel = self._open(), self._channel
        assert channel is not None
        try:
            channel.send(message)
            head = channel.receive(PREFIX.size)
            rest = length(head) - PREFIX.size
            kind, *answer = decoded(head + channel.receive(rest), self._memory)
            n_bytes = PREFIX.unpack(head)[1]
            if INLINE < n_bytes < rest and self._can_share:
                self._wanted = 2 * n_bytes
            if kind == "ok":
                (value,) = answer
                return value
            if kind != "raised":
                raise ValueError(f"its answer is {brief(kind)}")
            headline, trace = map(str, answer)
        except GameError as error:
            raise self._lost(error, name) from None
        except (ValueError, TypeError) as error:
            what = f"sent a broken message: {brief(str(error))}"
            raise self._lost(game.error(what), name) from None
        except BaseException:  # Ctrl-C: a late answer would be taken for the next one
            self._lose()
            raise
        if name == "make":
            self._lose()  # it has no environment
        where = "when it was made" if name == "make" else f"in {name}"
        raise EnvCallError(f"the environment raised {headline} {where}. The traceback there:\n{trace}")

    def _share(self, size: int) -> None:
        """Let both sides map a memory. It has no name, so nothing of it stays, and nobody can make it smaller."""
        self._wanted, self._can_share = 0, False
        with suppress(OSError):  # there is no memory left
            if (made := system.sealed_memory("penstock-env", size)) is None:
                return
            with closing(InheritedFd(made[0])) as file:
                mapped, first = mmap.mmap(file.fd, size), secrets.token_bytes(16)
                mapped[: len(first)] = first
                self._can_share = self._ask_alone("map", made[1], size, first) is True
            if self._can_share:
                self._memory = np.frombuffer(mapped, np.uint8)

    def _lost(self, error: GameError, name: str = "") -> GameError:
        """The process is ended. Returns the error for this. If the process hangs, it first prints its stack."""
        game, text = self._open(), str(error)
        if self._pid and not game.exit_text() and " within reply_timeout=" in text:
            n_before, until = -1, time.monotonic() + _STACK_SECONDS
            with suppress(OSError):
                os.kill(self._pid, signal.SIGUSR1)
            while len(now := game.output(1 << 16)) != n_before and time.monotonic() < until:
                n_before = len(now)
                time.sleep(0.1)
            text = "\n".join([text.splitlines()[0], *str(game.error("")).splitlines()[1:]])
        self._lose()
        text = text.replace(" reply_timeout=", " step_timeout=", 1)
        return GameError(f"in {name}, {text}" if name not in ("", "make") else text)

    def _lose(self) -> None:
        self._has_failed = True
        self._open().kill()
        self._disconnect()

    def _disconnect(self) -> None:
        self._memory, self._wanted, self._pid = None, 0, 0
        if self._channel is not None:
            self._channel.close()
        self._channel = None


class _Process(GameProcess):
    word = "environment"


def _require_sent(result: Any) -> Any:
    """Raises `SpaceError` if the observation has an object that was not sent."""
    left = [result[0]] if isinstance(result, tuple) and result else []
    while left:
        part = left.pop()
        if isinstance(part, NotSent):
            raise SpaceError(
                f"an observation has a {part.kind}, which EnvProcess cannot send: return numbers, texts or arrays"
            )
        left += part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else ()
    return result


def _close_connections(game: GameProcess) -> None:
    """The process closes its environment when its connection ends, and then ends."""
    for each in game._sockets:
        each.close()


def _first_message(token: str, target: Any, kwargs: Any, path: Sequence[str | Path], *, is_own: bool) -> bytes:
    """What the process reads at its start: what to make."""
    wanted = 'a text such as "my_envs:make"' + (" or a function" if is_own else ", since it runs in another Python")
    is_text = isinstance(target, str) and all(target.partition(":"))
    if not is_text and not (is_own and callable(target)):
        raise ConfigError(f"target must be {wanted}, got {brief(target)}")
    folders = [*map(str, path), *(sys.path if is_own else ())]  # what can be imported here can be imported there
    try:
        text = target if is_text else pickling.dumps(target)
        return encoded((token, text, {} if kwargs is None else dict(kwargs), folders), strict=True)
    except Exception as error:
        raise ConfigError(f"target or kwargs of EnvProcess: {error}") from error


def _space(text: Any) -> gym.Space[Any]:  # noqa: PLR0911
    """The space that `_described` of host.py describes."""
    kind, *rest = text
    match kind:
        case "Box":
            return kinds.Box(rest[0], rest[1], dtype=np.dtype(rest[2]).type)
        case "Discrete":
            other: dict[str, Any] = {} if rest[2] == "<i8" else {"dtype": np.dtype(rest[2]).type}
            return kinds.Discrete(rest[0], start=rest[1], **other)
        case "MultiDiscrete":
            return kinds.MultiDiscrete(rest[0], dtype=np.dtype(rest[2]).type, start=rest[1])
        case "MultiBinary":
            return kinds.MultiBinary(rest[0])
        case "Text":
            return kinds.Text(rest[1], min_length=rest[0], charset=rest[2])
        case "Dict":
            return kinds.Dict([(name, _space(each)) for name, each in rest[0]])
        case "Tuple":
            return kinds.Tuple([_space(each) for each in rest[0]])
        case "":
            wanted = "Box, Discrete, MultiDiscrete, MultiBinary, Text, Dict and Tuple"
            raise SpaceError(f"EnvProcess cannot send the space {brief(rest[0])}: it knows {wanted}")
    raise ValueError(f"no space: {brief(text)}")
