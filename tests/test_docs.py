"""What is written for readers is true: the reference page is current, examples load, commands and targets exist."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from typer.main import get_command

from colonnade.cli import app
from colonnade.config.load import build, load, loads
from colonnade.config.schema import ParallelConfig
from colonnade.corpus.recipe import Recipe
from colonnade.reference import page
from colonnade.train.start import complete
from colonnade.train.sweep import read_sweep
from colonnade.verify.layouts import named

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
FOLDERS = ("src", "tests", "benchmarks", "examples")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *EXAMPLES])


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def commands(text: str) -> list[str]:
    """The command lines in a page that start with `colonnade`, continued lines joined."""
    joined = re.sub(r"\\\n[#\s]*", "", text)
    return re.findall(r"(?:^[#$\s]*|`|-m )colonnade ([a-z][^`\n]*)", joined, flags=re.MULTILINE)


def test_the_reference_page_is_current() -> None:
    assert (ROOT / "docs/reference/config.md").read_text() == page(), "run `make docs`"


def choices_of(annotation: object) -> set[str]:
    """Words of which one is chosen, or a list of some."""
    inner = set(get_args(annotation))
    return inner if get_origin(annotation) is Literal else set().union(*map(choices_of, inner))


def test_the_page_on_cleaning_has_every_key_with_its_default_and_choices() -> None:
    rows = re.findall(r"^\| `\[(\w+)\]` \| (.*) \|$", (ROOT / "docs/cleaning.md").read_text(), flags=re.MULTILINE)
    assert [name for name, _ in rows] == list(Recipe.model_fields)
    for name, keys in rows:
        annotation = Recipe.model_fields[name].annotation
        (section,) = (each for each in (get_args(annotation) or (annotation,)) if each is not type(None))
        told = dict(re.findall(r"(?:^|, )`(\w+)(?: = (.+?))?`", keys))
        fields = {key: field for key, field in section.model_fields.items() if key != "enabled"}
        assert told.keys() == fields.keys(), name
        for key, default in told.items():
            value = tomllib.loads(f"it = {default}")["it"] if default else None
            assert value == (None if fields[key].is_required() else fields[key].default), f"{name}.{key}"
            choices = choices_of(fields[key].annotation)
            text = re.search(rf"`{key}(?: = [^`]+)?`(?: \([^)]*\))?", keys)
            assert not choices or (text and set(re.findall(r'"([^"]+)"', text[0])) == choices), f"{name}.{key}"


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_examples_load(path: Path) -> None:
    found = read_sweep(path, [])
    if found is None:
        assert load(path)
        return
    for point in found.points:
        complete(point.content, num_gpus=0)
        assert build(point.content, [], source=point.name)


def test_the_large_example_is_the_papers() -> None:
    config = load(ROOT / "examples/gpt2-8.3b.toml")
    assert config.parallel.num_ranks == 512
    assert (config.model.num_layers, config.model.hidden_size, config.train.global_batch_size) == (72, 3072, 512)


def test_the_page_on_pipelines_has_every_way_to_cut_a_model() -> None:
    page = (ROOT / "docs/pipeline.md").read_text()
    told = re.findall(r'^\| `parallel\.partition = "(\w+)"` \|', page, flags=re.MULTILINE)
    assert tuple(told) == get_args(ParallelConfig.model_fields["partition"].annotation)


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text()
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    records = {page for page in pages if re.fullmatch(r"design/\d\d-.*", page)}
    linked = set(re.findall(r"\]\(([^)#]+)\)", index)) - {"../README.md"}
    assert linked == pages - records - {"README.md"}
    kinds = [line.split()[1].rstrip(":") for line in index.splitlines() if line.startswith("## ")]
    assert kinds == ["Tutorial", "How-to", "Explanation", "Reference"]


def configuration_of(page: str) -> str:
    """The one configuration that stands in a page as a whole, `mine.toml`."""
    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    return str(text)


def test_the_tutorials_configuration_is_one() -> None:
    config = loads(configuration_of("docs/tutorial.md"))
    assert config.train.steps == 400 and config.model.hidden_size == 128


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_commands_can_be_run_with_the_pages_own_configuration(page: str, tmp_path: Path) -> None:
    """Its overrides, and the layouts that `verify` is given, go together with what it says. A run that is trained in
    another way has a folder of its own: in one that is finished nothing is left to do.
    """
    lines = [shlex.split(line, comments=True) for line in commands((ROOT / page).read_text()) if " mine.toml" in line]
    (tmp_path / "mine.toml").write_text(configuration_of(page))
    ways: dict[str, list[str]] = {}
    for command, _, *words in lines:
        layouts = [words[at + 1] for at, word in enumerate(words) if word == "--layout"]
        overrides = [word for word in words if "=" in word and not word.startswith("-") and word not in layouts]
        config = load(tmp_path / "mine.toml", overrides)
        assert len(named(config, layouts, precision="fp64")) == len(layouts)
        assert command in ("train", "verify", "plan"), command
        if command == "train":
            assert ways.setdefault(config.run.folder, overrides) == overrides
    assert {command for command, *_ in lines} == {"train", "verify", "plan"}


def test_the_page_on_chat_makes_what_its_next_command_begins_from() -> None:
    made = {"MODEL"}  # the reader's own
    for line in commands((ROOT / "docs/chat.md").read_text()):
        command, *words = shlex.split(line, comments=True)
        if command == "merge":
            source, target = words
            assert source in made
            made.add(target)
        if command == "train" and words:
            config = load(ROOT / words[0], [word for word in words[1:] if not word.startswith("data.")])
            assert config.train.init_from in made
            made.add(config.run.folder)
    assert "runs/preferences" in made


def test_extras_that_are_installed_for_a_feature_stand_in_a_page() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [re.findall(r"pip install .*\[([\w,-]+)\]", path.read_text()) for path in PAGES]
    assert set(extras) == {extra for found in named for line in found for extra in line.split(",")}


def test_the_map_of_the_code_has_every_folder() -> None:
    (code,) = re.findall(r"^src/colonnade/\n((?:  .*\n)+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    folders = {path.parent.name for path in (ROOT / "src/colonnade").glob("*/__init__.py")}
    assert set(re.findall(r"\b([a-z_]+)/", code)) == folders


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for path in PAGES:
        named = set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", path.read_text(), flags=re.MULTILINE))
        assert named <= targets, path


def test_source_files_that_a_page_names_exist() -> None:
    """Beside a file of a folder, others of it may stand by their own names. A decision record says where things were
    then.
    """
    files = [f"/{file.relative_to(ROOT)}" for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    for path in PAGES:
        if re.fullmatch(r"\d\d-.*", path.name):
            continue
        quoted = re.findall(r"`([^`\n]+)`", path.read_text())
        named = {name for words in quoted for name in re.findall(r"[\w/]+\.py\b", words)} - {"preprocess_data.py"}
        missing = {name for name in named if not any(file.endswith(f"/{name}") for file in files)}
        assert not missing, path


def test_examples_that_an_example_names_exist() -> None:
    there = {path.name for path in EXAMPLES}
    for path in EXAMPLES:
        named = set(re.findall(r"[\w.-]+\.toml\b", path.read_text()))
        assert named <= there, path


def test_runs_of_a_sweep_that_a_page_names_are_among_its_points() -> None:
    named = 0
    for sweep in (found for path in EXAMPLES if (found := read_sweep(path, [])) is not None):
        there = {point.name for point in sweep.points}
        for path in PAGES:
            runs = set(re.findall(rf"\b{re.escape(str(sweep.folder))}/([^\s/`]+)", path.read_text()))
            assert runs <= there, path
            named += len(runs)
    assert named, "one page shows a run of a sweep"


def test_commands_and_their_options_exist() -> None:
    program = get_command(app)
    for path in PAGES:
        for line in commands(path.read_text()):
            command: Any = program
            words = shlex.split(line, comments=True)
            while words and hasattr(command, "commands"):
                name = words.pop(0)
                assert name in command.commands, f"{path}: colonnade {line}"
                command = command.commands[name]
            options = {option for parameter in command.params for option in parameter.opts} | {"--help"}
            named = {word.split("=")[0] for word in words if word.startswith("--")}
            assert named <= options, f"{path}: colonnade {line}"


def test_the_makefile_lists_its_targets() -> None:
    text = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, flags=re.MULTILINE)
    for target in set(phony.split()) - {"help"}:
        assert f"make {target}" in text
