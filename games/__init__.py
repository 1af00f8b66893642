"""Games in processes of their own: started on leased ports, watched, ended and renewed; games that are in charge."""

from penstock.games.game_process import GameProcess
from penstock.games.game_socket import GameSocket
from penstock.games.running import Answers, Connects, Listens, Prints, Ready
from penstock.games.served import ServedGame

__all__ = ["Answers", "Connects", "GameProcess", "GameSocket", "Listens", "Prints", "Ready", "ServedGame"]
