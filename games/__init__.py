"""Games in processes of their own: started on leased ports, watched, ended and renewed; games that are in charge."""

from penstock.games.served import ServedGame

__all__ = ["ServedGame"]
