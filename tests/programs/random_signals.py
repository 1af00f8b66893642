"""Signals come at random moments of random calls; each batch is compared with the one worked out by hand.

Says how many signals have come, how often a new sampler was needed, and how many processes and descriptors are left.
`what`: the class. `sig`: "SIGINT", or "SIGALRM", whose handler raises. `n`: signals.
"""

import gc
import json
import os
import random
import signal
import struct
import sys
import time
from functools import partial
from typing import Any

import psutil

given = json.loads(sys.argv[1])
DELAY = struct.Struct("d")
orders, sender = os.pipe(), os.getpid()
if (child := os.fork()) == 0:  # not a thread, which would forbid the start method "fork"
    os.setsid()
    os.close(orders[1])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while order := os.read(orders[0], DELAY.size):
        time.sleep(DELAY.unpack(order)[0])
        os.kill(sender, getattr(signal, given["sig"]))
    os._exit(0)
os.close(orders[0])
os.set_inheritable(orders[1], False)

from penstock import (  # noqa: E402
    AlternatingSampler,
    AsyncSampler,
    GpuSampler,
    ParallelSampler,
    PenstockError,
    RandomAgent,
    SamplerBrokenError,
    SerialSampler,
)
from penstock.envs import CountingEnv  # noqa: E402
from penstock.vector import ShmVectorEnv  # noqa: E402

ENDLESS = 10**6  # steps of an episode
T = 5
CLASSES: dict[str, Any] = {
    "serial": SerialSampler,
    "parallel": ParallelSampler,
    "gpu": GpuSampler,
    "server": partial(GpuSampler, server="process"),
    "alternating": AlternatingSampler,
    "async": AsyncSampler,
}
rng = random.Random(given["sig"] + given["what"] + given["start_method"])


class Alarm(BaseException):  # as pytest-timeout's
    pass


def on_alarm(*_: object) -> None:
    raise rng.choice([Alarm, TimeoutError])


class OfSampler:
    def __init__(self) -> None:
        self.starts = {0}  # what the next batch may begin with
        sizes = {"batch_T": T, "batch_B": 4, "n_workers": 2, "max_decorrelation_steps": 0}
        evaluation = {"eval_n_envs": 2, "eval_env_kwargs": {"length": 3}, "eval_max_steps": 12}
        how = {"env_kwargs": {"length": ENDLESS}, "start_method": given["start_method"]}
        self.sampler = CLASSES[given["what"]](CountingEnv, **sizes, **evaluation, **how)
        self.close = self.sampler.shutdown

    def start(self) -> None:
        self.sampler.initialize(RandomAgent(), seed=0)

    def _take(self, samples: Any) -> None:
        count = samples.env.observation[:, :, 1]
        first = int(count[0, 0])
        assert first in self.starts, (first, self.starts)
        assert [[int(cell) for cell in row] for row in count] == [[first + t] * 4 for t in range(T)]
        assert [[int(cell) for cell in row] for row in samples.env.reward] == [[first + t + 1] * 4 for t in range(T)]
        self.starts = {first + T}

    def obtain(self) -> None:
        self._take(self.sampler.obtain_samples(0)[0])

    def start_and_wait(self) -> None:
        self.sampler.start_samples(0)
        self._take(self.sampler.wait_samples()[0])

    def evaluate(self) -> None:
        assert {info.Length for info in self.sampler.evaluate_agent(0)} == {3}

    def ask(self) -> None:
        counts = self.sampler.get_attr("count")
        assert counts == counts[:1] * 4
        assert counts[0] in self.starts
        self.starts = {counts[0]}

    calls: tuple[Any, ...] = (obtain, start_and_wait, evaluate, ask)

    def go_on(self) -> None:
        """A signal has come: the batch that was interrupted may be lost, or may not have begun, or can be had now."""
        self.starts |= {start + T for start in self.starts}
        if self.sampler.state.name == "SAMPLING":
            self._take(self.sampler.wait_samples()[0])
        else:
            self.obtain()


class OfAsyncSampler(OfSampler):
    def start(self) -> None:
        super().start()
        self.sampler.start()

    def poll(self) -> None:
        if (found := self.sampler.poll_samples()) is not None:
            self._take(found[0])

    def pause(self) -> None:
        self.sampler.pause()
        OfSampler.evaluate(self)
        self.sampler.resume()

    calls = (OfSampler.obtain, poll, pause)

    def go_on(self) -> None:
        self.starts |= {start + T for start in self.starts}
        if self.sampler.state.name == "READY":
            self.sampler.start()
        elif self.sampler.state.name == "PAUSED":
            self.sampler.resume()
        self.obtain()


