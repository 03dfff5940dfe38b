"""`python -m mless` is the command `mless`."""

from mless.cli import main

if __name__ == "__main__":
    main()
