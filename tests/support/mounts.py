"""File systems of a child's own: a small one that fills up, and one that can only be read. Nobody else sees them."""

import ctypes
import os

NEWNS, NEWUSER = 0x20000, 0x10000000
RDONLY, REMOUNT, REC, PRIVATE = 1, 32, 0x4000, 1 << 18


class NotAllowedError(Exception):
    """This system lets no process mount what only it sees."""


def _checked(result):
    if result:
        raise NotAllowedError(os.strerror(ctypes.get_errno()))


class Tmpfs:
    """Mounted in this process alone, which must be a child that ends soon."""

    def __init__(self, path, size):
        self.path = os.fsencode(path)
        try:
            self._libc = ctypes.CDLL(None, use_errno=True)
            _checked(self._libc.unshare(NEWNS if os.geteuid() == 0 else NEWNS | NEWUSER))
        except AttributeError:
            raise NotAllowedError("no unshare") from None
        self._mount(b"none", b"/", None, REC | PRIVATE, None)
        self._mount(b"tmpfs", self.path, b"tmpfs", 0, b"size=%d" % size)

    def _mount(self, *arguments):
        source, target, kind, flags, options = arguments
        _checked(self._libc.mount(source, target, kind, ctypes.c_ulong(flags), options))

    def resize(self, size):
        self._mount(b"tmpfs", self.path, None, REMOUNT, b"size=%d" % size)

    def read_only(self):
        self._mount(b"tmpfs", self.path, None, REMOUNT | RDONLY, None)

    def writable(self):
        self._mount(b"tmpfs", self.path, None, REMOUNT, None)
