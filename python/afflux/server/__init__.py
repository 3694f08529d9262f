"""The server: clients pull and push, every M arrivals make a round. Its plan, its persistence, the replay of a log."""

from afflux.server.server import Server

__all__ = ["Server"]
