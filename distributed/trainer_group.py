"""Several trainers as one group of `torch.distributed`: all keep the same parameters."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
import torch
from torch import distributed

from penstock.agents import Agent
from penstock.distributed.names import NameClient
from penstock.distributed.wire import Node
from penstock.errors import ConfigError

_SECONDS = 60.0  # how long the ranks wait for each other at the start
_LONGEST = 1e8  # seconds, since torch counts milliseconds


class TrainerGroup:
    """One rank of the group. While it exists, the gradients of `agent.model` are averaged over all ranks.

    Args:
        key: the name of the group. Rank 0 adds the address of the store there.
        patience: seconds that a rank waits for the others in a step. If a process ends, the others see it earlier.
    """

    def __init__(
        self,
        wire: Node,
        names: NameClient,
        key: str,
        rank: int,
        world_size: int,
        backend: str,
        agent: Agent,
        patience: float,
    ) -> None:
        model = getattr(agent, "model", None)
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(
                f"several trainers average the gradients of agent.model, and {type(agent).__name__} has none: use one "
                "trainer, or an agent with a model"
            )
        self._rank, self._world_size, wait = rank, world_size, timedelta(seconds=_SECONDS)
        make_store = distributed.TCPStore  # type: ignore[attr-defined]
        host = wire.address.rpartition("/")[2].rpartition(":")[0].strip("[]")
        if (interface := _interface_of(host)) is not None:  # otherwise gloo takes that of the machine's name
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if rank == 0:
            # A socket of ours: the store's own would listen at every address, and it asks for no key.
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, 0), family=family)
            port = listener.getsockname()[1]
            self._store = make_store(
                host, port, world_size, True, wait, wait_for_workers=False, master_listen_fd=listener.detach()
            )
            names.add(key, [host, port])
        else:
            store_host, port = names.wait(key, _SECONDS)
            self._store = make_store(store_host, port, world_size, False, wait)
        longest = timedelta(seconds=min(patience, _LONGEST))
        distributed.init_process_group(backend, store=self._store, rank=rank, world_size=world_size, timeout=longest)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._average)  # type: ignore[no-untyped-call]

    def _average(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        distributed.all_reduce(parameter.grad)
        parameter.grad /= self._world_size

    def lineage_of_rank_0(self, candidate: int) -> int:
        """What rank 0 has passed as `candidate`, when all ranks have called this."""
        if self._rank == 0:
            self._store.set("lineage", str(candidate))
        lineage = int(self._store.get("lineage"))
        distributed.barrier()
        return lineage

    def close(self) -> None:
        """Leave the group. The other ranks then fail at their next step."""
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _interface_of(host: str) -> str | None:
    """The network interface that has this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == host for address in addresses):
            return name
    return None
