"""Without an address, penstock starts Ray itself: on loopback, with a token; and nothing outlives the program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason='ray is not installed: pip install ".[cluster]"')

from ..scale import scaled
from .ray_support import wait_for_none

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180), pytest.mark.slow]

ROOT = Path(__file__).parents[2]
_PROGRAM = """
import glob, json, os, sys
from penstock import RandomAgent  # noqa: E402
from penstock.distributed import RaySampler  # noqa: E402

if __name__ == "__main__":
    sampler = RaySampler("CartPole-v1", batch_T=10, batch_B=4, n_shards=2, n_workers=1)
    sampler.initialize(RandomAgent(), seed=0)
    sampler.obtain_samples(0)
    import ray
    (folder,) = glob.glob(os.environ["RAY_TMPDIR"] + "/*")  # Ray's session
    facts = {"ip": ray.util.get_node_ip_address(), "token": "RAY_AUTH_TOKEN" in os.environ}
    print(json.dumps({**facts, "mode": os.stat(folder).st_mode & 0o777}), flush=True)
    if sys.argv[1] == "wait":
        while True:
            sampler.obtain_samples(1)
    if sys.argv[1] == "shutdown":
        sampler.shutdown()
        assert not ray.is_initialized() and not os.path.exists(folder)
        again = RaySampler("CartPole-v1", batch_T=10, batch_B=4, n_shards=1, n_workers=1)
        again.initialize(RandomAgent(), seed=0)
        again.obtain_samples(0)  # and the program ends without a shutdown
"""


def start(tmp_path: Path, how: str, sessions: str) -> tuple[subprocess.Popen[str], str]:
    program, run = tmp_path / "program.py", uuid.uuid4().hex
    program.write_text(_PROGRAM)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environ |= {
        "PENSTOCK_TEST_RUN": run,
        "PYTHONPATH": str(ROOT / "src"),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_object_store_memory": str(80 * 2**20),
        "RAY_TMPDIR": sessions,
        "HOME": str(tmp_path),
    }
    process = subprocess.Popen(
        [sys.executable, str(program), how], cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True
    )
    return process, run


def listening(run: str) -> set[str]:
    """The addresses on which processes of this run listen."""
    import psutil

    found = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get("PENSTOCK_TEST_RUN") == run:
                found |= {c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        except psutil.Error:
            continue
    return found


@pytest.fixture
def sessions() -> Iterator[str]:
    """A folder with a short name: the paths of sockets are limited."""
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield folder


@pytest.mark.parametrize("how", scaled(["wait", "shutdown"], ["shutdown"]))
def test_ray_is_started_for_this_machine_alone_and_ends_with_the_program(
    tmp_path: Path, sessions: str, how: str
) -> None:
    token_file = tmp_path / ".ray/auth_token"
    if how == "shutdown":  # the token of this user's clusters, as Ray writes it
        token_file.parent.mkdir()
        token_file.write_text(uuid.uuid4().hex * 2)
        token_file.chmod(0o644)
    process, run = start(tmp_path, how, sessions)
    try:
        assert process.stdout is not None
        first: dict[str, Any] = json.loads(next(line for line in process.stdout if line.startswith("{")))
        assert first == {"ip": "127.0.0.1", "token": False, "mode": 0o700}
        if how == "wait":
            assert {ip for ip in listening(run) if not ip.removeprefix("::ffff:").startswith("127.")} == set()
            os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        assert process.returncode == (-signal.SIGKILL if how == "wait" else 0)
        assert wait_for_none({}, 10.0, run) == {}
        assert wait_for_none({}, 60.0, run, with_ray=True) == {}
        if how == "shutdown":
            assert os.listdir(sessions) == []
            assert token_file.stat().st_mode & 0o777 == 0o600
        else:
            assert not token_file.exists()
    finally:
        process.kill()
        process.wait()
