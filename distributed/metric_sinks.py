"""Where the figures of a run go: a file of JSON lines, TensorBoard, or Prometheus."""

from __future__ import annotations

import errno
import json
import os
import stat
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.distributed.closing import Closing
from penstock.errors import ConfigError


@dataclass(frozen=True)
class RunState:
    """A run at one moment: the trainer's version, seconds since the start, and the figures of each worker."""

    version: int
    seconds: float
    workers: Mapping[str, Mapping[str, Any]] = field(repr=False)

    @property
    def trainer(self) -> Mapping[str, Any]:
        """The trainer's figures: what its last `step` has returned, and `version`, `stale`, `largest_staleness`."""
        return self.workers.get("trainer/0", {})


class MetricsSink(Closing):
    """Takes the figures of a run. Use it in a `with` statement, and give it to `run.wait`. Subclass it for another
    place."""

    @abstractmethod
    def write(self, state: RunState) -> None:
        """Take the figures of one moment."""

    def close(self) -> None:
        """Nothing more will be written. Calling it again does nothing."""


class JsonLines(MetricsSink):
    """Appends one line of JSON each time: `{"version": 3, "seconds": 1.5, "workers": {"trainer/0": {...}, ...}}`.

    `write` raises `ConfigError` if the path is a link, or a file of another user, who could have planted it there.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path

    def write(self, state: RunState) -> None:
        figures = {"version": state.version, "seconds": state.seconds, "workers": state.workers}
        with open(self._path, "a", encoding="utf-8", opener=_open_own) as file:
            file.write(json.dumps(figures, default=str) + "\n")


def _open_own(path: str, flags: int) -> int:
    """As `os.open`, but only what is this user's own file: somebody else may have planted a link in this folder."""
    try:
        opened = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link; a pipe
            raise
    else:
        facts = os.fstat(opened)
        if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.getuid() and facts.st_nlink == 1:
            return opened
        os.close(opened)
    raise ConfigError(f"{path} is a link, no file, or not your own: give the path of a file of yours for the figures")


class TensorBoard(MetricsSink):
    """Writes event files into a folder: one curve `worker/figure` for each, over the version of the parameters.

    Raises `ConfigError` if tensorboard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        self._writer: Any = _need("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder))

    def write(self, state: RunState) -> None:
        for worker, name, value in _numbers(state.workers):
            self._writer.add_scalar(f"{worker}/{name}", value, state.version)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Prometheus(MetricsSink):
    """Serves the newest figures to Prometheus: `penstock_FIGURE{worker="actor/0"}`, and `penstock_up`, which is 1
    unless the worker has failed or is lost. A figure of this name is `penstock_up_`.

    Args:
        port: 0 for any free one; `address` has it.
        host: by default only this machine can connect. There is no password, so do not give it to others.

    Raises `ConfigError` if prometheus-client is not installed, or the port is taken.
    """

    def __init__(self, port: int = 0, *, host: str = "127.0.0.1") -> None:
        client = _need("prometheus_client", "prometheus-client")
        self._family: Any = _need("prometheus_client.core", "prometheus-client").GaugeMetricFamily
        self._workers: Mapping[str, Mapping[str, Any]] = {}
        registry = client.CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = client.start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise ConfigError(f"cannot serve figures at host={host!r}, port={port}: {error}") from error
        #: Where Prometheus finds the figures.
        self.address = f"http://{host}:{self._server.server_port}/metrics"
        self._is_closed = False

    def write(self, state: RunState) -> None:
        self._workers = state.workers

    def collect(self) -> Iterator[Any]:
        """For prometheus-client, which calls it in another thread."""
        workers, families = self._workers, dict[str, Any]()
        for worker, name, value in _numbers(workers):
            label = f"penstock_{''.join(c if c.isalnum() else '_' for c in name)}"
            label += "_" if label == "penstock_up" else ""
            family = families.setdefault(label, self._family(label, f"{name} of a worker", labels=["worker"]))
            family.add_metric([worker], value)
        up = self._family("penstock_up", "whether the worker works", labels=["worker"])
        for worker, facts in workers.items():
            up.add_metric([worker], float(facts["status"] not in ("ERROR", "LOST")))
        return iter([*families.values(), up])

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


def _numbers(workers: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, float]]:
    for worker, facts in workers.items():
        for name, value in facts.items():
            if isinstance(value, int | float):
                yield worker, name, float(value)


def _need(module: str, library: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f'{library} is not installed: pip install ".[metrics]"') from error
