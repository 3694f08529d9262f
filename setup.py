"""Hands the extension over to CMake; everything else stands in pyproject.toml."""

import os

from setuptools import setup

setup(
    cmake_install_dir="afflux",
    cmake_args=[
        "-DAFFLUX_PYTHON=ON",
        f"-DAFFLUX_CUDA={os.environ.get('AFFLUX_CUDA', 'auto')}",
        f"-DAFFLUX_BUILT={os.environ.get('AFFLUX_BUILT', '')}",  # `make engine` has built it
    ],
)
