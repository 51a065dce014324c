"""The list of all keys, made from the schema: for `colonnade train --help`, and as a page.

python -m colonnade.reference [FILE]      writes docs/reference/config.md, or FILE
"""

import sys
from inspect import getdoc
from pathlib import Path
from textwrap import fill

from colonnade.architecture.families import architecture_of
from colonnade.config.describe import Key, as_toml, expectation, keys_of, sections, short
from colonnade.config.model import ModelConfig
from colonnade.config.presets import PRESETS

HEADER = """\
# Configuration: every key

Made from `src/colonnade/config/schema.py` by `make docs`; `make test` fails while it is out of date.

A configuration is a TOML file. On the command line, `section.key=value` after the file's name replaces a key:

    colonnade train examples/gpt2-355m.toml train.steps=1000 parallel.tp=2

The value is read as TOML; text may stand without quotes. The command line takes precedence over the file, the
file over a preset, and a preset over the defaults. Paths are relative to the current folder.
Nothing is guessed: an unknown key, a value of the wrong kind, or values that cannot go together are reported, all in
one message, before anything is computed.

A key with ↻ may be changed when a run goes on from its checkpoint. The others decide what the run computes: with
another value it would be another run, and needs a folder of its own. A key with ✎ may be changed while the run goes on,
by `colonnade change`.
"""


def help_text(width: int) -> str:
    """All keys as plain text, for a terminal of `width` columns."""
    blocks = []
    for name, section in sections().items():
        keys = [key_as_text(key, width) for key in keys_of(name)]
        blocks.append("\n".join([fill(f"[{name}]  {getdoc(section)}", width), *keys]))
    return "\n\n".join(["Keys of a configuration, with their defaults:", *blocks]) + "\n"


def key_as_text(key: Key, width: int) -> str:
    """'  steps  required  [steps, a whole number of at least 1]', and its meaning under it."""
    default = "  required" if key.required else f" = {default_of(key)}"
    head = f"  {short(key.name)}{default}  [{', '.join(filter(None, [key.unit, expectation(key)]))}]"
    under = " " * 6
    meaning = fill(key.meaning, width, initial_indent=under, subsequent_indent=under)
    return fill(head, width, subsequent_indent=under) + "\n" + meaning


def page() -> str:
    """docs/reference/config.md."""
    blocks = [HEADER]
    for name, section in sections().items():
        rows = [key_as_row(key) for key in keys_of(name)]
        head = ["| key | default | unit | accepts | meaning |", "| --- | --- | --- | --- | --- |"]
        blocks.append("\n".join([f"## [{name}]", "", getdoc(section) or "", "", *head, *rows, ""]))
    return "\n".join([*blocks, presets_as_table()])


def key_as_row(key: Key) -> str:
    name, again = short(key.name), " ↻" * key.may_change + " ✎" * key.while_running
    default = "**required**" if key.required else "unset" if key.default is None else f"`{default_of(key)}`"
    accepts = "a preset's name, below" if key.name == "model.preset" else expectation(key)
    return f"| `{name}`{again} | {default} | {key.unit or '–'} | {accepts} | {key.meaning.replace('|', '¦')} |"


def default_of(key: Key) -> str:
    return "unset" if key.default is None else as_toml(key.default)


def presets_as_table() -> str:
    head = [
        "## Presets",
        "",
        "Values of `model.preset`. Parameters are counted without vocabulary padding; `tiny` with a vocabulary of 512.",
        "",
        "| preset | num_layers | hidden_size | num_heads | seq_length | vocab_size | activation | parameters |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*head, *(preset_as_row(name) for name in PRESETS), ""])


def preset_as_row(name: str) -> str:
    model = ModelConfig(preset=name)
    count = architecture_of(model, model.vocab_size or 512).num_parameters
    vocabulary = "the tokenizer's" if model.vocab_size is None else f"{model.vocab_size:,}"
    shape = f"{model.num_layers} | {model.hidden_size} | {model.num_heads} | {model.seq_length}"
    return f"| `{name}` | {shape} | {vocabulary} | {model.activation} | {count:,} |"


def main() -> None:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/reference/config.md")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
