"""Starts workers while `n` times Ctrl-C comes, and says how many processes are left."""

import json
import signal
import sys
import time

import psutil

from penstock import AlternatingSampler, ParallelSampler, RandomAgent
from penstock.envs import CountingEnv
from penstock.vector import ShmVectorEnv

given = json.loads(sys.argv[1])
n, is_ready = 0, False


def n_processes() -> int:
    return len([child for child in psutil.Process().children(recursive=True) if child.status() != "zombie"])


def on_interrupt(*_: object) -> None:
    global n  # noqa: PLW0603
    n += 1
    if is_ready and n < given["n"]:
        raise KeyboardInterrupt


def start_and_close() -> None:
    if given["what"] == "vector":
        ShmVectorEnv([CountingEnv] * 2, context=given["start_method"]).close()
        return
    cls = {"parallel": ParallelSampler, "alternating": AlternatingSampler}[given["what"]]
    with cls(CountingEnv, batch_T=2, batch_B=2, n_workers=2, start_method=given["start_method"]) as sampler:
        sampler.initialize(RandomAgent())


def starts() -> None:
    while n < given["n"]:
        try:
            start_and_close()
        except KeyboardInterrupt:
            pass


with ShmVectorEnv([CountingEnv] * 2) as other:
    other.reset()
    start_and_close()  # the supervisor of samplers stays too
    before = n_processes()
    signal.signal(signal.SIGINT, on_interrupt)
    print("ready", flush=True)
    while n < given["n"]:
        try:
            is_ready = True
            starts()
        except KeyboardInterrupt:
            pass
    deadline = time.monotonic() + 20
    while n_processes() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    print("left", n_processes() - before, flush=True)
    other.step([0, 0])
with ShmVectorEnv([CountingEnv] * 2) as envs:
    envs.reset()
print("end", flush=True)
