"""`python -m colonnade.lm_eval`: the harness' own command, which knows the model `colonnade`."""

import sys
from importlib import metadata
from typing import NoReturn

from colonnade.errors import mistake
from colonnade.launch import process
from colonnade.serving.ranks import RanksEnded

USER_MISTAKE, INTERRUPTED = 2, 130
FITTING = ("lm-eval", "transformers", "peft")
"""Packages of which the harness imports names that come and go."""
UNKNOWN_TASKS = "Tasks not found: "
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
        import lm_eval.models  # noqa: F401  whose versions of other libraries may not fit
        from lm_eval.__main__ import cli_evaluate
    except (ImportError, AttributeError) as error:
        is_missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "lm_eval"
        _refuse(NOT_INSTALLED if is_missing else _cannot_be_imported(error))
    import colonnade.lm_eval.model  # noqa: F401  registers it

    try:
        cli_evaluate()
    except RanksEnded:
        sys.exit(USER_MISTAKE)  # they have said why
    except Exception as error:
        message = _unknown_tasks(error) or mistake(error)
        if message is None:
            raise
        _refuse(message)


def _cannot_be_imported(error: Exception) -> str:
    """The harness, which breaks with newer versions of some libraries than it knows, and does not say so to pip."""
    there = {name: metadata.version(name) for name in FITTING if any(metadata.distributions(name=name))}
    versions = ", ".join(f"{name} {version}" for name, version in there.items())
    return (
        f"the lm-evaluation-harness cannot be imported with what is installed here, {versions} "
        f"({type(error).__name__}: {error}). Run `pip install --upgrade {' '.join(there)}`."
    )


def _unknown_tasks(error: Exception) -> str | None:
    """What to tell of the harness' own error for tasks that it does not have."""
    begin, _, names = str(error).partition(UNKNOWN_TASKS)
    if begin or not names or not isinstance(error, ValueError):
        return None
    return (
        f"--tasks: the lm-evaluation-harness has no {names}. `python -m colonnade.lm_eval ls tasks` lists what it has; "
        "tasks of your own are found with --include_path FOLDER."
    )


def _refuse(message: str) -> NoReturn:
    print(f"colonnade: {message}", file=sys.stderr)
    sys.exit(USER_MISTAKE)


if __name__ == "__main__":
    main()
