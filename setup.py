"""Hands the extension over to CMake; everything else stands in pyproject.toml."""

import os
import sys
import sysconfig

from setuptools import setup

if sys.platform == "win32":
    sys.exit("afflux does not support Windows: its engine and its stores use POSIX; use WSL")
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit("afflux does not support free-threaded Python yet: use the build of Python with the GIL")
setup(
    cmake_install_dir="afflux",
    cmake_args=[
        "-DAFFLUX_PYTHON=ON",
        f"-DAFFLUX_CUDA={os.environ.get('AFFLUX_CUDA', 'off')}",
        f"-DAFFLUX_BUILT={os.environ.get('AFFLUX_BUILT', '')}",  # `make engine` has built it
    ],
)
