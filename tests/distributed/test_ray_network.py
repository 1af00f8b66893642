"""Two nodes and a cable, which is cut. Only at full scale, and only as root."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason='ray is not installed: pip install ".[cluster]"')

from penstock import RandomAgent, SerialSampler

from ..scale import FULL
from .ray_support import CARTPOLE, our_processes, wait_for_none

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(280),
    pytest.mark.skipif(not FULL, reason="only at full scale"),
    pytest.mark.skipif(os.geteuid() != 0 or not Path("/dev/net/tun").exists(), reason="needs root and /dev/net/tun"),
    pytest.mark.skipif(not all(map(shutil.which, ("unshare", "nsenter", "ip"))), reason="needs unshare, nsenter, ip"),
    pytest.mark.slow,
]

ROOT = Path(__file__).parents[2]
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_FRAME_BYTES = 65536


class Namespace:
    """A network of its own, with a loopback device and one end of a cable."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._holder = subprocess.Popen(["unshare", "--net", "sleep", "600"])
        self.path = f"/proc/{self._holder.pid}/ns/net"
        mine = os.readlink("/proc/self/ns/net")
        deadline = time.monotonic() + 10
        while os.readlink(self.path) == mine:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        ends: list[int] = []
        thread = threading.Thread(target=self._make_end, args=(ends,))
        thread.start()
        thread.join()
        (self.end,) = ends
        for command in ("link set lo up", f"addr add {address}/24 dev cable", "link set cable up"):
            subprocess.run([*self.prefix, "ip", *command.split()], check=True)

    @property
    def prefix(self) -> list[str]:
        """A command with this in front runs in the namespace."""
        return ["nsenter", f"--net={self.path}"]

    def _make_end(self, ends: list[int]) -> None:
        """In a thread, since only the namespace of the calling thread changes."""
        with open(self.path) as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), _CLONE_NEWNET) == 0
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        ioctl(end, _TUNSETIFF, struct.pack("16sH22s", b"cable", _IFF_TAP | _IFF_NO_PI, b""))
        ends.append(end)

    def close(self) -> None:
        os.close(self.end)
        self._holder.kill()
        self._holder.wait()


class Cable:
    """Carries frames between namespaces; none while `is_cut`."""

    def __init__(self, ends: tuple[int, int]) -> None:
        self.is_cut, self._is_closed, self._ends = False, False, ends
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        one, other = self._ends
        while not self._is_closed:
            for end in select.select(self._ends, [], [], 0.1)[0]:
                with suppress(BlockingIOError):
                    frame = os.read(end, _FRAME_BYTES)
                    if not self.is_cut:
                        os.write(other if end == one else one, frame)

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()


