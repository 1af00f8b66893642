"""Games and environments in processes of their own, on leased ports: watched, ended and renewed; and games
with their own main loop.

A leased port has one owner on this machine until it is released.
"""

from penstock.games.env_process import EnvProcess
from penstock.games.game_process import GameProcess
from penstock.games.game_socket import GameSocket
from penstock.games.host import NotSent
from penstock.games.lease import PortLease, PortLeases, lease_port, leases
from penstock.games.served import ServedGame

__all__ = [
    "EnvProcess",
    "GameProcess",
    "GameSocket",
    "NotSent",
    "PortLease",
    "PortLeases",
    "ServedGame",
    "lease_port",
    "leases",
]
