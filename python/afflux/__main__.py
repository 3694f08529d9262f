"""`python -m afflux` is the command line; with --cmakedir it prints the folder for CMake's find_package(afflux)."""

import sys
from pathlib import Path

if __name__ == "__main__":
    if sys.argv[1:] == ["--cmakedir"]:
        print(Path(__file__).parent / "cmake")
    else:
        from afflux.cli import main

        main()
