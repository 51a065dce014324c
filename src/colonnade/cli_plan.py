"""The commands of the planner: what a run will be like before it runs."""

import math
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from colonnade.cli_data import AsJson
from colonnade.config.numbers import either, multiples_around
from colonnade.errors import ConfigError
from colonnade.garbage import imports_stay
from colonnade.outputs import PAGES, check_output, json_of, write_output

if TYPE_CHECKING:
    from colonnade.config.load import TomlFile
    from colonnade.config.schema import Config
    from colonnade.planner.hardware import Hardware
    from colonnade.planner.page import Plan
    from colonnade.planner.search import Search

_EVERY_SECONDS = 10.0

Output = Annotated[
    Path | None,
    typer.Option(
        help="Write the drawing to this file (.svg) too; with --search, the best layout's configuration (.toml).",
        show_default=False,
    ),
]
Html = Annotated[
    Path | None,
    typer.Option(help="Write the plan as a page with pictures to this file (.html).", show_default=False),
]

Keep = Annotated[
    list[str] | None,
    typer.Option(
        help="Key that a search leaves as it is set, such as parallel.tp. Several.",
        metavar="SECTION.KEY",
        show_default=False,
    ),
]


def plan(
    config: Annotated[Path | None, typer.Argument(help="Configuration file (.toml).", show_default=False)] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Keys to replace.", metavar="SECTION.KEY=VALUE", show_default=False),
    ] = None,
    draw: Annotated[bool, typer.Option("--draw", help="Draw the pipeline's schedule.")] = False,
    output: Output = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time the model's units on this machine, and weigh the cuts by that.")
    ] = False,
    on: Annotated[
        str | None,
        typer.Option(
            "--hardware", help="Predict time and cost too: a bundled machine or a file of one.", show_default=False
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Ranks in all; parallel.dp follows.", min=1, show_default=False)
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Try layouts of these ranks, and print the best. Needs --hardware.")
    ] = False,
    memory: Annotated[
        float | None, typer.Option(help="[GB] Of a device, in place of what --hardware says.", show_default=False)
    ] = None,
    keep: Keep = None,
    check: Annotated[
        Path | None, typer.Option(help="A run's folder: what was predicted, beside what came.", show_default=False)
    ] = None,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Predict stages, waiting, memory, traffic, time and cost. Trains nothing.

    Tells how a configuration cuts the model, how long its stages wait, and what each kind of rank holds and sends.
    With --hardware also how fast it will be, and what it costs. Needs no machine but this one.
    """
    if check is not None:
        alone = not (draw or measure or search or keep) and {config, output, on, ranks, memory} == {None}
        _check(check, html, alone=alone, as_json=as_json)
        return
    if config is None:
        raise ConfigError("plan needs a configuration. Name a file (.toml), or a run with --check RUN.")
    if search and on is None:
        raise ConfigError("--search compares layouts on a machine. Name one: --hardware a100-80gb, or a file.")
    _refuse_what_has_no_effect(on, memory, keep, search=search, draw=draw, measure=measure)
    given = [config, *([] if on is None else [Path(on)])]
    by = "plan --search" if search else ""
    check_output(output, (".toml",) if search else (".svg",), inputs=given, written_by=by)
    check_output(html, PAGES, inputs=given, option="--html")
    from colonnade.config.load import TomlFile

    file, where = TomlFile.read(config), None if on is None else _machine(on, memory)
    overrides = [*(overrides or []), *_copies(file, overrides or [], None if search else ranks)]
    settings, precision = _settings(file, overrides, on, where)
    if search and where is not None:
        _search(settings, precision, where, ranks, keep or [], output, html, as_json=as_json)
    else:
        _plan(settings, precision, where, output, html, draw=draw, measure=measure, as_json=as_json)


def _check(run: Path, html: Path | None, *, alone: bool, as_json: bool) -> None:
    from colonnade.planner.comparison import shown

    if html is not None:
        raise ConfigError(f"--html is of a plan. The page of a run is made by `colonnade report {run}`.")
    if not alone:
        raise ConfigError("--check takes all from the run. Of the other options only --json goes with it.")
    print(shown(run, as_json=as_json))


def _refuse_what_has_no_effect(
    on: str | None, memory: float | None, keep: list[str] | None, *, search: bool, draw: bool, measure: bool
) -> None:
    if keep and not search:
        raise ConfigError("--keep holds a search to keys of the configuration. Give --search too, or leave it out.")
    if memory is not None and on is None:
        raise ConfigError(
            "--memory stands for a device's memory. Name the device too: --hardware a100-80gb, or a file."
        )
    if memory is not None and not 0 < memory < math.inf:
        raise ConfigError(f"--memory {memory:g} is no size. Give what a rank may take in GB, like --memory 80.")
    if search and (draw or measure):
        option, does = ("--draw", "draws the pipeline") if draw else ("--measure", "weighs the cuts")
        raise ConfigError(
            f"{option} {does} of one configuration. Leave it out of the search, and plan what --output writes with it."
        )


def _machine(name: str, memory: float | None) -> "Hardware":
    """The machine of a name, or of a file, of devices with so many GB (None: those that it has)."""
    from colonnade.planner.hardware import hardware as machine

    found = machine(name)
    return found if memory is None else found.having(device__memory=memory * 1e9)


def _settings(
    config: "TomlFile", overrides: list[str], on: str | None, where: "Hardware | None"
) -> tuple["Config", str]:
    """The configuration, of a run on the device that the machine has, and its number format in words."""
    from colonnade.train.start import load_for_plan, precision_in_words

    settings = load_for_plan(config, overrides)
    if where is None:
        return settings, precision_in_words(settings, config, overrides)
    kind, device = where.kind, settings.train.device
    if device not in ("auto", kind):
        raise ConfigError(
            f'train.device = "{device}", and --hardware {on} computes on "{kind}". Name another machine, or set '
            f'train.device = "{kind}".'
        )
    settings = load_for_plan(config, [*overrides, f"train.device={kind}"], length=True)
    return settings, precision_in_words(settings, config, overrides)


def _copies(config: "TomlFile", overrides: list[str], ranks: int | None) -> list[str]:
    """The override that makes so many ranks."""
    if ranks is None:
        return []
    from colonnade.train.start import load_for_plan

    parallel = load_for_plan(config, [*overrides, "parallel.dp=1"]).parallel
    dp, rest = divmod(ranks, parallel.num_ranks)
    if rest or not dp:
        raise ConfigError(
            f"--ranks {ranks} is no multiple of parallel.tp × parallel.pp = {parallel.tp} × {parallel.pp}. Use "
            f"{either(*multiples_around(ranks, parallel.num_ranks))}, or other sizes of these."
        )
    return [f"parallel.dp={dp}"]


def _plan(
    settings: "Config",
    precision: str,
    where: "Hardware | None",
    output: Path | None,
    html: Path | None,
    *,
    draw: bool,
    measure: bool,
    as_json: bool,
) -> None:
    from colonnade.architecture.parts import trained_architecture
    from colonnade.planner import pipeline_report
    from colonnade.planner.pipeline import plan_pipeline
    from colonnade.planner.vocabulary import vocab_size

    size, seconds = vocab_size(settings.model, settings.data), None
    architecture = trained_architecture(settings, size)
    if measure:
        from colonnade.planner.measure import measured

        seconds = measured(settings.model, settings.parallel, settings.train, size, architecture=architecture)
    found = plan_pipeline(
        settings.model,
        settings.parallel,
        num_microbatches=settings.train.num_microbatches(settings.parallel.dp),
        vocab_size=size,
        seconds=seconds,
        architecture=architecture,
    )
    if output is not None:
        pipeline_report.write_picture(found, output)
    if not as_json:
        width = shutil.get_terminal_size((120, 24)).columns
        print(f"precision: {precision}")
        print(pipeline_report.as_text(found, picture=draw, width=width), flush=True)

    with imports_stay():
        from colonnade.planner import estimate_report, ranks  # imports torch: what can be said without is said by now
        from colonnade.planner.estimate import estimate

    held = ranks.plan_run(settings, size)
    timed = None if where is None else estimate(settings, size, where)
    told: dict[str, Any] = {"precision": settings.train.precision}
    told |= {**pipeline_report.as_json(found), **ranks.as_json(held)}
    if not as_json:
        print(f"\n{ranks.as_text(held)}", flush=True)
    if timed is not None:
        told["estimate"] = estimate_report.as_json(timed)
        if not as_json:
            print(f"\n{estimate_report.as_text(timed)}")
    if html is not None:
        from colonnade.planner import page

        walks = page.walks_of(settings, size) if timed is None else timed.walks
        _write_page(page.Plan(settings, precision, found, held, walks, timed), html, as_json=as_json)
    if as_json:
        print(json_of(told))


def _write_page(plan: "Plan", path: Path, *, as_json: bool) -> None:
    from colonnade.planner import page

    page.write(plan, path)
    if not as_json:
        print(f"\nThe page is {path}.")


class _Progress:
    """Says on stderr, every ten seconds at most, how far a search is, unless it is `quiet`."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self._last = quiet, time.monotonic()

    def __call__(self, words: str) -> None:
        if not self.quiet and time.monotonic() - self._last >= _EVERY_SECONDS:
            self._last = time.monotonic()
            print(words, file=sys.stderr, flush=True)

    def tried(self, found: "Search") -> None:
        self(f"{found.tried:,} layouts so far, {len(found.fitting):,} fit")

    def planned(self, looked_at: int) -> None:
        self(f"{looked_at} of the fastest planned on the real program so far")


def _search(
    settings: "Config",
    precision: str,
    where: "Hardware",
    ranks: int | None,
    keep: list[str],
    output: Path | None,
    html: Path | None,
    *,
    as_json: bool,
) -> None:
    with imports_stay():
        from colonnade.planner import search_report
        from colonnade.planner.search import KEPT, confirmed, search
        from colonnade.planner.vocabulary import vocab_size

    for key in keep:
        if key not in KEPT:
            raise ConfigError(
                f"--keep {key} is no key that a search can leave as it is set. Use one of {', '.join(KEPT)}."
            )
    size, progress = vocab_size(settings.model, settings.data), _Progress(as_json)
    count = ranks or settings.parallel.num_ranks
    found = search(settings, size, where, count, keep=keep, told=progress.tried)
    search_report.refuse_empty(found, count)
    best = confirmed(found, size, where, told=progress.planned)
    if output is not None:
        search_report.write(best.candidate.config, output)
    if as_json:
        print(search_report.as_json(found, best))
    else:
        print(f"precision: {precision}\n{search_report.as_text(found, best, where, output)}")
    if html is not None:
        from colonnade.planner import page

        _write_page(page.of_search(found, best, size, precision), html, as_json=as_json)


def hardware(
    output: Annotated[Path, typer.Option(help="The file to write (.toml).", show_default=False)],
) -> None:
    """Measure this machine's CPUs, for `plan --hardware FILE`.

    Times products, copies, small operators, all cores at once and, between two ranks, collectives. Takes half a minute;
    nothing else should run meanwhile.
    """
    from colonnade.planner.measure_hardware import measured_file

    check_output(output, written_by="hardware")
    write_output(output, measured_file().encode())
    print(f"This machine is described in {output}. Use it with: colonnade plan CONFIG --hardware {output}")


def rank_of_hardware(what: str, tp: int, dp: int, folder: Path) -> None:
    """One of the ranks that are timed for `hardware`."""
    with imports_stay():
        from colonnade.mesh.layout import Layout
        from colonnade.planner.measure_hardware import time_on_a_rank

    time_on_a_rank(what, Layout(tp=tp, dp=dp), folder)
