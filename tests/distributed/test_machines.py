"""Experiments on more than one machine, and with more than one trainer: real processes over sockets."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

pytest.importorskip("zmq", reason="the wire over sockets needs pyzmq")
pytest.importorskip("msgpack", reason="the wire over sockets needs msgpack")

from penstock import CategoricalPgAgent, ClusterError, ConfigError, RandomAgent, SerialSampler
from penstock.__main__ import main
from penstock.distributed import Actors, Batch, Experiment, Policies, RunState, Training

from ..models import small_model
from ..scale import FULL, scaled
from ..starter import Program
from ..support import PROGRAMS
from .support import SAMPLER, need, wait_until

# A machine that joins has the code of the experiment as a file.
MODULE = """
import time
from functools import partial
from torch import nn
from penstock import CategoricalPgAgent, SerialSampler
from penstock.distributed import Actors, Experiment, Policies, Training

class Model(nn.Module):
    def __init__(self, observation_space, action_space):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, observation):
        out = self.layer(observation)
        return out[..., :2], out[..., 2]

class Counting:
    def __init__(self, agent):
        self.rows = 0

    def step(self, batch):
        time.sleep(0.5)  # actors and policy worker wait for it, and leave the CPUs to others
        self.rows += batch.samples.env.reward.numel()
        return {"rows": self.rows}

