"""`colonnade predict`, `fill-mask` and `embed`: models that read a text from both sides, in use. Thin: parse, check,
call.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from colonnade.cli_data import AsJson
from colonnade.cli_ranks import Checkpoint, Device, PipelineParallel, Precision, TensorParallel, Threads, run_on_ranks
from colonnade.cli_weights import BaseFolder, Best
from colonnade.errors import DataError
from colonnade.garbage import imports_stay
from colonnade.outputs import json_of, json_to_print, output_problems

Texts = Annotated[list[str] | None, typer.Option("--text", help="A text; give several for several.")]
TextFile = Annotated[
    Path | None,
    typer.Option(
        "--texts",
        help='A file of texts, one a line that is not blank; of a .jsonl each line\'s "text".',
        show_default=False,
    ),
]
BatchSize = Annotated[int, typer.Option(help="Read at once.", min=1)]
ControlTokens = Annotated[
    bool, typer.Option("--control-tokens", help="Read names of control tokens in a text as these, not as text.")
]

Ensemble = Annotated[
    list[Path] | None,
    typer.Option("--with", help="Another model, to average their logits; may be repeated.", show_default=False),
]
NullThreshold = Annotated[
    float | None,
    typer.Option(help="[logits] No answer, where it is likelier by more than this.", show_default=False),
]


def predict(
    checkpoint: Checkpoint,
    inputs: Annotated[
        list[Path], typer.Argument(help="A benchmark's files, or the prefix of a token file of examples.")
    ],
    format_name: Annotated[
        str | None,
        typer.Option("--format", help="How the files are read, as `data examples` names it.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Write here: .tsv for GLUE, .json for SQuAD, .jsonl with probabilities.", show_default=False),
    ] = None,
    others: Ensemble = None,
    null_threshold: NullThreshold = None,
    batch_size: BatchSize = 32,
    best: Best = False,
    base: BaseFolder = None,
    tp: TensorParallel = 1,
    pp: PipelineParallel = 1,
    dp: Annotated[int, typer.Option(help="Copies of the model that share the examples.", min=1)] = 1,
    device: Device = "auto",
    precision: Precision = None,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Tell labels, scores, choices or answers of new data.

    By a model that was fine-tuned for them. What says what is right is scored too.
    """
    from colonnade.serving.measurement import threshold_problems
    from colonnade.serving.options import check_options, chosen

    wrong = [*_unwritable(output, inputs), *threshold_problems(null_threshold)]
    check_options(checkpoint, tp=tp, pp=pp, device=device, precision=precision, best=best, more=wrong)
    run_on_ranks(tp * pp * dp, sys.argv[1:])

    with imports_stay():
        from colonnade.serving import predict as predicting
        from colonnade.serving import trained

    path, fewer = chosen(checkpoint, best), [f"lower --batch-size (now {batch_size})"]
    with trained.opened(
        path, tp=tp, pp=pp, dp=dp, device=device, precision=precision, threads=threads, to_take_less=fewer, base=base
    ) as (model, mesh):
        found = predicting.predict_any(
            *(model, mesh, inputs),
            others=[chosen(other, best) for other in others or []],
            output=output,
            format_name=format_name,
            batch_size=batch_size,
            null_threshold=null_threshold,
        )
        if mesh.rank == 0:
            predicting.show(found, output, as_json=as_json)