class OfVectorEnv:
    counts: set[int]

    def __init__(self) -> None:
        self.close: Any = lambda: None

    def start(self) -> None:
        envs = ShmVectorEnv([partial(CountingEnv, ENDLESS)] * 4, n_workers=2, context=given["start_method"])
        self.envs, self.close = envs, envs.close
        self.reset()

    def _take(self, observation: Any) -> None:
        first = int(observation[0][1])
        assert first in self.counts, (first, self.counts)
        assert [int(row[1]) for row in observation] == [first] * 4
        self.counts = {first}

    def _advance(self) -> None:
        self.counts = {count + 1 for count in self.counts}

    def reset(self) -> None:
        self.counts = {0} if not hasattr(self, "counts") else {0, *self.counts}
        observation = self.envs.reset()[0]
        self.counts = {0}
        self._take(observation)

    def step(self) -> None:
        observation = self.envs.step([0] * 4)[0]
        self._advance()
        self._take(observation)

    def send(self) -> None:
        self.envs.send([0] * 4)
        observation = self.envs.recv(4)[0]
        self._advance()
        self._take(observation)

    def ask(self) -> None:
        counts = list(self.envs.get_attr("count"))
        assert counts == counts[:1] * 4
        assert counts[0] in self.counts
        self.counts = set(counts)

    calls = (step, step, send, ask, reset)

    def go_on(self) -> None:
        """A signal has come: the step that was interrupted may be lost, or may not have begun, or can be had now."""
        state = self.envs._guard.state.name
        if state in ("STEPPING", "SENT"):
            observation = self.envs.step_wait()[0] if state == "STEPPING" else self.envs.recv(4)[0]
            self._advance()
            self._take(observation)
        elif state == "NEW":
            self.reset()
        else:
            self.counts |= {count + 1 for count in self.counts}
            self.step()


make: Any = {"vector": OfVectorEnv, "async": OfAsyncSampler}.get(given["what"], OfSampler)
INTERRUPTIONS = (KeyboardInterrupt, Alarm, TimeoutError)


def processes() -> list[Any]:
    """All that this process has started, except the supervisor that stays, and who sends the signals."""
    found = psutil.Process().children(recursive=True)
    return [each for each in found if each.pid not in kept and each.status() != "zombie"]


def n_open() -> int:
    gc.collect()
    return len(os.listdir("/dev/fd"))


def new() -> Any:
    made.append(make())
    made[-1].start()
    return made[-1]


def renew() -> None:
    """In place of another call: end it and start another one."""
    made[-1].close()
    made.clear()
    new()


def a_call() -> None:
    rng.choice(made[-1].calls)(made[-1])


def interrupt(work: Any, seconds: float) -> None:
    """Repeat `work` until the signal comes, after so many seconds."""
    deadline = time.monotonic() + (60 if given["sig"] == "SIGINT" else 1)
    try:
        os.write(orders[1], DELAY.pack(seconds))
        while time.monotonic() < deadline:
            work()
    except INTERRUPTIONS:
        return
    except PenstockError as error:  # where user code may run, it is reported as an exception of that
        if not says_so(error):
            raise
        return
    if given["sig"] == "SIGINT":  # Python itself drops other exceptions in `__del__`, for example
        raise AssertionError("a signal was lost")


def says_so(error: PenstockError) -> bool:
    """Whether `error` says that a signal is its cause."""
    if isinstance(error, SamplerBrokenError) and "KeyboardInterrupt" in str(error):
        return bool(given["sig"] == "SIGINT")
    said = "xception of a signal handler", "Alarm", "TimeoutError"
    return given["sig"] == "SIGALRM" and any(each in str(error) for each in said)


def go_on(is_new: bool) -> int:
    """A signal has come. Use the sampler further, or if it says that it is broken, a new one: then this returns 1."""
    if is_new:  # the old one is closed, or closing was interrupted, or the new one was not started
        for each in made:
            each.close()
        made.clear()
        new()
    try:
        made[-1].go_on()
    except PenstockError as error:
        if not says_so(error):
            raise
        renew()
        return 1
    return 0


made: list[Any] = []
signal.signal(signal.SIGALRM, on_alarm)
kept: set[int] = set()
new()
for call in made[-1].calls:
    call(made[-1])
made.pop().close()
kept = {each.pid for each in processes()}
before = n_open()
new()
n_broken = 0
for k in range(given["n"]):
    is_start = k % 10 == 4
    interrupt(renew if is_start else a_call, rng.random() * (0.5 if is_start else rng.choice([1e-4, 1e-3, 1e-2, 5e-2])))
    n_broken += go_on(is_start)
    for call in made[-1].calls:
        call(made[-1])
made.pop().close()
deadline = time.monotonic() + 20
while processes() and time.monotonic() < deadline:
    gc.collect()
    time.sleep(0.01)
print(given["n"], n_broken, len(processes()), n_open() - before, flush=True)
os.close(orders[1])
os.waitpid(child, 0)