EXPERIMENT = Experiment(
    "joined",
    partial(CategoricalPgAgent, Model),
    Actors(1, partial(SerialSampler, "CartPole-v1", batch_T=8, batch_B=4), inference="policy", joining=2),
    Training(Counting, batch=1),
    Policies(1),
)
"""


def join(
    folder: Path, *names: str, experiment: str = "exp.py:EXPERIMENT", network: str | None = None
) -> subprocess.Popen[str]:
    """Start `penstock join`, as another machine does, perhaps in another network. It and the workers that it launches
    are forks, but at full scale in another network new interpreters."""
    words = ["join", "run.json", experiment, "--as", *names]
    if network is not None and FULL:
        command = [*within(network), sys.executable, "-m", "penstock", *words]
        return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True)
    with pytest.MonkeyPatch.context() as patch:
        if network is not None:
            patch.setenv("ENTERED_NETWORK", network)
        return Program([PROGRAMS / "command.py", *words], cwd=folder)


def ending(process: subprocess.Popen[str]) -> tuple[int, str]:
    text = process.communicate(timeout=60)[1]
    return process.returncode, text


def load(folder: Path) -> dict[str, Any]:
    (folder / "exp.py").write_text(MODULE)
    namespace: dict[str, Any] = {"__name__": "__main__"}  # its classes are pickled by value
    exec(MODULE, namespace)
    return namespace


def others(experiment: Experiment) -> list[tuple[Experiment, str]]:
    """Experiments that differ from this one, and what an error says of each."""

    def acting(env: str = "CartPole-v1", T: int = 8, B: int = 4, **changes: Any) -> Experiment:
        sampler = partial(SerialSampler, env, batch_T=T, batch_B=B)
        return replace(experiment, actors=replace(experiment.actors, make_sampler=sampler, **changes))

    return [
        (replace(experiment, name="other"), "the name is joined there and other here"),
        (acting(T=16), "batch_T is 8 there and 16 here"),
        (acting(B=2), "batch_B is 4 there and 2 here"),
        (acting(bootstrap_value=False), "bootstrap_value is True there and False here"),
        (
            replace(acting(samples="x"), training=replace(experiment.training, stream="x")),
            "samples is train there and x here",
        ),
        (acting(joining=3), r"the number of actors is \(1, 2\) there and \(1, 3\) here"),
        (replace(experiment, make_agent=RandomAgent), r"the parameters is {.*'float32\[3, 4\]'.* there and {} here"),
        (
            replace(acting("MountainCar-v0"), make_agent=RandomAgent),
            "the observation space is .*; the action space is .*; the parameters",
        ),
    ]


def samples(state: RunState, name: str = "actor/1") -> int:
    """How many it has made; 0 while it is not there."""
    figures = state.workers.get(name, {})
    return int(figures.get("samples", 0)) if figures.get("status") == "RUNNING" else 0


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.timeout(180)
def test_actors_of_another_machine_join_are_lost_and_join_again_and_others_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = load(tmp_path)
    experiment = names["EXPERIMENT"]

    early = join(tmp_path, "actor/1", "actor/2")  # before the run has begun
    with experiment.run(wire="zmq", file=tmp_path / "run.json") as run:
        state = run.wait(lambda s: samples(s, "actor/1") > 0 and samples(s, "actor/2") > 0, timeout=60)
        assert min(samples(state, f"actor/{i}") for i in range(3)) > 0
        code, text = ending(join(tmp_path, "actor/1"))
        assert code == 1
        assert "the name 'workers/actor/1' is taken by" in text
        assert text.endswith("actor/1: exited with code 1\n")
        os.killpg(early.pid, signal.SIGKILL)
        early.communicate()
        state = run.wait(lambda s: {s.workers[f"actor/{i}"]["status"] for i in (1, 2)} == {"LOST"}, timeout=60)
        version = state.version
        state = run.wait(lambda s: s.version >= version + 3, timeout=60)
        assert state.version >= version + 3, "the run goes on"
        late = join(tmp_path, "actor/2")
        state = run.wait(lambda s: samples(s, "actor/2") > 0, timeout=60)
        assert samples(state, "actor/2") > 0
        # `test_tuning.py` has what the command line makes of such an error.
        for other, says in others(experiment):
            with pytest.raises(ConfigError, match=f"the run and this experiment differ: {says}"):
                other.join(tmp_path / "run.json", ["actor/1"])
        for name, says in (("json:MODEL", "cannot load json:MODEL"), ("json:dumps", "json:dumps is no Experiment")):
            assert main(["join", str(tmp_path / "run.json"), name, "--as", "actor/1"]) == 2
            assert says in capsys.readouterr().err
        assert run.restarts == {"trainer/0": 0, "policy/0": 0, "actor/0": 0}
    assert ending(late) == (0, "actor/2: exited with code 0\n"), "the end of the run ends it"


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("host", [None, "::1"])
def test_an_actor_joins_a_run_at_an_address_of_ipv6(tmp_path: Path, host: str | None) -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    actors = Actors(1, SAMPLER, joining=1)
    experiment = Experiment("six", RandomAgent, actors, Training(partial(Lingers, tmp_path, "never")), seed=0)
    endings: dict[str, str] = {}
    file = tmp_path / "run.json"
    with experiment.run(wire="zmq", host="::1", file=file) as run:
        thread = threading.Thread(target=lambda: endings.update(experiment.join(file, ["actor/1"], host=host)))
        thread.start()
        assert samples(run.wait(lambda s: samples(s) > 0, timeout=60)) > 0
    thread.join(60)
    assert endings == {"actor/1": "exited with code 0"}


LICENSED = """
import os
from dataclasses import replace

def licensed(pid):
    if os.getpid() != pid:
        raise RuntimeError("no licence on this machine")
    return EXPERIMENT.actors.make_sampler()

LICENSED = replace(EXPERIMENT, actors=replace(EXPERIMENT.actors, make_sampler=partial(licensed, os.getpid())))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_an_actor_that_cannot_be_configured_says_why_on_its_machine(tmp_path: Path) -> None:
    experiment = load(tmp_path)["EXPERIMENT"]
    (tmp_path / "exp.py").write_text(MODULE + LICENSED)
    with experiment.run(wire="zmq", file=tmp_path / "run.json") as run:
        process = join(tmp_path, "actor/1", experiment="exp.py:LICENSED")
        run.wait(lambda s: process.poll() is not None, timeout=60)
        code, text = ending(process)
    assert code == 1
    assert "worker actor/1 could not be configured" in text
    assert "RuntimeError: no licence on this machine" in text
    assert text.endswith("actor/1: exited with code 1\n")


def within(network: str) -> list[str]:
    """What comes before a command that runs in this network."""
    return ["nsenter", f"--net={network}"]


def ip(command: str, prefix: Sequence[str] = ()) -> None:
    subprocess.run([*prefix, "ip", *command.split()], check=True)


