"""The command line: parse, call, and turn a user's mistake into one message.

Whatever a command needs is imported inside it, so that a mistake in a configuration is reported before torch, which
takes seconds to import, is read from disk.
"""

import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from colonnade.cli_change import change
from colonnade.cli_data import AsJson, data
from colonnade.cli_evaluate import evaluate
from colonnade.cli_plan import hardware, plan, rank_of_hardware
from colonnade.cli_predict import ControlTokens, embed, fill_mask, predict
from colonnade.cli_ranks import Checkpoint, Device, PipelineParallel, Precision, TensorParallel, Threads, run_on_ranks
from colonnade.cli_report import report, watch
from colonnade.cli_slurm import slurm
from colonnade.cli_weights import BaseFolder, Best, convert, merge
from colonnade.errors import ConfigError, mistake
from colonnade.garbage import imports_stay
from colonnade.train.rollback_options import RollbackOptions

if TYPE_CHECKING:
    from colonnade.config.load import TomlFile
    from colonnade.config.schema import Config

UNEXPECTED, USER_MISTAKE = 1, 2  # exit statuses
RANKS_IMPORT = ("colonnade.cli", "colonnade.train.start", "colonnade.one_rank")  # those that train
app = typer.Typer(
    name="colonnade",
    help="Train large transformers by model parallelism: the same run on any layout, and proof of it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


Skip = Annotated[int, typer.Option(help="After a rollback: pass over the batches of so many steps.", min=0)]
RateFactor = Annotated[
    float, typer.Option(help="After a rollback: multiplies the learning rate for --rate-steps.", max=1)
]
RateSteps = Annotated[int, typer.Option(help="After a rollback: steps with the lowered learning rate.", min=0)]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Start all ranks, check and tell everything, and stop before step 1.")
]
Profiled = Annotated[
    str | None,
    typer.Option(help="Time all parts of these steps: 5, or 5:8 for 5 to 8.", metavar="STEPS", show_default=False),
]
Rewarm = Annotated[int, typer.Option(help="After a rollback: steps in which the learning rate rises again.", min=0)]


class CommandWithKeys(TyperCommand):
    """A command whose --help ends with every key of the configuration."""

    def get_help(self, ctx: Any) -> str:
        from colonnade.reference import help_text

        width = min(shutil.get_terminal_size().columns, 100) - 2
        return f"{super().get_help(ctx)}\n\n{help_text(width)}"


def _print_version(asked: bool) -> None:
    if asked:
        from colonnade import __version__

        print(f"colonnade {__version__}")
        raise typer.Exit


