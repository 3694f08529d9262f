"""Shakespeare by speaking role: a client is a role of a play, an example a window of 80 characters and the next one.

From text the windows are made as in LEAF: a speech is one line, with 80 spaces before it and one line end behind it,
and every character after these spaces is the target of one window. Runs of white space become one space.
"""

from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from afflux.sim.data.folder import Layout, read_first
from afflux.sim.data.formats.errors import bad_file
from afflux.sim.data.formats.leaf import leaf_folders, read_text
from afflux.sim.data.formats.speeches import read_roles, read_table
from afflux.sim.data.text_set import WINDOW, TextSet, encode
from afflux.sim.errors import ConfigError

LEAST_CHARACTERS = 1000
TRAIN_SHARE = 0.8


def read_shakespeare(
    data_dir: Path, least_characters: int = LEAST_CHARACTERS, train_share: float = TRAIN_SHARE
) -> TextSet:
    """Read Shakespeare's plays by speaking role.

    Args:
        data_dir: the user's folder.
        least_characters: roles with fewer characters are left out; in LEAF's JSON, all roles are kept.
        train_share: the first speeches of a role, until they have this share of its characters, are the training
            part; the rest is the test part. No window has characters of both. LEAF's JSON has its own parts.

    Raises:
        ConfigError: there is no file, a file is damaged, no role has enough characters, or a share is not in (0, 1].
    """
    if not 0 < train_share <= 1:
        raise ConfigError(f"train_share is {train_share}, must be in (0, 1]")
    own = partial(_from_speeches, least_characters=least_characters, train_share=train_share)
    layouts = [
        Layout((".", "shakespeare"), ("shakespeare_speeches.tsv",), lambda paths: own(paths[0], read_table(paths[0]))),
        Layout(leaf_folders("shakespeare"), ("train", "test"), _from_leaf),
        Layout(("shakespeare",), ("roles",), lambda paths: own(paths[0], read_roles(paths[0]))),
    ]
    return read_first("shakespeare", data_dir, layouts)


def _from_speeches(
    path: Path, speeches: Iterator[tuple[str, str]], least_characters: int, train_share: float
) -> TextSet:
    by_role: dict[str, list[str]] = {}
    for role, speech in speeches:
        by_role.setdefault(role, []).append(speech)
    by_role = {role: own for role, own in by_role.items() if sum(map(len, own)) >= least_characters}
    if not by_role:
        raise bad_file(path, f"has no role with {least_characters} characters", "speeches of such roles")
    lines: list[str] = []
    parts = (array("q"), array("q")), (array("q"), array("q"))  # starts and owners, of both parts
    length = 0
    for number, own in enumerate(by_role.values()):
        wanted = train_share * sum(map(len, own))
        seen = 0
        for speech in own:
            starts, owners = parts[seen >= wanted]
            seen += len(speech)
            line = " " * WINDOW + " ".join(speech.split()) + "\n"
            count = len(line) - WINDOW
            starts.extend(range(length, length + count))
            owners.extend([number] * count)
            lines.append(line)
            length += len(line)
    return _text_set("".join(lines), parts, tuple(by_role))


def _from_leaf(folders: list[Path]) -> TextSet:
    roles: dict[str, int] = {}
    pieces: list[str] = []
    parts = []
    for folder in folders:
        starts, owners = array("q"), array("q")
        for path, user, examples in read_text(folder):
            number = roles.setdefault(user, len(roles))
            for window, target in zip(examples.x, examples.y, strict=True):
                if len(window) != WINDOW or len(target) != 1:
                    found = (
                        f"has an example of user {user!r} with {len(window)} characters and {len(target)} after them"
                    )
                    raise bad_file(path, found, f"{WINDOW} characters and one after them")
                starts.append(len(pieces) * (WINDOW + 1))
                owners.append(number)
                pieces.append(window + target)
        if not starts:
            raise bad_file(folder, "has no example", "users with examples")
        parts.append((starts, owners))
    return _text_set("".join(pieces), (parts[0], parts[1]), tuple(roles))


Part = tuple["array[int]", "array[int]"]


def _text_set(text: str, parts: tuple[Part, Part], roles: tuple[str, ...]) -> TextSet:
    codes = encode(text)
    train, test = (tuple(np.array(values, np.int64) for values in part) for part in parts)
    for values in (codes, *train, *test):
        values.flags.writeable = False
    return TextSet("shakespeare", codes, train[0], test[0], roles, train[1], test[1])