@pytest.fixture
def other_network() -> Iterator[str]:
    """The path of another network. This machine is 10.78.0.2 there, and 10.78.0.1 here."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("needs root, unshare, nsenter and ip")
    holder = subprocess.Popen(["unshare", "--net", "sleep", "600"])
    path = f"/proc/{holder.pid}/ns/net"
    try:
        wait_until(lambda: os.readlink(path) != os.readlink("/proc/self/ns/net"))
        command = ["ip", "link", "add", "ps-near", "type", "veth", "peer", "name", "ps-far"]
        made = subprocess.run(command, capture_output=True)
        if made.returncode:
            pytest.skip(f"no link between two networks: {made.stderr.decode()}")
        ip(f"link set ps-far netns {holder.pid}")
        for end, address, where in (("ps-near", "10.78.0.1", []), ("ps-far", "10.78.0.2", within(path))):
            ip(f"addr add {address}/24 dev {end}", where)
            ip(f"link set {end} up", where)
        yield path
    finally:
        subprocess.run(["ip", "link", "del", "ps-near"], capture_output=True)
        holder.kill()
        holder.wait()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.timeout(240)
@pytest.mark.xdist_group("other network")
def test_an_actor_of_another_network_ends_and_joins_again_after_a_long_cut_of_the_link_and_goes_on_after_a_short_one(
    tmp_path: Path, other_network: str
) -> None:
    """A cut is long if it lasts more than 2 s; the limit is 30 s otherwise. The actor waits for a policy worker, which
    it cannot reach either."""
    experiment = load(tmp_path)["EXPERIMENT"]
    with open(tmp_path / "exp.py", "a") as file:
        file.write("from penstock.distributed import role\nrole.ORPHAN_SECONDS = 2.0\n")

    with experiment.run(wire="zmq", host="10.78.0.1", file=tmp_path / "run.json") as run:
        pid = run.panel.pid("trainer/0")

        def until_it_is_lost() -> None:
            state = run.wait(lambda s: s.workers["actor/1"]["status"] == "LOST", timeout=60)
            assert state.workers["actor/1"]["status"] == "LOST"
            assert run.wait(lambda s: s.version >= state.version + 3, timeout=60).version >= state.version + 3

        joined = join(tmp_path, "actor/1", network=other_network)
        assert samples(run.wait(lambda s: samples(s) > 0, timeout=90)) > 0
        ip("link set ps-near down")
        began = time.monotonic()
        code, text = ending(joined)
        assert time.monotonic() - began < 20
        assert (code, text.splitlines()[-1]) == (1, "actor/1: exited with code 1")
        until_it_is_lost()
        ip("link set ps-near up")
        load(tmp_path)  # the limit is 30 s again: the next cut is shorter
        joined = join(tmp_path, "actor/1", network=other_network)
        assert samples(run.wait(lambda s: samples(s) > 0, timeout=60)) > 0
        ip("link set ps-near down")
        until_it_is_lost()
        ip("link set ps-near up")
        before = samples(run.wait(lambda s: samples(s) > 0, timeout=60))
        state = run.wait(lambda s: samples(s) > before, timeout=60)
        assert samples(state) > before
        assert run.panel.pid("trainer/0") == pid
        assert run.restarts == {"trainer/0": 0, "policy/0": 0, "actor/0": 0}
    assert ending(joined) == (0, "actor/1: exited with code 0\n")


def test_arguments_of_joins_and_of_several_trainers(tmp_path: Path) -> None:
    good = Experiment("test", RandomAgent, Actors(1, SAMPLER), Training(int))
    for actors, training, message in (
        ({"joining": -1}, {}, "joining must be an integer of at least 0"),
        ({"joining": True}, {}, "joining must be an integer"),
        ({"joining": 1}, {}, "only with wire=\"zmq\", got 'local'"),
        ({}, {"count": 0}, "the number of trainers must be an integer of at least 1"),
        ({}, {"count": 2}, "several trainers must be processes"),
        ({}, {"count": 2, "backend": "mpi"}, "backend must be one of gloo, nccl"),
    ):
        wrong = replace(good, actors=replace(good.actors, **actors), training=replace(good.training, **training))
        with pytest.raises(ConfigError, match=message):
            wrong.run()
    joinable = replace(good, actors=replace(good.actors, joining=1))
    with pytest.raises(ConfigError, match="is no connection file"):
        joinable.join(tmp_path / "none.json", ["actor/1"], timeout=0.1)
    for names in ([], "actor/1", ["actor/1", "actor/1"], ["actor/0"], ["actor/2"], ["policy/0"], ["actor"], [1]):
        with pytest.raises(
            ConfigError, match=r"the names \(after --as\) must be some of actor/1, such as --as actor/1, got"
        ):
            joinable.join(tmp_path / "none.json", names, timeout=0.1)  # type: ignore[arg-type]


class ValueTrainer:
    """Learns the rewards, writes its parameters to a file after each step, and dies where it is told to."""

    def __init__(self, folder: str, agent: Any) -> None:
        import torch

        self.rank = torch.distributed.get_rank()
        self.agent, self.folder, self.steps = agent, Path(folder), 0
        self.optimizer = torch.optim.SGD(agent.model.parameters(), 0.01)

    def step(self, batch: Batch) -> Mapping[str, float]:
        # Before the gradients are averaged: a step that one rank has made, the others have made and written too.
        if (self.folder / f"die {self.rank}").exists():
            (self.folder / f"die {self.rank}").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)  # actors and policy worker wait for it, and leave the CPUs to others
        _, value = self.agent.model(batch.samples.env.observation)
        loss = (value - batch.samples.env.observation.sum(-1)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        values = [parameter.detach().numpy().ravel() for parameter in self.agent.model.parameters()]
        np.save(self.folder / f"{self.steps} {self.rank}.npy", np.concatenate(values))
        return {"steps": self.steps}

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("wire", ["zmq", pytest.param("ray", marks=pytest.mark.ray)])
def test_two_trainers_have_equal_parameters_and_are_restarted_together(
    wire: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    need(wire, request)
    experiment = Experiment(
        "two",
        partial(CategoricalPgAgent, small_model),
        Actors(2, SAMPLER, inference="policy"),
        Training(partial(ValueTrainer, str(tmp_path)), count=2, checkpoint=tmp_path / "trainer.pt", save_every=2),
        Policies(1),
        seed=0,
    )

    def check(first: int, last: int) -> None:
        for step in range(first, last):
            one, other = (np.load(tmp_path / f"{step} {rank}.npy") for rank in (0, 1))
            np.testing.assert_array_equal(one, other)
        assert not np.array_equal(one, np.load(tmp_path / f"{first} 0.npy"))

    with experiment.run(wire=wire) as run:
        version = run.wait(lambda s: s.version >= 6, timeout=120).version
        assert version >= 6
        if wire == "zmq":  # without a host, no other machine can connect
            for rank in (0, 1):
                links = psutil.Process(run.panel.pid(f"trainer/{rank}")).net_connections()
                assert {link.laddr.ip for link in links if link.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
        check(1, 5)
        for number, rank in enumerate(scaled((1, 0, 1), (1,)), 1):
            (tmp_path / f"die {rank}").touch()
            state = run.wait(
                lambda s, n=number, v=version: (
                    sum(run.restarts.values()) >= n and s.version >= v + 6 and "steps" in s.trainer
                ),
                timeout=150,
            )
            version = state.version
            assert sum(run.restarts.values()) == number, "one failure counts once"
            check(version - 4, version - 1)
    assert sum(run.restarts.values()) == len(scaled((1, 0, 1), (1,)))


def linger(file: Path, seconds: float = 60.0) -> None:
    """Wait until the file exists, but not for ever."""
    until = time.monotonic() + seconds
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.01)


class Gradients:
    """Averages gradients with the other trainers."""

    def __init__(self, agent: Any) -> None:
        self.agent = agent

    def step(self, batch: Batch) -> None:
        time.sleep(0.05)
        self.agent.model.zero_grad()
        self.agent.model(batch.samples.env.observation)[1].square().mean().backward()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["actor/0", "policy/0"])
def test_two_trainers_go_on_when_the_only_worker_of_a_kind_is_killed(name: str) -> None:
    """One trainer waits for the other, that one for pieces, and the worker that is started again for parameters."""
    inference = "policy" if name == "policy/0" else None
    experiment = Experiment(
        "two",
        partial(CategoricalPgAgent, small_model),
        Actors(1 + bool(inference), SAMPLER, inference=inference),
        Training(Gradients, count=2, batch=2),
        Policies(1) if inference else None,
        seed=0,
    )
    with experiment.run(wire="zmq") as run:
        version = run.wait(lambda s: s.version >= 4, timeout=120).version
        for n in range(1, 1 + scaled(6, 2)):
            os.kill(run.panel.pid(name), signal.SIGKILL)
            state = run.wait(lambda s, n=n, v=version: run.restarts[name] >= n and s.version >= v + 4, timeout=60)
            assert state.version >= version + 4
            version = state.version
        assert {other: n for other, n in run.restarts.items() if n} == {name: scaled(6, 2)}


class Lingers:
    """Its third step lasts until there is a file, or from then on each save."""

    def __init__(self, folder: Path, what: str, agent: Any) -> None:
        self.folder, self.what, self.n = folder, what, 0

    def linger(self, what: str) -> None:
        if self.n >= 3 and self.what == what:
            (self.folder / "lingers").touch()
            linger(self.folder / "go")

    def step(self, batch: Batch) -> dict[str, float]:
        self.n += 1
        self.linger("step")
        return {"n": self.n}

    def state_dict(self) -> dict[str, Any]:
        self.linger("save")
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n = state["n"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_an_actor_is_replaced_while_its_trainer_is_in_a_long_step(tmp_path: Path) -> None:
    training = Training(partial(Lingers, tmp_path, "step"))
    with Experiment("long", RandomAgent, Actors(1, SAMPLER), training, seed=0).run(wire="zmq") as run:
        run.wait(lambda _: (tmp_path / "lingers").exists(), timeout=60)
        pid = run.panel.pid("actor/0")
        os.kill(pid, signal.SIGKILL)

        def is_back(state: RunState) -> bool:
            facts = state.workers["actor/0"]
            return run.restarts["actor/0"] == 1 and facts["status"] == "RUNNING" and facts["samples"] > 0

        assert is_back(run.wait(is_back, timeout=30))
        (tmp_path / "go").touch()
        assert run.wait(lambda s: s.version >= 5, timeout=30).version >= 5


def lingering(folder: Path, what: str) -> Experiment:
    training = Training(
        partial(Lingers, folder, what), checkpoint=folder / "trainer.pt", save_every=2 if what == "step" else 10**6
    )
    return Experiment("slow", RandomAgent, Actors(1, SAMPLER), training, seed=0)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("what", ["step", "save"])
def test_the_end_of_a_run_waits_for_a_trainer_that_works_and_for_nobody_else(tmp_path: Path, what: str) -> None:
    saved = lingering(tmp_path, what)
    with saved.run(wire="zmq") as run:
        condition = (lambda s: s.trainer.get("n", 0) >= 3) if what == "save" else (lambda s: lingers(tmp_path))
        run.wait(condition, timeout=60)
        actor = psutil.Process(run.panel.pid("actor/0"))
        actor.suspend()  # so it ends only when it is killed, after `timeout`
        run.panel.close = partial(run.panel.close, 0.3)  # type: ignore[method-assign]

        def let_it_go() -> None:
            wait_until(lambda: not actor.is_running(), 60)
            (tmp_path / "go").touch()

        thread = threading.Thread(target=let_it_go)
        thread.start()
    thread.join()
    assert run.panel.failed_at_end == {}
    state = torch.load(tmp_path / "trainer.pt", weights_only=True)
    assert state["trainer"]["n"] == state["version"] - 1 >= 3


def lingers(folder: Path) -> bool:
    return (folder / "lingers").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("how", ["close_timeout", "hang_timeout"])
def test_a_trainer_that_had_to_be_killed_is_an_error_that_says_what_is_lost(tmp_path: Path, how: str) -> None:
    error = (
        r"trainer/0 has failed at the end of the run: it has not ended within \d+ s, so it was killed. It had made "
        r"version [123] or a later one, and had saved (none that is known|version 2 or a later one)$"
    )
    timeouts: Any = {how: 1.0}
    with pytest.raises(ClusterError, match=error), lingering(tmp_path, "step").run(wire="zmq", **timeouts) as run:
        run.wait(lambda _: lingers(tmp_path), timeout=60)
        run.panel.close = partial(run.panel.close, 0.3)  # type: ignore[method-assign]
        if how == "hang_timeout":
            psutil.Process(run.panel.pid("trainer/0")).suspend()
    assert torch.load(tmp_path / "trainer.pt", weights_only=True)["version"] == 2


class Dies(Lingers):
    """A trainer whose last save fails in many ways."""

    def state_dict(self) -> dict[str, Any]:
        if self.what == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.what == "_exit":
            os._exit(0)
        elif self.what == "SystemExit":
            sys.exit("it cannot save")
        elif self.what == "KeyboardInterrupt":
            raise KeyboardInterrupt
        elif self.what == "hangs":
            threading.Event().wait()
        return super().state_dict()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("SIGKILL", r"it has ended without a report \(.*SIGKILL.*\)"),
        ("_exit", r"it has ended without a report \(.*code 0.*\)"),
        ("SystemExit", r"_close raised SystemExit: it cannot save"),
        ("KeyboardInterrupt", r"_close raised KeyboardInterrupt.*"),
        ("hangs", r"it has not ended within \d+ s, so it was killed"),
        ("killed before", r"it has ended without a report \(.*SIGKILL.*\)"),
        ("killed before, no checkpoint", r"it has ended without a report \(.*SIGKILL.*\)"),
        ("is well", None),
        ("is well, no checkpoint", None),
    ],
)
def test_a_trainer_that_does_not_report_its_end_is_an_error(tmp_path: Path, how: str, error: str | None) -> None:
    path = None if "no checkpoint" in how else tmp_path / "trainer.pt"
    training = Training(partial(Dies, tmp_path, how), checkpoint=path, save_every=10**6)
    run = Experiment("dies", RandomAgent, Actors(1, SAMPLER), training, seed=0).run(wire="zmq", close_timeout=1.0)
    run.panel.close = partial(run.panel.close, 1.0 if how == "hangs" else 5.0)  # type: ignore[method-assign]
    try:
        assert run.wait(lambda s: s.version >= 3, timeout=60).version >= 3
        if how.startswith("killed"):
            run.panel.kill("trainer/0")
    finally:
        if error is None:
            run.close()
        else:
            lost = rf"trainer/0 has failed at the end of the run: {error}. It had made version \d+ or a later one, and "
            with pytest.raises(ClusterError, match=lost + "had saved none that is known"):
                run.close()
    assert (path is not None and path.exists()) == (how == "is well")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("close_timeout", [0.5, 60.0])
def test_a_trainer_that_saves_itself_before_a_restart_may_end_it(tmp_path: Path, close_timeout: float) -> None:
    """Rank 1 has failed, so rank 0 saves itself, and the run is closed meanwhile."""
    training = Training(
        partial(Lingers, tmp_path, "save"), checkpoint=tmp_path / "trainer.pt", save_every=10**6, count=2
    )
    agent = partial(CategoricalPgAgent, small_model)
    run = Experiment("two", agent, Actors(1, SAMPLER), training, seed=0).run(wire="zmq", close_timeout=close_timeout)
    try:
        run.wait(lambda s: s.version >= 5, timeout=60)
        run.panel.kill("trainer/1")
        run.wait(lambda s: lingers(tmp_path), timeout=60)
        run.panel.close = partial(run.panel.close, 0.3)  # type: ignore[method-assign]
        if close_timeout > 1:
            waited = threading.Timer(1.0, (tmp_path / "go").touch)  # longer than others may take
            waited.start()
    finally:
        if close_timeout > 1:
            run.close()
            waited.join()
            assert torch.load(tmp_path / "trainer.pt", weights_only=True)["version"] >= 5
        else:
            with pytest.raises(ClusterError, match=r"trainer/0 has failed .* it has not ended within .* it was killed"):
                run.close()
