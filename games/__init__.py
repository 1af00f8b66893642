"""Games in processes of their own: started on leased ports, watched, ended and renewed; games that are in charge.

A leased port has one owner on this machine until it is released.
"""

from penstock.games.game_process import GameProcess
from penstock.games.game_socket import GameSocket
from penstock.games.lease import PortLease, PortLeases, lease_port, leases
from penstock.games.served import ServedGame

__all__ = ["GameProcess", "GameSocket", "PortLease", "PortLeases", "ServedGame", "lease_port", "leases"]
