"""The server: clients pull and push, and every M arrivals make a round.

Also the plan of a server, its persistence, and the replay of its log.
"""

from afflux.server.server import Server

__all__ = ["Server"]