@app.callback()
def colonnade(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train large transformers by model parallelism: the same run on any layout, and proof of it."""


@app.command(cls=CommandWithKeys)
def train(
    config: Annotated[Path, typer.Argument(help="Configuration file (.toml).", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Keys to replace.", metavar="SECTION.KEY=VALUE", show_default=False),
    ] = None,
    audit: Annotated[
        bool, typer.Option("--audit", help="Run one step, and print what each axis sent beside what theory says.")
    ] = False,
    dry_run: DryRun = False,
    rollback: Annotated[
        int | None,
        typer.Option(help="Return to the checkpoint of this step first.", metavar="STEP", min=1, show_default=False),
    ] = None,
    skip: Skip = 0,
    rate_factor: RateFactor = 1.0,
    rate_steps: RateSteps = 0,
    rewarm: Rewarm = 0,
    profile: Profiled = None,
) -> None:
    """Train a model, or go on with a run that was stopped.

    Under torchrun this process is one rank of the layout. Started alone, it starts the layout's ranks on this machine.
    """
    from colonnade.launch import process
    from colonnade.train import start

    process.outlive_readers()
    asked = RollbackOptions(skip, rate_factor, rate_steps, rewarm)
    check_together(audit=audit, dry_run=dry_run, rollback=rollback, asked=asked, profile=profile)
    asked.check(rollback)
    file = start.given(config)
    _train(file, overrides or [], asked, audit=audit, dry_run=dry_run, rollback=rollback, profile=profile)


def _train(
    file: "TomlFile",
    overrides: Sequence[str],
    asked: RollbackOptions,
    *,
    audit: bool = False,
    dry_run: bool = False,
    rollback: int | None = None,
    profile: str | None = None,
) -> None:
    """`train`, of a file that was read: a pipe is, once."""
    from colonnade.train import start
    from colonnade.train.file_checks import problems_of_the_folder
    from colonnade.train.profiled_steps import steps_of

    settings = start.load_for_run(file, overrides, also=None if audit else problems_of_the_folder)
    timed = steps_of(profile, last_step=0 if profile is None else start.planned_end(settings))
    arguments = ["train", str(file), *overrides, *["--audit"] * audit, *["--dry-run"] * dry_run]
    arguments += [] if profile is None else ["--profile", profile]
    if audit:
        run_on_ranks(settings.parallel.num_ranks, arguments, file=file.text)
        with imports_stay():
            from colonnade.verify.audit import audit as audit_one_step

        raise typer.Exit(0 if audit_one_step(settings) else 1)

    if (fit := start.fitted(settings)) is None:
        return
    settings = fit.config
    with start.owned(settings, returns=rollback is not None, dry_run=dry_run) as keep:
        start.fetch(file, overrides, settings, dry_run=dry_run)
        if rollback is not None:
            print(start.roll_back(settings, rollback, asked), flush=True)
        if not dry_run:
            start.note_fewer_ranks(fit)
        say_first_lines(settings, start.lines(file, overrides))
        if start.is_supervised(settings):
            raise typer.Exit(start.supervise(settings, file, arguments, keep, RANKS_IMPORT, dry_run=dry_run))
        again = start.again(file, overrides, settings)
        _train_here(settings, dry_run=dry_run, profile=timed, again=again)


def _train_here(settings: "Config", *, dry_run: bool, profile: range, again: "Callable[[], Config] | None") -> None:
    """As one rank of the layout."""
    with imports_stay():
        from colonnade import one_rank

    one_rank.train(settings, dry_run=dry_run, profile=profile, again=again)


@app.command(cls=CommandWithKeys)
def finetune(
    config: Annotated[Path, typer.Argument(help="Configuration file (.toml), with or without [sweep].")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Keys to replace.", metavar="SECTION.KEY=VALUE", show_default=False),
    ] = None,
) -> None:
    """Train with every combination of the values in [sweep].

    One after the other, or `sweep.at_once` side by side. A point that fails is
    written down, and the others go on. The same command again goes on where it was
    stopped. A configuration without [sweep] is one run, as `train` makes it.
    """
    from colonnade.launch import process
    from colonnade.train import start, sweep

    process.outlive_readers()
    file = start.given(config)
    found = sweep.read_sweep(file, overrides or [])
    if found is None:
        _train(file, overrides or [], RollbackOptions())
        return
    from colonnade.train.tuning import run_points

    run = partial(start.run_point, imports=RANKS_IMPORT)
    raise typer.Exit(run_points(found, run, lambda point: start.check_point(point, found)))


@app.command()
def rollback(
    run: Annotated[Path, typer.Argument(help="The folder of a run.", show_default=False)],
    step: Annotated[int, typer.Argument(help="The step of one of its checkpoints; later ones are deleted.", min=1)],
    skip: Skip = 0,
    rate_factor: RateFactor = 1.0,
    rate_steps: RateSteps = 0,
    rewarm: Rewarm = 0,
) -> None:
    """Return a run to one of its checkpoints."""
    from colonnade.train import start

    print(start.roll_back_folder(run, step, RollbackOptions(skip, rate_factor, rate_steps, rewarm)))


app.command()(change)
app.add_typer(data, name="data")


@app.command()
def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to go on from; give several for several.", show_default=False)
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help='A file of prompts, one a line; of a .jsonl each line\'s "prompt".', show_default=False),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Each prompt is a question: write the answer, by the model's chat template.")
    ] = False,
    messages: Annotated[
        Path | None,
        typer.Option(help='Conversations to answer, {"messages": [...], "tools": [...]} a line.', show_default=False),
    ] = None,
    control_tokens: ControlTokens = False,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add, at most.", min=1)] = 100,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token; 1: as the model says.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Choose among the k likeliest tokens only; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest tokens that make up p in all.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Another seed gives another text.")] = 1234,
    best: Best = False,
    base: BaseFolder = None,
    tp: TensorParallel = 1,
    pp: PipelineParallel = 1,
    device: Device = "auto",
    precision: Precision = None,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Write on from prompts, token by token."""
    from colonnade.generation.sampling import Sampling, sampling_problems
    from colonnade.serving.options import all_conversations, all_prompts, check_options, chosen, prompt_problems

    wrong = [*prompt_problems(prompt, prompts, messages, chat=chat, control_tokens=control_tokens)]
    wrong += sampling_problems(temperature, top_k, top_p, seed)
    check_options(checkpoint, tp=tp, pp=pp, device=device, precision=precision, best=best, more=wrong)
    run_on_ranks(tp * pp, sys.argv[1:])

    with imports_stay():
        from colonnade.serving import trained

    path = chosen(checkpoint, best)
    fewer = [f"lower --max-new-tokens (now {max_new_tokens}), or give a shorter --prompt"]
    with trained.opened(
        path, tp=tp, pp=pp, device=device, precision=precision, threads=threads, to_take_less=fewer, base=base
    ) as (model, mesh):
        trained.print_continuations(
            model,
            mesh,
            all_prompts(prompt, prompts),
            chats=all_conversations(prompt, prompts, messages) if chat or messages is not None else None,
            control_tokens=control_tokens,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature, top_k, top_p, seed),
            as_json=as_json,
        )


app.command()(evaluate)
app.command()(predict)
app.command("fill-mask")(fill_mask)
app.command()(embed)
app.command()(merge)
app.command()(convert)
app.command()(report)
app.command()(watch)
app.command(cls=CommandWithKeys)(slurm)


