"""Joins a Ray cluster, or starts Ray on this machine and ends it; and the options of actors."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import socket
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants

from penstock.buffers.reports import in_one_line
from penstock.errors import ClusterError, ConfigError

#: Ray's variables for the process of a shard or a worker. By default Ray kills the child processes of an actor that
#: ends, so the supervisor could not end what the environments have started. And by default Ray lowers the priority of
#: actors. The third is a size in bytes. Ray sends smaller arguments and results with the call, and larger ones through
#: its object store. For results of up to half a MB, the store takes 0.7 ms longer. From 1 MB on, the store is faster.
#: Ray's default is 100 KiB.
ACTOR_VARIABLES = {
    "RAY_kill_child_processes_on_worker_exit": "0",
    "RAY_worker_niceness": "0",
    "RAY_max_direct_call_object_size": str(512 * 1024),
}
# With this variable at 0, a Ray that is started takes the loopback address, as it does on macOS. Without it, Ray
# replaces that address by the machine's. No public function of Ray does this. At another loopback address, such as
# 127.0.0.2, a process of Ray listens at all addresses.
_CLUSTER_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_LOOPBACK = "127.0.0.1"
_KILL_SECONDS = 5.0  # until a killed process has ended
_ANSWER_SECONDS = 2.0  # how long the head of a cluster may take for a connection, and then for its first bytes
# The first bytes of HTTP/2, and an empty frame of settings. A gRPC server answers with a frame of this type.
_HTTP2_GREETING, _SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 4

_lock = threading.Lock()
_n_users = 0  # samplers and experiments that use the Ray that this module has started
_token = secrets.token_hex(32)  # of each Ray that this process starts: Ray reads its token once
_folder = ""  # its session folder, which no other user can enter
_log = logging.getLogger("penstock")


def connect(n_cpus: int) -> Callable[[], None]:
    """Join the cluster at RAY_ADDRESS, unless this process has joined one (`ray.init`). Without an address, start Ray
    on this machine alone, with at least `n_cpus` CPUs.

    Returns a function that ends what this has started. Raises `ConfigError` if there is no cluster at the address, and
    `ClusterError` if Ray does not start.
    """
    global _n_users  # noqa: PLW0603 - a property of the process
    with _lock:
        if _n_users and ray.is_initialized():
            _n_users += 1
            return _leave
        _tighten_token_file()
        if not ray.is_initialized():
            address = os.environ.get("RAY_ADDRESS") or "local"
            if address == "local":
                _start(n_cpus)
                _n_users = 1
                return _leave
            _join(address)
        if not _has_token():
            warnings.warn(
                "this Ray cluster has no token: whoever reaches its ports can run code on it. Start its nodes with "
                "RAY_AUTH_MODE=token",
                RuntimeWarning,
                stacklevel=2,
            )
        return lambda: None


def _join(address: str) -> None:
    try:
        if address != "auto":
            _await_answer(address)
        ray.init(address=address, log_to_driver=True)
    except Exception as error:  # Ray raises anything, such as a bare Exception
        raise ConfigError(
            f"no Ray cluster answers at RAY_ADDRESS={address}: {error}. Start one with `ray start`, or remove this "
            "variable from the environment"
        ) from error


def _await_answer(address: str) -> None:
    """Raise an error unless a gRPC server answers soon. Ray itself would wait for minutes, or end this process."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS) as link:
        if os.environ.get("RAY_USE_TLS", "0") == "0":
            link.sendall(_HTTP2_GREETING)
            if link.recv(9, socket.MSG_WAITALL)[3:4] != bytes([_SETTINGS]):
                raise ConnectionError("what listens there is not Ray")


def _start(n_cpus: int) -> None:
    """Start Ray for this process. Only this machine can reach it, and only with a token. No other user can enter its
    session folder."""
    global _folder  # noqa: PLW0603 - a property of the process
    # Without a mode, Ray turns its tokens on. It takes the user's token, if there is one.
    variables: dict[str, str | None] = {"RAY_AUTH_MODE": None, _CLUSTER_VARIABLE: "0"}
    if not ("RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ or _token_file().exists()):
        variables["RAY_AUTH_TOKEN"] = _token
    given = {name: os.environ.get(name) for name in variables}
    _set(variables)
    has_clusters, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    # As Ray does, not in TMPDIR: the paths of sockets are limited to 107 bytes.
    _folder = tempfile.mkdtemp(prefix="ray-", dir=os.environ.get("RAY_TMPDIR", "/tmp"))  # with mode 0700
    try:
        ray.init(
            address="local",
            num_cpus=max(n_cpus, os.cpu_count() or 1),
            include_dashboard=False,
            logging_level=logging.ERROR,  # a warning says that there is a token
            _node_ip_address=_LOOPBACK,
            _temp_dir=f"{_folder}/s",  # Ray lets everybody write there
        )
    except BaseException as error:
        _end_processes(_folder)
        shutil.rmtree(_folder, ignore_errors=True)
        if isinstance(error, Exception):  # Ray raises anything, such as a bare Exception
            reason = in_one_line(error).rstrip(".")
            raise ClusterError(
                f"Ray could not be started on this machine: {reason}. If the machine is overloaded, try again, or join "
                "a cluster that runs (RAY_ADDRESS)"
            ) from error
        raise
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = has_clusters
        _set(given)


def _end_processes(folder: str) -> None:
    """Kill what Ray has started for this session. It does so itself only when this program ends."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            if any(folder in part for part in process.cmdline()):
                process.kill()
                process.wait(_KILL_SECONDS)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _token_file() -> Path:
    return Path("~/.ray/auth_token").expanduser()


def _tighten_token_file() -> None:
    """`ray get-auth-token --generate` writes a file that every user of the machine can read."""
    path = _token_file()
    with contextlib.suppress(OSError):  # there is none, or it is not ours
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
            _log.warning("other users could read %s, which has the token of Ray: it now has mode 0600", path)


def _leave() -> None:
    global _n_users  # noqa: PLW0603 - a property of the process
    with _lock:
        _n_users -= 1
        if _n_users == 0:
            if ray.is_initialized():
                ray.shutdown()
            shutil.rmtree(_folder, ignore_errors=True)


def _has_token() -> bool:
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"  # Ray sets it where it finds a token by itself


def node_resources() -> list[dict[str, float]]:
    """The resources of each node that is alive."""
    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def actor_options(resources: Mapping[str, float], strategy: object = "SPREAD") -> dict[str, Any]:
    """The options of an actor that needs these resources: "CPU", "GPU" and any others."""
    rest = dict(resources)
    return {
        "num_cpus": rest.pop("CPU", 0),
        "num_gpus": rest.pop("GPU", 0),
        "resources": rest,
        "runtime_env": {"env_vars": ACTOR_VARIABLES},
        "scheduling_strategy": strategy,
    }
