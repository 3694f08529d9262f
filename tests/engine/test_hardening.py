"""The extension is linked and compiled with what compilers offer against the misuse of memory; the kernels are not."""

import shutil
import sys

import pytest

from afflux import _engine
from builds import run

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("readelf") is None or shutil.which("nm") is None,
    reason="these are options for ELF, and binutils read them",
)


@pytest.fixture(scope="module")
def imported():
    """The functions that the extension takes from other libraries. Those of sanitizers replace what is tested here."""
    names = run("nm", "-D", "--undefined-only", _engine.__file__)
    if "__asan_init" in names or "__tsan_init" in names:
        pytest.skip("a build for a sanitizer")
    return {line.split()[-1].partition("@")[0] for line in names.splitlines()}


def test_addresses_are_bound_at_the_start_and_read_only(imported):
    dynamic = run("readelf", "-dW", _engine.__file__)
    assert "BIND_NOW" in dynamic
    segments = run("readelf", "-lW", _engine.__file__)
    assert "GNU_RELRO" in segments
    (stack,) = [line.split() for line in segments.splitlines() if "GNU_STACK" in line]
    assert stack[-2] == "RW"  # not executable


def test_stacks_and_standard_containers_are_checked(imported):
    assert "__stack_chk_fail" in imported
    assert any("__glibcxx_assert_fail" in name for name in imported)
