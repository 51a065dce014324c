"""The command `colonnade`, and `python -m colonnade`, as ranks are started with it."""

import signal


def main() -> None:
    """The command line. SIGUSR1, which asks a run to save, ends no process that is not ready for it yet: it is ignored
    before anything else is imported, which takes tenths of a second.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    from colonnade import cli
    from colonnade.launch.process import print_what_it_lacks

    print_what_it_lacks()
    cli.main()


if __name__ == "__main__":
    main()
