"""`python -m afflux` is the command line."""

from afflux.cli import main

if __name__ == "__main__":
    main()
