"""`colonnade data …`: from raw text to token files. Thin: parse, call."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from colonnade.config.numbers import counted, in_words
from colonnade.errors import ConfigError, not_installed, printable
from colonnade.outputs import json_of

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

data = typer.Typer(help="Text to token files.", no_args_is_help=True, rich_markup_mode=None)

Inputs = Annotated[
    list[Path],
    typer.Argument(help="Text files (.txt, .jsonl; .gz, .xz, .bz2, .zst) or folders of them.", show_default=False),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an output that exists.")]


def _key(name: str) -> str:
    """A key that a line can have."""
    if not name:
        raise ConfigError("--key is empty. Name the key of the text in a .jsonl line, or leave it out.")
    return name


Key = Annotated[str, typer.Option(help="The key of the text in a .jsonl line.", callback=_key)]


class TokenizerKind(StrEnum):
    """What `train-tokenizer` can make."""

    bpe = "bpe"
    wordpiece = "wordpiece"


@data.command("train-tokenizer")
def train_tokenizer(
    inputs: Inputs,
    output: Annotated[Path, typer.Option(help="Where to write the tokenizer.json.", show_default=False)],
    vocab_size: Annotated[
        int, typer.Option(help="Tokens; of a BPE the 256 bytes and the end of document are among them.")
    ] = 32768,
    kind: Annotated[
        TokenizerKind,
        typer.Option(help="A byte-level BPE as GPT-2's, or a lower-cased WordPiece vocabulary as BERT's."),
    ] = TokenizerKind.bpe,
    sentinels: Annotated[
        int, typer.Option(help="Tokens of a BPE that mark the spans of T5 samples; a T5 of 512 tokens needs 28.")
    ] = 0,
    key: Key = "text",
    overwrite: Overwrite = False,
) -> None:
    """Train a byte-level BPE tokenizer, or a WordPiece one."""
    from colonnade.data import train_tokenizer as trainer

    made = trainer.train_tokenizer(
        inputs, output, vocab_size, kind=kind.value, sentinels=sentinels, key=key, overwrite=overwrite
    )
    print(made.summary(output))


@data.command("tokenize")
def tokenize_command(
    inputs: Inputs,
    output: Annotated[str, typer.Option(help="Prefix of the .bin and .idx to write.", show_default=False)],
    tokenizer: Annotated[
        Path,
        typer.Option(
            help="A tokenizer.json, vocab.txt or *.model, or a folder with GPT-2's files.", show_default=False
        ),
    ],
    key: Key = "text",
    workers: Annotated[int | None, typer.Option(help="Processes. Unset: one a core.", min=1)] = None,
    append_end: Annotated[
        bool | None,
        typer.Option(
            "--append-end/--no-append-end",
            help="Put the end-of-document token behind each document. Unset: yes, but for --sentences.",
        ),
    ] = None,
    sentences: Annotated[
        bool, typer.Option("--sentences", help="Keep sentences apart, as BERT samples need it.")
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Turn text into a token file (.bin and .idx).

    Megatron-LM reads and writes the same format.
    """
    from colonnade.data.rejected import check_inputs
    from colonnade.data.tokenize import tokenize_files
    from colonnade.data.tokenizer import Tokenizer

    loaded = Tokenizer.load(tokenizer)
    check_inputs(output, [tokenizer])
    report = tokenize_files(
        inputs,
        output,
        loaded,
        key=key,
        workers=workers,
        append_end=not sentences if append_end is None else append_end,
        sentences=sentences,
        overwrite=overwrite,
    )
    print(report.summary())