def fill_mask(
    checkpoint: Checkpoint,
    text: Texts = None,
    texts: TextFile = None,
    top: Annotated[int, typer.Option(help="Words for each gap.", min=1)] = 5,
    best: Best = False,
    base: BaseFolder = None,
    tp: TensorParallel = 1,
    pp: PipelineParallel = 1,
    device: Device = "auto",
    precision: Precision = None,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Guess the words that [MASK] stands for in a text, by a BERT."""
    from colonnade.serving.options import check_options, chosen

    check_options(checkpoint, tp=tp, pp=pp, device=device, precision=precision, best=best, more=_problems(text, texts))
    run_on_ranks(tp * pp, sys.argv[1:])

    from colonnade.serving import encoder, trained

    path, fewer = chosen(checkpoint, best), ["give shorter texts"]
    with trained.opened(
        path, tp=tp, pp=pp, device=device, precision=precision, threads=threads, to_take_less=fewer, base=base
    ) as (
        model,
        mesh,
    ):
        given = _all_texts(text, texts)
        found = encoder.fillings(model, mesh, given, top=top)
    if mesh.rank != 0:
        return
    if as_json:
        filled = [
            {"text": each, "masks": [[filling._asdict() for filling in gap] for gap in gaps]}
            for each, gaps in zip(given, found, strict=True)
        ]
        print(json_of({"texts": filled}))
    else:
        lines = [f"{filling.probability:8.4f}  {filling.text}" for gaps in found for gap in gaps for filling in gap]
        print("\n".join(lines), flush=True)


def embed(
    checkpoint: Checkpoint,
    text: Texts = None,
    texts: TextFile = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the vectors here, a row a text, as NumPy's .npy.", show_default=False)
    ] = None,
    normalize: Annotated[bool, typer.Option(help="Give every vector the length 1.")] = True,
    control_tokens: ControlTokens = False,
    batch_size: BatchSize = 32,
    best: Best = False,
    base: BaseFolder = None,
    tp: TensorParallel = 1,
    pp: PipelineParallel = 1,
    device: Device = "auto",
    precision: Precision = None,
    threads: Threads = 0,
) -> None:
    """Make a vector of each text, by a BERT.

    The mean over its tokens. Without --output they are printed, a JSON object a text.
    """
    from colonnade.generation.prompts import control_note
    from colonnade.serving.options import check_options, chosen

    given_file = [] if texts is None else [texts]
    unwritable = output_problems(output, (".npy",), inputs=given_file, makes_folder=False)
    wrong = [*_problems(text, texts), *unwritable]
    check_options(checkpoint, tp=tp, pp=pp, device=device, precision=precision, best=best, more=wrong)
    run_on_ranks(tp * pp, sys.argv[1:])

    from colonnade.serving import encoder, trained

    path, fewer = chosen(checkpoint, best), [f"lower --batch-size (now {batch_size})"]
    with trained.opened(
        path, tp=tp, pp=pp, device=device, precision=precision, threads=threads, to_take_less=fewer, base=base
    ) as (
        model,
        mesh,
    ):
        given = _all_texts(text, texts)
        vectors, cut = encoder.embeddings(
            model, mesh, given, batch_size=batch_size, normalize=normalize, control_tokens=control_tokens
        )
        longest = model.config.model.seq_length
        note = None if control_tokens else control_note([model.tokenizer.spelled(each) for each in given], "text")
    if mesh.rank != 0:
        return
    if note is not None:
        print(note, file=sys.stderr)
    if cut:
        print(f"{cut:,} of {len(given):,} texts lost their end: the model reads {longest:,} tokens.", file=sys.stderr)
    if output is not None:
        encoder.save(vectors, output)
        print(f"{len(given):,} vectors of {vectors.shape[1]:,} numbers: {output}", flush=True)
        return
    for each, vector in zip(given, vectors.tolist(), strict=True):
        print(json_to_print({"text": each, "vector": vector}), flush=True)


def _unwritable(output: Path | None, inputs: Sequence[Path]) -> Iterator[str]:
    """What is wrong with the --output of predictions."""
    from colonnade.data.sidecar import files_of
    from colonnade.evaluation.squad_files import output_files

    return output_problems(
        output,
        (".tsv", ".json", ".jsonl"),
        files=output_files(output).values() if output is not None and output.suffix == ".json" else (),
        inputs=[file for path in inputs for file in (path, *files_of(path))],
        makes_folder=False,
    )


def _all_texts(given: Sequence[str] | None, file: Path | None) -> list[str]:
    from colonnade.generation.prompts import read_prompts

    return [*(given or []), *([] if file is None else read_prompts(file, "text"))]


def _problems(given: Sequence[str] | None, file: Path | None) -> Iterator[str]:
    """What is wrong with --text and --texts."""
    try:
        if not _all_texts(given, file):
            yield "neither --text nor --texts is given: there is nothing to read. Use --text TEXT."
    except DataError as error:
        yield str(error)
