"""The server: clients pull and push, and every M arrivals make a round. Also its plan, persistence, and replay of a
log.
"""

from afflux.server.server import Server

__all__ = ["Server"]
