"""The vectors of a server are its plane's: control holds handles."""

import pkgutil
from importlib import import_module

import pytest

import afflux.aggregation
import afflux.server

#: The modules of aggregation that hold vectors.
PLANES = ("local_plane", "sharded_plane", "sharded_rows", "cache")


def control():
    return [
        module.name
        for package in (afflux.aggregation, afflux.server)
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
        if not module.name.endswith(PLANES)
    ]


@pytest.mark.parametrize("name", control())
def test_control_has_no_buffer_of_the_engine(name):
    """import-linter does not see what is imported from the extension."""
    assert not {"Buffer", "Pool", "HOST"} & vars(import_module(name)).keys()
