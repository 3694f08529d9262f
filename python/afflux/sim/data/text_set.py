"""A data set of text by owner: an example is a window of characters and the character that follows."""

from dataclasses import dataclass

import numpy as np

from afflux.sim.data.image_set import shards_of

ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's 80 characters; the index of a character is its class."""
UNKNOWN = ALPHABET.index(" ")
"""The index of characters outside the alphabet, as in LEAF."""
WINDOW = 80


@dataclass(frozen=True, eq=False)
class TextSet:
    """Windows of encoded text, by owner. All arrays are read-only.

    A window is given by its start in `text`: windows overlap, and copies of all of them would take 80 times the memory.
    """

    name: str
    text: np.ndarray
    """(characters,) uint8: indices into `ALPHABET`."""
    train: np.ndarray
    """(n,) int64: starts of the training windows."""
    test: np.ndarray
    owners: tuple[str, ...]
    """Names of the clients: speaking roles."""
    train_owner: np.ndarray
    """(n,) int64: index into `owners`."""
    test_owner: np.ndarray
    window: int = WINDOW
    num_classes: int = len(ALPHABET)

    def examples(self, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return windows and the characters that follow them.

        Args:
            starts: some of `train` or `test`, shape (k,).

        Returns:
            (k, window) and (k,), both int64.
        """
        windows = np.lib.stride_tricks.sliding_window_view(self.text, self.window)
        return windows[starts].astype(np.int64), self.text[starts + self.window].astype(np.int64)

    def shards(self) -> list[np.ndarray]:
        """Return the indices into `train` of each owner's windows, ascending."""
        return shards_of(self.train_owner, len(self.owners))


def encode(text: str) -> np.ndarray:
    """Return the index of each character in `ALPHABET`, uint8; of others that of a space."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    table = np.full(128, UNKNOWN, np.uint8)
    table[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET))
    return np.asarray(np.where(points < 128, table[np.minimum(points, 127)], np.uint8(UNKNOWN)))


def decode(codes: np.ndarray) -> str:
    """Return the text of indices into `ALPHABET`."""
    return "".join(ALPHABET[code] for code in codes)
