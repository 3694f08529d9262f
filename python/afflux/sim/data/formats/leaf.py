"""LEAF's JSON: folders train/ and test/ with files of users, each with its examples x and y."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from afflux.sim.data.formats.errors import bad_file, readable
from afflux.sim.data.formats.files import read_bytes


class PixelExamples(msgspec.Struct, frozen=True):
    """A user's images: rows of pixels between 0 and 1, and labels."""

    x: list[list[float]]
    y: list[int]


class TextExamples(msgspec.Struct, frozen=True):
    """A user's text: strings, and the character that follows each."""

    x: list[str]
    y: list[str]


class _PixelFile(msgspec.Struct, frozen=True):
    users: list[str]
    user_data: dict[str, PixelExamples]


class _TextFile(msgspec.Struct, frozen=True):
    users: list[str]
    user_data: dict[str, TextExamples]


File = TypeVar("File", _PixelFile, _TextFile)


def leaf_folders(name: str) -> tuple[str, ...]:
    """Return the folders of train/ and test/: of the user, and of LEAF's repository and its folder data/."""
    return name, f"{name}/data", f"data/{name}/data"


def read_pixels(folder: Path) -> Iterator[tuple[Path, str, PixelExamples]]:
    """Yield file, user and examples of all *.json in a folder, in the order of file names and of users in a file.

    Raises:
        ConfigError: there is no file, or a file is not of LEAF's form.
    """
    for path, content in _read(folder, _PixelFile, "pixels"):
        yield from ((path, user, content.user_data[user]) for user in content.users)


def read_text(folder: Path) -> Iterator[tuple[Path, str, TextExamples]]:
    """Yield file, user and examples as `read_pixels` does, for text."""
    for path, content in _read(folder, _TextFile, "strings"):
        yield from ((path, user, content.user_data[user]) for user in content.users)


def _read(folder: Path, kind: type[File], values: str) -> Iterator[tuple[Path, File]]:
    expected = f"LEAF's JSON: 'users', and 'user_data' with 'x' (lists of {values}) and 'y' of each user"
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise bad_file(folder, "has no file *.json", expected)
    for path in paths:
        with readable(path, expected):
            # Errors of msgspec are ValueErrors, and name the place in the file.
            content = msgspec.json.decode(read_bytes(path, expected), type=kind)
        if len(set(content.users)) < len(content.users):
            raise bad_file(path, "lists a user twice", expected)
        for user in content.users:
            if user not in content.user_data:
                raise bad_file(path, f"has no data of user {user!r}", expected)
            examples = content.user_data[user]
            if len(examples.x) != len(examples.y):
                found = f"has {len(examples.x)} examples and {len(examples.y)} labels of user {user!r}"
                raise bad_file(path, found, expected)
        yield path, content
