"""What the plugins of pytest that run the suites with other servers share."""

import json

import pytest

import afflux
import afflux.server


def use(server_class):
    """Let every server be of this class."""
    afflux.Server = afflux.server.Server = afflux.server.server.Server = server_class


def skipping(names, reason):
    """Return the hook that skips tests of these names."""

    def pytest_collection_modifyitems(items):
        for item in items:
            if item.originalname in names or item.name in names:
                item.add_marker(pytest.mark.skip(reason=reason))

    return pytest_collection_modifyitems


def print_digests():
    """Print the digest of each rule."""
    from afflux.selftest import digest

    print(json.dumps({name: digest.rule(name, 1) for name in afflux.rules.RULES}))
