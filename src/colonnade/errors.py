"""What a user can do wrong, one class a kind.

    ColonnadeError            base: shown as one message, no traceback, exit status 2
    ├── ConfigError           a key, a value, or values that cannot go together
    ├── LayoutError           ranks and parallel sizes that do not fit
    ├── DataError             token files, text, tokenizers
    ├── CheckpointError       checkpoints that are missing, broken, foreign or newer
    └── LockError             a folder in which another process is working

Every message says what is (with values), why it cannot be, and what to set.
"""


class ColonnadeError(Exception):
    """A mistake that a user can cause and mend. The command line prints the message alone and exits 2."""


class ConfigError(ColonnadeError):
    """A configuration that cannot be run: unknown or mistyped keys, impossible values or combinations."""


class LayoutError(ColonnadeError):
    """A number of ranks, or a set of axis sizes, that does not fit the model or the machine."""


class DataError(ColonnadeError):
    """Token files, text or tokenizers that are missing, broken, foreign or do not match."""


class CheckpointError(ColonnadeError):
    """A checkpoint that is missing, incomplete, damaged, of another model, or from a newer version."""


class LockError(ColonnadeError):
    """A folder or a file in which another process is working."""
