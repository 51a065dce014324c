"""`python -m colonnade.lm_eval`: the harness' own command, which knows the model `colonnade`."""

import sys

from colonnade.errors import mistake
from colonnade.launch import process
from colonnade.serving.ranks import RanksEnded

USER_MISTAKE, INTERRUPTED = 2, 130
NOT_INSTALLED = "the lm-evaluation-harness is not installed. Run `pip install 'colonnade[lm-eval]'`."


def main() -> None:
    """Runs the harness. A user's mistake with our model is one message on standard error and exit status 2; Ctrl-C ends
    it with 130.
    """
    process.hear_ctrl_c()
    process.allow_open_files()
    try:
        _run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _run() -> None:
    """With the imports, which take seconds."""
    try:
        from lm_eval.__main__ import cli_evaluate

        import colonnade.lm_eval.model  # noqa: F401  registers it
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        print(f"colonnade: {NOT_INSTALLED}", file=sys.stderr)
        sys.exit(USER_MISTAKE)
    try:
        cli_evaluate()
    except RanksEnded:
        sys.exit(USER_MISTAKE)  # they have said why
    except Exception as error:
        message = mistake(error)
        if message is None:
            raise
        print(f"colonnade: {message}", file=sys.stderr)
        sys.exit(USER_MISTAKE)


if __name__ == "__main__":
    main()
