"""Launches two workers, says their process ids, and waits to be killed: `panel.py WIRE`."""

import subprocess
import sys
import time
from typing import Any

from penstock.distributed import ControlPanel, Worker


class Sleeper(Worker):
    def _configure(self, has_children: bool = False) -> None:
        if has_children:
            from penstock.vector import ShmVectorEnv

            self.envs = ShmVectorEnv(["CartPole-v1"] * 2, n_workers=2)
            self.child = subprocess.Popen(["sleep", "600"])

    def _poll(self) -> None:
        time.sleep(60)


if __name__ == "__main__":
    wire: Any = sys.argv[1]
    panel = ControlPanel("test", wire=wire)
    names = panel.launch(Sleeper, 2)
    panel.connect(timeout=60)
    configured = panel.group_request("configure", kwargs=[{"has_children": sys.argv[1] == "zmq"}, {}])
    assert all(response.is_ok for response in configured), configured
    panel.group_request("start")
    print(*map(panel.pid, names), flush=True)
    sys.stdin.read()