app.command(cls=CommandWithKeys)(plan)
app.command()(hardware)
app.command("rank-of-hardware", hidden=True)(rank_of_hardware)


@app.command(cls=CommandWithKeys)
def verify(
    config: Annotated[Path, typer.Argument(help="Configuration file (.toml).", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Keys to replace.", metavar="SECTION.KEY=VALUE", show_default=False),
    ] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option(
            help="Layout to hold against the serial run: keys of [parallel] and micro_batch_size, like tp=2 or "
            "pp=2,dp=2,zero=1. Several. Unset: one of each kind that the model's shape admits.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps to compare.", min=1)] = 3,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="Make the model small first: depth and width, never its structure.")
    ] = False,
    precision: Annotated[
        str, typer.Option(help="fp64 (equal to 1e-10), fp32, bf16, fp16, or configured: that of the file.")
    ] = "fp64",
    as_json: AsJson = False,
) -> None:
    """Compare a configuration's layouts with its serial run.

    Runs it serially and under other layouts, and compares losses, gradients, weights and moments.

    Exit status 0: all are equal. 1: one differs, and the first number that does is named.
    """
    with imports_stay():
        from colonnade.verify import verify as verification

    equal = verification.verify(
        config, overrides or [], layout or [], steps=steps, shrink=shrink, precision=precision, json_only=as_json
    )
    if not equal:
        raise typer.Exit(1)


@app.command("rank-of-verify", hidden=True)
def trace(
    config: Path,
    output: Annotated[Path, typer.Option()],
    steps: Annotated[int, typer.Option()],
) -> None:
    """One rank of a run that `verify` compares: a few steps, every number written down."""
    from colonnade.config.load import load

    with imports_stay():
        from colonnade.verify import trace as tracing

    tracing.trace(load(config), output, steps)


@app.command("rank-of-answers", hidden=True)
def answers(
    checkpoint: Path,
    tp: TensorParallel = 1,
    pp: PipelineParallel = 1,
    dp: Annotated[int, typer.Option(min=1)] = 1,
    device: Device = "auto",
    precision: Precision = None,
    threads: Threads = 0,
    base: BaseFolder = None,
) -> None:
    """Ranks with a model that answer what comes on standard input, for another program."""
    run_on_ranks(tp * pp * dp, sys.argv[1:])

    with imports_stay():
        from colonnade.mesh.agreement import broadcast_text
        from colonnade.serving import trained
        from colonnade.serving.answers import answer
        from colonnade.serving.ranks import serve

    with trained.opened(
        checkpoint, tp=tp, pp=pp, dp=dp, device=device, precision=precision, threads=threads, base=base
    ) as (
        model,
        mesh,
    ):
        serve(
            lambda request: answer(model, mesh, request),
            lambda line: broadcast_text(line, mesh.world),
            asked=sys.stdin,
            is_first=mesh.rank == 0,
        )


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Where to write.")] = Path("runs/demo"),
) -> None:
    """Show everything once on bundled text, in minutes.

    Trains a small model-parallel GPT on two cores, stops and resumes it, evaluates, samples and verifies it.
    """
    from colonnade import demo as demonstration

    demonstration.main(folder)


def check_together(
    *, audit: bool, dry_run: bool, rollback: int | None, asked: RollbackOptions, profile: str | None
) -> None:
    """ConfigError for options of `train` beside one that leaves no room for them."""
    others = [f"--rollback {rollback}"] if rollback is not None else []
    others += [str(asked)] if str(asked) else []
    others += [f"--profile {profile}"] if profile is not None else []
    if audit:
        alone, does, others = "--audit", "runs one step of its own", ["--dry-run"] * dry_run + others
    else:
        alone, does, others = "--dry-run", "stops before step 1 and changes nothing", others if dry_run else []
    if others:
        raise ConfigError(
            f"{alone} {does}: {' and '.join(others)} would have no effect. Leave {alone} out, or "
            f"{'the other' if len(others) == 1 else 'the others'}."
        )


def say_first_lines(settings: "Config", lines: Sequence[str]) -> None:
    """What is known of a run seconds before its ranks know the rest: said by the process that was started first."""
    from colonnade.config.describe import first_line
    from colonnade.launch import launch

    several = [first_line(settings)] if settings.parallel.num_ranks > 1 else []
    for line in [*several, *lines] if launch.speaks_first() else []:
        print(line, flush=True)


def main() -> None:
    """Runs the command line. A user's mistake is one message on standard error and exit status 2."""
    from colonnade.launch import launch, process

    process.open_closed_streams()
    launch.end_with_supervisor()
    process.hear_ctrl_c()
    process.allow_open_files()
    try:
        app(prog_name="colonnade")
    except SystemExit as end:
        process.end_beside_threads(end.code)
        raise
    except Exception as error:
        message = mistake(error)
        if message is None:
            process.end_beside_threads(UNEXPECTED, error)
            raise
        print(f"colonnade: {message}", file=sys.stderr)
        process.end_beside_threads(USER_MISTAKE)
        sys.exit(USER_MISTAKE)
