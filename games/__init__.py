"""Games in processes of their own: started on leased ports, watched, ended and renewed; games that are in charge."""

from penstock.games.game_process import GameProcess
from penstock.games.game_socket import GameSocket
from penstock.games.served import ServedGame

__all__ = ["GameProcess", "GameSocket", "ServedGame"]