class Nodes:
    """A Ray with a head node and another one, on the two ends of a cable. `far` runs on the other."""

    def __init__(self, folder: str) -> None:
        self.near, self.far = Namespace("10.77.0.1"), Namespace("10.77.0.2")
        self.cable = Cable((self.near.end, self.far.end))
        self.run = uuid.uuid4().hex
        # The settings that docs/cluster.md names.
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
            "PENSTOCK_TEST_RUN": self.run,
            "PYTHONPATH": str(ROOT / "src"),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": uuid.uuid4().hex * 2,
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "2000",
            "RAY_health_check_failure_threshold": "3",
            "RAY_grpc_client_keepalive_time_ms": "5000",
            "RAY_grpc_client_keepalive_timeout_ms": "5000",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
            "RAY_ADDRESS": f"{self.near.address}:6379",
        }
        self._started: list[subprocess.Popen[Any]] = []
        self._start(self.near, "--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={folder}")
        self._start(self.far, f"--address={self.near.address}:6379")

    def _start(self, where: Namespace, *options: str) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, "--num-cpus=1"]
        command += [f"--node-ip-address={where.address}", f"--object-store-memory={80 * 2**20}"]
        environ = {name: value for name, value in self.environ.items() if name != "RAY_ADDRESS"}
        done = subprocess.run(
            [*where.prefix, *command], env=environ, capture_output=True, text=True, timeout=100, cwd=ROOT
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def program(self, script: Path, *arguments: str) -> subprocess.Popen[str]:
        """Start a program on the head node."""
        command = [*self.near.prefix, sys.executable, str(script), *arguments]
        process = subprocess.Popen(command, env=self.environ, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in self._started:
            end(process)
        left = our_processes(self.run, with_ray=True)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        self.cable.close()
        self.near.close()
        self.far.close()
        assert wait_for_none({}, 20.0, self.run, with_ray=True) == {}


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: the paths of sockets are limited
    made = Nodes(folder)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)


_PROGRAM = """
import hashlib, json, sys, time
import gymnasium as gym
from penstock import NodeLostError, RandomAgent, SerialSampler
from penstock.distributed import RaySampler

options = json.loads(sys.argv[1])
options |= {"batch_T": 50, "batch_B": 4, "n_shards": 2, "n_workers": 1}
sampler = RaySampler("CartPole-v1", sampler_cls=SerialSampler, **options)
sampler.initialize(RandomAgent(), seed=0)
while any(shard.node is None for shard in sampler.stats().shards):  # only with min_shards
    sampler.obtain_samples(0)
shards = sampler.stats().shards
print(json.dumps({"nodes": [shard.node for shard in shards]}), flush=True)
for itr in range(10**6):
    began = time.monotonic()
    try:
        samples, _ = sampler.obtain_samples(itr)
    except NodeLostError as error:
        print(json.dumps({"error": str(error), "seconds": time.monotonic() - began}), flush=True)
        break
    valid = samples.env.valid.numpy().all(axis=0).tolist()
    digest = hashlib.sha256(sampler.samples_np.env.observation.tobytes()).hexdigest()
    late = [shard.late for shard in sampler.run.pool.shards]
    took = time.monotonic() - began
    print(json.dumps({"itr": itr, "valid": valid, "digest": digest, "seconds": took, "late": late}), flush=True)
    time.sleep(0.05)
"""


def lines(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            yield json.loads(line)


def digests(n: int) -> list[str]:
    """Of the observations of a run in one process."""
    found = []
    with SerialSampler(CARTPOLE, batch_T=50, batch_B=4) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        for itr in range(n):
            sampler.obtain_samples(itr)
            found.append(hashlib.sha256(sampler.samples_np.env.observation.tobytes()).hexdigest())
    return found


def processes_in(namespace: Namespace, run: str) -> dict[int, str]:
    """The processes of this run in the namespace, except Ray's own."""
    found, wanted = {}, os.readlink(namespace.path)
    for pid, text in our_processes(run).items():
        try:
            if os.readlink(f"/proc/{pid}/ns/net") == wanted:
                found[pid] = text
        except OSError:  # it has ended
            continue
    return found


@contextmanager
def program(nodes: Nodes, folder: Path, **options: Any) -> Iterator[Iterator[dict[str, Any]]]:
    """The lines of a program that samples on both nodes."""
    script = folder / "program.py"
    script.write_text(_PROGRAM)
    process = nodes.program(script, json.dumps(options))
    found = lines(process)
    where = next(found)["nodes"]
    assert sorted(node.split()[0] for node in where) == [nodes.near.address, nodes.far.address]
    yield found
    end(process)


def test_a_cut_of_three_seconds_is_only_a_delay(nodes: Nodes, tmp_path: Path) -> None:
    with program(nodes, tmp_path) as found:
        batches = [next(found) for _ in range(5)]
        nodes.cable.is_cut = True
        threading.Timer(3.0, lambda: setattr(nodes.cable, "is_cut", False)).start()
        batches += [next(found) for _ in range(40)]
    assert [batch["digest"] for batch in batches] == digests(45)
    slowest = max(batch["seconds"] for batch in batches)
    print(f"the slowest batch took {slowest:.1f} s")
    assert slowest > 2.0


def test_a_cut_is_named(nodes: Nodes, tmp_path: Path) -> None:
    with program(nodes, tmp_path) as found:
        for _ in range(5):
            next(found)
        nodes.cable.is_cut = True
        began = time.monotonic()
        error = next(line for line in found if "error" in line)
        took = time.monotonic() - began
    print(f"named after {took:.1f} s: {error['error']}")
    assert "was lost" in error["error"]
    assert nodes.far.address in error["error"]
    assert took < 11.0
    while processes_in(nodes.far, nodes.run):  # until its raylet gives up
        assert time.monotonic() - began < 60
        time.sleep(0.2)
    print(f"no shard is left behind the cut after {time.monotonic() - began:.1f} s")


def test_what_is_behind_a_cut_ends_and_never_counts(nodes: Nodes, tmp_path: Path) -> None:
    with program(nodes, tmp_path, on_node_failure="restart", min_shards=1) as found:
        for _ in range(5):
            assert all(next(found)["valid"])
        nodes.cable.is_cut = True
        began = time.monotonic()
        assert any("ShardHost" in text for text in processes_in(nodes.far, nodes.run).values())
        alone = next(line for line in found if not all(line["valid"]))
        assert time.monotonic() - began < 11.0
        nodes.cable.is_cut = False
        deadline = time.monotonic() + 60
        while processes_in(nodes.far, nodes.run):
            assert time.monotonic() < deadline
            later = next(found)
            assert later["valid"] == alone["valid"]
            assert later["late"] == [0, 0]