@data.command("examples")
def examples_command(
    format_: Annotated[
        str, typer.Argument(metavar="FORMAT", help="mnli, qqp, chat, preferences, …", show_default=False)
    ],
    files: Annotated[list[Path], typer.Argument(help="Files as they are published.", show_default=False)],
    output: Annotated[str, typer.Option(help="Prefix of the .bin and .idx to write.", show_default=False)],
    tokenizer: Annotated[
        Path, typer.Option(help="Of the model that is fine-tuned: tokenizer.json, vocab.txt, …", show_default=False)
    ],
    template: Annotated[
        str | None,
        typer.Option(
            help="Of chat and preferences: plain, chatml, bare, or a file of Jinja. Unset: the tokenizer's own.",
            show_default=False,
        ),
    ] = None,
    doc_stride: Annotated[
        int | None,
        typer.Option(help="Of squad: tokens from one window of a text to the next. Unset: 128.", show_default=False),
    ] = None,
    max_query_length: Annotated[
        int | None, typer.Option(help="Of squad: tokens of a question that are read. Unset: 64.", show_default=False)
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Turn examples of a task into a token file.

    Of a benchmark: a document is an example, with a sequence a text, and a last one of numbers, such as its label. Of
    chat: a document is a conversation, whose sequences are given and answered by turns.
    """
    from colonnade.data.rejected import check_inputs
    from colonnade.data.tokenizer import Tokenizer
    from colonnade.examples.formats import format_of
    from colonnade.examples.make import make_examples

    loaded = Tokenizer.load(tokenizer)
    check_inputs(output, [tokenizer])
    asked = {"doc_stride": doc_stride, "max_query_length": max_query_length}
    windows = {name: value for name, value in asked.items() if value is not None}
    format = format_of(format_, loaded, tokenizer, template, windows)
    made = make_examples(format, files, output, loaded, overwrite=overwrite)
    print(made.summary())


@data.command("merge")
def merge_command(
    prefixes: Annotated[list[str], typer.Argument(help="Prefixes of token files, in order.", show_default=False)],
    output: Annotated[str, typer.Option(help="Prefix of the .bin and .idx to write.", show_default=False)],
    overwrite: Overwrite = False,
) -> None:
    """Join token files end to end.

    Shards that were made on several machines, for instance.
    """
    from colonnade.data.inspect import inspect
    from colonnade.data.writer import merge

    without = merge(prefixes, output, overwrite=overwrite)
    found = inspect(output)
    sizes = f"{counted(found['documents'], 'document')}, {counted(found['tokens'], 'token')}"
    lines = [f"{output}: {sizes} ({found['dtype']})."]
    if without:
        lines.append(
            f"Note: {output} has no .json that says which tokenizer made it, because {', '.join(without)} has none: "
            "whoever uses it has to know."
        )
    print(printable("\n".join(lines)))


@data.command("inspect")
def inspect_command(
    prefix: Annotated[str, typer.Argument(help="Prefix that the .bin and .idx share.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Tell what a token file holds."""
    from colonnade.data.inspect import inspect

    found = inspect(prefix)
    if as_json:
        print(json_of(found))
    else:
        shown = {name.replace("_", " "): in_words(value) for name, value in found.items() if value is not None}
        print(printable("\n".join(f"{name:24} {words}" for name, words in shown.items())))


Recipe = Annotated[Path, typer.Argument(help="Recipe (.toml).", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Keys to replace.", metavar="SECTION.KEY=VALUE", show_default=False)
]


@contextmanager
def _going_on() -> Iterator[None]:
    """Says after Ctrl-C how a cleaning run goes on."""
    try:
        yield
    except KeyboardInterrupt:
        print("colonnade: interrupted. The same command goes on: tasks that are done are kept.", file=sys.stderr)
        raise


@data.command("clean")
def clean_command(
    recipe: Recipe,
    overrides: Overrides = None,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
) -> None:
    """Clean raw text by a recipe.

    Read, repair, filter, de-duplicate, decontaminate, split, write. A run that was stopped goes on where it was.
    """
    with _going_on():
        with extra_data("data clean"):
            from colonnade.corpus.load import load
            from colonnade.data.cleaning import clean
        print(clean(load(recipe, overrides or []), progress=progress))


@data.command("report")
def report_command(
    folder: Annotated[Path, typer.Argument(help="The write.folder of a cleaning run.", show_default=False)],
) -> None:
    """Make one HTML page of what a cleaning run did.

    It is report.html in the run's folder.
    """
    with extra_data("data report"):
        from colonnade.corpus.report import write_report
    print(write_report(folder))


@data.command("overlap")
def overlap_command(
    corpus: Annotated[
        Path, typer.Argument(help="Text files, a folder of them, or the prefix of a token file.", show_default=False)
    ],
    test: Annotated[
        Path, typer.Argument(help="Evaluation set: .jsonl, SQuAD's .json, .txt, .tokens or .raw.", show_default=False)
    ],
    ngram: Annotated[int, typer.Option(help="Words of an n-gram.", min=1)] = 8,
    key: Key = "text",
    tokenizer: Annotated[Path | None, typer.Option(help="Of a token file: what made it.", show_default=False)] = None,
    workers: Annotated[int | None, typer.Option(help="Processes. Unset: one a core.", min=1)] = None,
    as_json: AsJson = False,
) -> None:
    """Tell how much of an evaluation set occurs in a corpus.

    By the share of its n-grams.
    """
    with extra_data("data overlap"):
        from colonnade.control_groups import num_cores
        from colonnade.data.overlap import holds_tokens, overlap
    if tokenizer is not None and not holds_tokens(corpus):
        raise ConfigError(f"--tokenizer is of a token file, and {corpus} is the prefix of none. Leave it out.")
    found = overlap([corpus], test, ngram=ngram, key=key, tokenizer=tokenizer, workers=workers or num_cores())
    print(json_of(found.as_json()) if as_json else found.summary())


@contextmanager
def extra_data(what: str) -> Iterator[None]:
    """Says how to install what `what` needs of the extra `data`, where it is not there."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(not_installed(what, str(error.name), "colonnade[data]")) from error
