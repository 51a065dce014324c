"""`colonnade evaluate`. Thin: parse, check, call."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from colonnade.cli_data import AsJson, extra_data
from colonnade.cli_ranks import Checkpoint, Device, PipelineParallel, Precision, TensorParallel, Threads, run_on_ranks
from colonnade.cli_weights import BaseFolder, Best
from colonnade.garbage import imports_stay

Task = Annotated[str, typer.Argument(help="What to measure: perplexity, wikitext103, lambada or squad.")]
Data = Annotated[
    str | None,
    typer.Option(
        help="Text (.txt, .jsonl, compressed or not) or token file prefix; WikiText's .tokens or .raw; LAMBADA's "
        ".jsonl, or a passage a line.",
        show_default=False,
    ),
]
Part = Annotated[
    str | None,
    typer.Option(help="Instead: validation or test, a part of the run's own data.", show_default=False),
]
Samples = Annotated[
    int | None,
    typer.Option(help="Of a part, at most so many samples. Unset: train.evaluate_samples of the run.", min=1),
]
Window = Annotated[
    int | None,
    typer.Option(help="Tokens that are read at once. Unset: model.seq_length; of wikitext103 at most 1024.", min=1),
]
Stride = Annotated[
    int | None,
    typer.Option(
        help="Tokens that the window moves; only these are scored. Unset: a whole window; of wikitext103 32.", min=1
    ),
]
Variant = Annotated[
    str | None,
    typer.Option(
        help="Of lambada, what is predicted: whole-word (the paper's), last-token or lm-eval. Unset: whole-word.",
        show_default=False,
    ),
]
Detokenizer = Annotated[
    str | None,
    typer.Option(
        help="Of wikitext103, how words become text: invertible, megatron or none. Unset: invertible.",
        show_default=False,
    ),
]
Overlap = Annotated[
    list[str] | None,
    typer.Option(
        help="Tell too how many 8-grams of the data this corpus has: texts, a folder, a token file prefix, or "
        "run, what the checkpoint was trained on. Several.",
        show_default=False,
    ),
]
Output = Annotated[
    str | None,
    typer.Option(
        help="Of squad: the official predictions.json, one object of all answers by id; n-best and null odds go "
        "beside it.",
        show_default=False,
    ),
]
NullThreshold = Annotated[
    float | None,
    typer.Option(help="Of squad: no answer where it is likelier by more than this. Unset: 0.", show_default=False),
]
MaxAnswerLength = Annotated[
    int | None, typer.Option(help="Of squad: tokens of an answer. Unset: 30.", min=1, show_default=False)
]
MaxQueryLength = Annotated[
    int | None, typer.Option(help="Of squad: tokens of a question. Unset: 64.", min=1, show_default=False)
]
NBest = Annotated[int | None, typer.Option(help="Of squad: answers kept. Unset: 20.", min=1, show_default=False)]
BatchSize = Annotated[
    int | None,
    typer.Option(
        help="Windows read at once; of a part, samples; of lambada, passages. Unset: 8; the run's; 32.", min=1
    ),
]
DataParallel = Annotated[int, typer.Option(help="Copies of the model that share the text.", min=1)]


def evaluate(
    checkpoint: Checkpoint,
    task: Task = "perplexity",
    data: Data = None,
    part: Part = None,
    samples: Samples = None,
    window: Window = None,
    stride: Stride = None,
    variant: Variant = None,
    detokenizer: Detokenizer = None,
    overlap: Overlap = None,
    output: Output = None,
    null_threshold: NullThreshold = None,
    max_answer_length: MaxAnswerLength = None,
    max_query_length: MaxQueryLength = None,
    n_best: NBest = None,
    batch_size: BatchSize = None,
    best: Best = False,
    base: BaseFolder = None,
    tp: TensorParallel = 1,
    pp: PipelineParallel = 1,
    dp: DataParallel = 1,
    device: Device = "auto",
    precision: Precision = None,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Measure a checkpoint, on text or on published test sets.

    On a text, or on a held-out part of the data that its run was trained on.
    """
    from colonnade.serving.measurement import OWN, Measurement, measurement_problems
    from colonnade.serving.options import check_options, chosen

    asked = Measurement(
        task=task, data=data, part=part, window=window, stride=stride, as_json=as_json, output=output, n_best=n_best,
        samples=samples, batch_size=batch_size, variant=variant, detokenizer=detokenizer, overlap=tuple(overlap or ()),
        null_threshold=null_threshold, max_answer_length=max_answer_length, max_query_length=max_query_length,
    )  # fmt: skip
    problems = measurement_problems(asked)
    check_options(checkpoint, tp=tp, pp=pp, device=device, precision=precision, best=best, more=problems)
    if overlap:
        with extra_data("--overlap"):
            import colonnade.data.overlap  # noqa: F401  says what is not installed before ranks start
    run_on_ranks(tp * pp * dp, sys.argv[1:])
    with imports_stay():
        from colonnade.serving import measure, own_data, trained
    path = chosen(checkpoint, best)
    fewer = ["set --batch-size 1" if batch_size is None else f"lower --batch-size (now {batch_size})"]
    with trained.opened(
        path, tp=tp, pp=pp, dp=dp, device=device, precision=precision, threads=threads, to_take_less=fewer, base=base
    ) as (it, mesh):
        if part is not None:
            own_data.measure_part(it, mesh, it.path, part, samples=samples, batch_size=batch_size, as_json=as_json)
            return
        own = own_data.own_corpus(it, mesh, it.path) if OWN in asked.overlap else []
        report = measure.measure(it, mesh, it.path, asked)
    if mesh.rank == 0 and data is not None:
        corpus = [*own, *(Path(name) for name in asked.overlap if name != OWN)]
        measure.show_with_overlap(report, corpus, Path(data), it.path, as_json=as_json)
