"""Servers whose vectors are in several processes or on several machines; needs `afflux[ray]`, but not to be imported.

RayPlane        the vectors of a server in shards, each of them in an actor of Ray
ServerHandle    such a server for tasks and actors of Ray: `Server.handle`
"""

from afflux.distributed.handle import ServerHandle
from afflux.distributed.ray_plane import RayPlane

__all__ = ["RayPlane", "ServerHandle"]
