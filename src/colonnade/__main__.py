"""`python -m colonnade`: the command line, as ranks are started with it."""

from colonnade.cli import main

if __name__ == "__main__":
    main()
