"""Shakespeare by speaking role: a client is a role of a play, an example a window of 80 characters and the next one.

From text the windows are made as in LEAF: a speech is one line, with 80 spaces before it and one line end behind it,
and every character after these spaces is the target of one window. Runs of white space become one space.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from afflux.lab.tasks.leaf import LeafFile, leaf_folders, read_leaf
from afflux.sim.data.files import FileLayout, bad_file, read_table
from afflux.sim.data.image_set import shards_of

#: LEAF's 80 characters; the index of a character is its class.
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
UNKNOWN = ALPHABET.index(" ")  #: The index of characters outside the alphabet, as in LEAF.
WINDOW = 80
LEAST_CHARACTERS = 1000  #: Roles with fewer characters are left out; in LEAF's JSON, all roles are read.
#: The first speeches of a role, until they have this share of its characters, are the training part; the rest is the
#: test part. No window has characters of both. LEAF's JSON has its own parts.
TRAIN_SHARE = 0.8


@dataclass(frozen=True, eq=False)
class TextSet:
    """Windows of encoded text, by owner. All arrays are read-only.

    A window is given by its start in `text`: windows overlap, and copies of all of them would take 80 times the memory.
    """

    name: str
    text: np.ndarray  #: (characters,) uint8: indices into `ALPHABET`.
    train: np.ndarray  #: (n,) int64: starts of the training windows.
    train_owner: np.ndarray  #: (n,) int64: index into `owners`.
    test: np.ndarray
    test_owner: np.ndarray
    owners: tuple[str, ...]  #: Names of the clients: speaking roles.
    num_classes: int = len(ALPHABET)

    @property
    def shape(self) -> tuple[int, ...]:
        """(characters,) of a window."""
        return (WINDOW,)

    def examples(self, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return windows and the characters that follow them.

        Args:
            starts: some of `train` or `test`, shape (k,).

        Returns:
            (k, window) and (k,), both int64.
        """
        windows = np.lib.stride_tricks.sliding_window_view(self.text, WINDOW)
        return windows[starts].astype(np.int64), self.text[starts + WINDOW].astype(np.int64)

    def shards(self) -> list[np.ndarray]:
        """Return the indices into `train` of each owner's windows, ascending."""
        return shards_of(self.train_owner, len(self.owners))


def encode(text: str) -> np.ndarray:
    """Return the index of each character in `ALPHABET`, uint8; of others that of a space."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    table = np.full(128, UNKNOWN, np.uint8)
    table[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET))
    return np.asarray(np.where(points < 128, table[np.minimum(points, 127)], np.uint8(UNKNOWN)))


def _table(paths: list[Path]) -> TextSet:
    """Read a line for each speech; a backslash and an n in a text stand for the end of a verse."""
    lines = read_table(paths[0], ("play", "speaker", "text"))
    speeches = ((f"{play}: {speaker}", text.replace("\\n", "\n")) for _, (play, speaker, text) in lines)
    return _text_set(_lines_of_speeches(paths[0], speeches))


LAYOUTS = (
    FileLayout((".", "shakespeare"), ("shakespeare_speeches.tsv",), _table),
    FileLayout(leaf_folders("shakespeare"), ("train", "test"), lambda folders: _text_set(_lines_of_leaf(folders))),
)


def _lines_of_speeches(path: Path, speeches: Iterable[tuple[str, str]]) -> Iterator[tuple[str, int, str]]:
    by_role: dict[str, list[str]] = {}
    for role, speech in speeches:
        by_role.setdefault(role, []).append(speech)
    lengths = {role: sum(map(len, own)) for role, own in by_role.items()}
    if not any(length >= LEAST_CHARACTERS for length in lengths.values()):
        raise bad_file(path, f"has no role with {LEAST_CHARACTERS} characters", "speeches of such roles")
    for role, length in lengths.items():
        seen = 0
        for speech in by_role[role] if length >= LEAST_CHARACTERS else ():
            yield role, int(seen >= TRAIN_SHARE * length), " " * WINDOW + " ".join(speech.split()) + "\n"
            seen += len(speech)


def _lines_of_leaf(folders: list[Path]) -> Iterator[tuple[str, int, str]]:
    for part, folder in enumerate(folders):
        count = 0
        for path, user, examples in read_leaf(folder, LeafFile[str, str]):
            yield user, part, ""  # its number, if it has no example
            for window, target in zip(examples.x, examples.y, strict=True):
                if len(window) != WINDOW or len(target) != 1:
                    found = f"an example of user {user!r} with {len(window)} characters and {len(target)} after them"
                    raise bad_file(path, f"has {found}", f"{WINDOW} characters and one after them")
                yield user, part, window + target
            count += len(examples.x)
        if not count:
            raise bad_file(folder, "has no example", "users with examples")


def _text_set(lines: Iterable[tuple[str, int, str]]) -> TextSet:
    """Return the windows of lines: (role, 0 for the training part or 1 for the test part, text)."""
    roles: dict[str, int] = {}
    texts: list[str] = []
    parts = (array("q"), array("q")), (array("q"), array("q"))  # starts and owners, of both parts
    length = 0
    for role, part, line in lines:
        starts, owners = parts[part]
        starts.extend(range(length, length + len(line) - WINDOW))
        owners.extend([roles.setdefault(role, len(roles))] * (len(line) - WINDOW))
        texts.append(line)
        length += len(line)
    text = encode("".join(texts))
    train, train_owner, test, test_owner = (np.array(values, np.int64) for part in parts for values in part)
    for values in (text, train, train_owner, test, test_owner):
        values.flags.writeable = False
    return TextSet("shakespeare", text, train, train_owner, test, test_owner, tuple(roles))
