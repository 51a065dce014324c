"""Recipes: all problems at once, in words, before any work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from colonnade.config.describe import sections
from colonnade.corpus.load import build, load, source_of
from colonnade.corpus.plan import keep_plan, make_plan, run_file
from colonnade.corpus.recipe import Recipe
from colonnade.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "examples" / "clean" / "web.toml"


def problems(content: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        build(content)
    return str(caught.value)


@pytest.fixture
def whole(tmp_path: Path) -> dict[str, dict[str, object]]:
    (tmp_path / "in.jsonl").write_text('{"text": "hello"}\n')
    return {"read": {"paths": [str(tmp_path / "in.jsonl")]}, "write": {"folder": str(tmp_path / "out")}}


def test_a_step_runs_if_its_section_is_there_and_not_switched_off(whole: dict[str, dict[str, object]]) -> None:
    recipe = build({**whole, "repair": {}, "deduplicate": {"enabled": False}})
    assert recipe.repair is not None
    assert recipe.deduplicate is None and recipe.language is None


def test_the_command_line_is_stronger_than_the_file(tmp_path: Path, whole: dict[str, dict[str, object]]) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text('[read]\npaths = ["nowhere"]\n[write]\nfolder = "x"\n[deduplicate]\nsimilarity = 0.9\n')
    recipe = load(
        file,
        [
            f"read.paths={whole['read']['paths']}",
            "deduplicate.similarity=0.8",
            "split.shares.train=3",
            "repair.enabled=true",
        ],
    )
    assert recipe.deduplicate is not None and recipe.deduplicate.similarity == 0.8
    assert recipe.parts == {"train": 1.0} and recipe.repair is not None


def test_every_problem_is_told_at_once(whole: dict[str, dict[str, object]]) -> None:
    content = {
        "read": {"paths": ["/nowhere/at/all"], "kye": "text"},
        "deduplicat": {},
        "deduplicate": {"similarity": 1.5, "bands": "32"},
        "language": {"library": "cld3"},
        "min_tokens": 3,
    }
    said = problems(content)
    assert "[deduplicat] is not a section. Did you mean [deduplicate]?" in said
    assert "read.kye is not a key: did you mean read.key?" in said
    assert "deduplicate.similarity = 1.5 is out of range: it may be 1.0 at most." in said
    assert 'deduplicate.bands = "32" is text, where a whole number of at least 1 is expected. Write' in said
    assert 'Did you mean "cld2"?' in said
    assert "min_tokens = 3 stands outside of any section. Write it as filter.min_tokens." in said
    assert "write.folder is not set, and has no default: it needs text in quotes." in said
    assert said.startswith("recipe: 8 problems")


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("read", "paths", [], "read.paths = [] is empty, where a list of texts in quotes is expected."),
        ("language", "keep", "en", 'language.keep = "en" is text, where a list of texts in quotes is expected.'),
        (
            "filter",
            "quality",
            ["gophr"],
            'filter.quality has "gophr" in it, where a list of "gopher", "repetition" or "c4" is expected. '
            'Did you mean "gopher"?',
        ),
        ("split", "shares", {}, "split.shares = {} is empty, where a table of numbers above 0 is expected."),
        (
            "split",
            "shares",
            {"train": -1},
            "split.shares has -1 in it, where a table of numbers above 0 is expected.",
        ),
        (
            "language",
            "thresholds",
            {"de": 50},
            "language.thresholds has 50 in it, where a table of numbers of at least 0 and at most 1.0 is expected.",
        ),
        ("deduplicate", "rows", 99, "deduplicate.rows = 99 is out of range: it may be 64 at most."),
        (
            "decontaminate",
            "tests",
            {"a": 1},
            "decontaminate.tests has 1 in it, where a table of texts in quotes is expected.",
        ),
    ],
)
def test_values_are_told_of_as_in_a_configuration(
    whole: dict[str, dict[str, object]], section: str, key: str, value: object, message: str
) -> None:
    assert f"  - {message}" in problems({**whole, section: {**whole.get(section, {}), key: value}}).splitlines()


def test_what_does_not_go_together_and_what_is_missing(whole: dict[str, dict[str, object]]) -> None:
    said = problems(
        {
            "run": {"executor": "slurm"},
            "read": {**whole["read"], "encoding": "utf-9"},
            "filter": {"remove_urls": ["/no/list"], "remove_ids": {"books": "/no/ids"}},
            "decontaminate": {"tests": {"lambada": "/no/lambada.jsonl"}},
            "tokenize": {},
            "write": whole["write"],
        }
    )
    for part in (
        "filter.min_tokens = 128 counts tokens, and run.tokenizer is not set",
        'read.encoding = "utf-9"',
        "run.slurm_partition",
        "filter.remove_urls: /no/list does not exist",
        'the source "books", which read.paths does not have. There are: in.',
        "decontaminate.tests.lambada: /no/lambada.jsonl does not exist",
        "[tokenize] has no tokenizer",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("encoding", "said"),
    [("undefined", "undefined"), ("a\0b", r"a\u0000b"), ("idna", "idna"), ("utf-16", "utf-16")],
)
def test_an_encoding_by_which_no_lines_can_be_read_is_told(
    whole: dict[str, dict[str, object]], encoding: str, said: str
) -> None:
    """Also one that Python knows by name, and names that are none."""
    found = problems({**whole, "read": {**whole["read"], "encoding": encoding}})
    assert f'read.encoding = "{said}" is not a text encoding that' in found and "1 problem\n" in found


def test_steps_that_would_keep_nothing_are_told(whole: dict[str, dict[str, object]]) -> None:
    tokens = {"run": {"tokenizer": whole["read"]["paths"][0]}}  # type: ignore[index]
    language = {"keep": ["en"], "thresholds": {"en": 0.5, "fr": 0.5}}
    said = problems({**whole, **tokens, "filter": {"min_tokens": 100, "max_tokens": 50}, "language": language})
    assert "filter.max_tokens = 50 is below filter.min_tokens = 100: every document would be dropped" in said
    assert 'language.thresholds has "fr", which language.keep has not' in said and "2 problems" in said
    for filters in ({"min_tokens": 50, "max_tokens": 50}, {"min_tokens": 50, "max_tokens": 0}):
        build({**whole, **tokens, "filter": filters, "language": {**language, "keep": ["en", "fr"]}})


def test_nothing_is_said_of_steps_that_are_switched_off(whole: dict[str, dict[str, object]]) -> None:
    """Nor beside a section that is wrong in itself."""
    off = {"tokenize": {"enabled": False}, "decontaminate": {"enabled": False, "tests": {"exam": "/no/exam.jsonl"}}}
    build({**whole, **off})
    said = problems({**whole, **off, "deduplicate": {"similarity": 1.5}})
    assert "deduplicate.similarity = 1.5" in said
    assert "tokenize" not in said and "decontaminate" not in said


def test_what_a_result_cannot_be_is_told(tmp_path: Path, whole: dict[str, dict[str, object]]) -> None:
    (tmp_path / "out").touch()
    said = problems(
        {
            **whole,
            "write": {**whole["write"], "format": "parquet"},
            "tokenize": {"tokenizer": "/no/such"},
            "deduplicate": {"index": str(tmp_path / "out")},
            "split": {"shares": {"train": 1e308, "test": 1e308}},
        }
    )
    assert '[tokenize] reads .jsonl, and write.format = "parquet". Set write.format = "jsonl".' in said
    assert f'write.folder = "{tmp_path}/out" is a file. Name a folder.' in said
    assert f'deduplicate.index = "{tmp_path}/out" is a file. Name a folder.' in said
    assert "split.shares add up to more than a number can be. They are proportions: set smaller ones." in said
    assert "tokenize.tokenizer: /no/such does not exist." in said and "5 problems\n" in said


@pytest.mark.parametrize("name", ["state", "tokens", "dropped", "a/b", "..", ""])
def test_a_part_is_a_folder_of_its_own(whole: dict[str, dict[str, object]], name: str) -> None:
    said = problems({**whole, "split": {"shares": {"train": 1.0, name: 1.0}}})
    assert f'split.shares has a part "{name}", which is no name for a folder here.' in said
    build({**whole, "split": {"shares": {"held-out_2": 1.0, "7": 1.0}}})


def test_evaluation_sets_or_titles_alone_are_enough(tmp_path: Path, whole: dict[str, dict[str, object]]) -> None:
    assert "[decontaminate] names no evaluation set. Set decontaminate.tests or" in problems(
        {**whole, "decontaminate": {}}
    )
    (tmp_path / "named.txt").touch()
    build({**whole, "decontaminate": {"titles": [f"{tmp_path}/named.txt"]}})
    build({**whole, "decontaminate": {"tests": {"exam": f"{tmp_path}/named.txt"}}})
    said = problems({**whole, "decontaminate": {"titles": [f"{tmp_path}/named.txt", "/no/titles"]}})
    assert "decontaminate.titles: /no/titles does not exist." in said and "1 problem\n" in said


def test_a_tokenizer_of_the_run_or_of_its_token_files_is_enough(whole: dict[str, dict[str, object]]) -> None:
    file = whole["read"]["paths"][0]  # type: ignore[index]
    of_files = build({**whole, "tokenize": {"tokenizer": file}})
    assert of_files.tokenize is not None and of_files.tokenize.tokenizer == file
    assert build({**whole, "tokenize": {}, "run": {"tokenizer": file}}).run.tokenizer == file


def test_a_partition_is_asked_of_slurm_alone(whole: dict[str, dict[str, object]]) -> None:
    assert build({**whole, "run": {"executor": "ray"}}).run.slurm_partition is None
    assert build({**whole, "run": {"executor": "slurm", "slurm_partition": "cpu"}}).run.slurm_partition == "cpu"


def test_the_folder_of_now_is_a_source_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [source_of(path) for path in (".", "in/news.v2.jsonl", "in/")] == [tmp_path.name, "news", "in"]


def test_what_counts_tokens_is_named_where_there_is_no_tokenizer(whole: dict[str, dict[str, object]]) -> None:
    said = problems({**whole, "filter": {"min_tokens": 0, "max_tokens": 9}})
    assert "filter.max_tokens = 9 counts tokens" in said and "or filter.max_tokens = 0." in said
    assert "min_tokens" not in said
    assert problems({**whole, "filter": {"max_tokens": 9}}).count("run.tokenizer is not set") == 2


def test_a_vocabulary_may_be_named_by_the_prefix_of_its_files(
    tmp_path: Path, whole: dict[str, dict[str, object]]
) -> None:
    """Whatever is in the prefix; another file that begins so is none of them."""
    for name in ("v[1]-vocab.json", "v[1]-merges.txt", "other.json.old"):
        (tmp_path / name).touch()
    for name in ("v[1]", "v[1]-"):
        build({**whole, "run": {"tokenizer": f"{tmp_path}/{name}"}})
    with_other = {**whole, "run": {"tokenizer": f"{tmp_path}/other.json"}}
    assert f"run.tokenizer: {tmp_path}/other.json does not exist." in problems(with_other)


def test_a_file_of_no_known_kind_is_no_input(tmp_path: Path, whole: dict[str, dict[str, object]]) -> None:
    (tmp_path / "book.pdf").touch()
    said = problems({**whole, "read": {"paths": [str(tmp_path / "book.pdf")]}})
    assert f"read.paths: {tmp_path}/book.pdf has an ending that says nothing about documents. Known are " in said


def test_a_fifo_is_no_input(tmp_path: Path, whole: dict[str, dict[str, object]]) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    said = problems({**whole, "read": {"paths": [str(tmp_path / "pipe.jsonl")]}})
    assert "pipe.jsonl is neither a file nor a folder" in said


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("data", "data"),
        ("data", "data/clean"),
        ("data/", "data/raw/clean/"),
        (".", "clean"),
        ("data", "other/../data/clean"),
        ("data/../data", "{here}/data/clean"),
        ("data", "link/clean"),
        ("link", "data/clean"),
        ("link/raw/..", "data"),
    ],
)
def test_a_result_within_an_input_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, folder: str
) -> None:
    """The next start would read it. However the two are spelled, and whether the folder is there or not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "raw").mkdir(parents=True)
    (tmp_path / "link").symlink_to("data")
    folder = folder.format(here=tmp_path)
    said = problems({"read": {"paths": ["elsewhere", path]}, "write": {"folder": folder}})
    assert "read.paths: elsewhere does not exist." in said and "2 problems" in said
    assert f'write.folder = "{folder}" is within {path}, a folder of read.paths: ' in said
    assert "Set write.folder to a folder beside the inputs" in said


@pytest.mark.parametrize("folder", ["data", "data/clean", "data/raw-clean", "data/raw/linked", "data/raw/../clean"])
def test_a_result_beside_what_is_read_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """Nor one in the folder of a file that is named itself, nor behind a link, which is not followed in an input."""
    monkeypatch.chdir(tmp_path)
    for place in ("data/raw", "elsewhere"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "data" / "a.jsonl").touch()
    (tmp_path / "data" / "raw" / "linked").symlink_to(tmp_path / "elsewhere")
    recipe = build({"read": {"paths": ["data/a.jsonl", "data/raw"]}, "write": {"folder": folder}})
    assert recipe.write.folder == folder


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        (["raw/b.jsonl", "raw"], "raw/b.jsonl and raw, which has it: "),
        (["raw", "raw/deep/../deep"], "raw/deep/../deep and raw, which has it: "),
        (["raw/deep/c.jsonl", "also"], "raw/deep/c.jsonl and also, which has it: "),
        (["raw", "raw/link.jsonl"], "raw/link.jsonl and raw, which has it: "),
        (["raw", "raw"], "raw twice: "),
        (["raw/", "also"], "raw/ and also, which are the same: "),
    ],
)
def test_what_would_be_read_twice_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw" / "deep").mkdir(parents=True)
    for name in ("raw/b.jsonl", "raw/deep/c.jsonl", "d.jsonl", "raw2.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "also").symlink_to("raw")
    (tmp_path / "raw" / "link.jsonl").symlink_to("../d.jsonl")
    told = problems({"read": {"paths": paths}, "write": {"folder": "clean"}})
    assert f"read.paths names {said}it would be read twice. Name " in told and "1 problem\n" in told
    (tmp_path / "raw" / "folder").symlink_to("../elsewhere")  # which is not read with raw
    (tmp_path / "elsewhere").mkdir()
    build({"read": {"paths": ["raw", "raw2.jsonl", "d.jsonl", "raw/folder"]}, "write": {"folder": "clean"}})


def test_a_run_that_an_earlier_version_began_with_an_input_named_twice_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it began: with other inputs it would be another run."""
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "a.jsonl").write_text('{"text": "a"}\n')
    both = {"read": {"paths": [str(raw), str(raw / "a.jsonl")]}, "write": {"folder": str(tmp_path / "clean")}}
    with monkeypatch.context() as patch:
        patch.setattr("colonnade.corpus.load.named_twice", lambda paths: iter(()))
        recipe = build(both)
        keep_plan(make_plan(recipe), recipe)
    again = build(both)
    assert keep_plan(make_plan(again), again).identity == make_plan(recipe).identity
    for other in ({"read": {"paths": both["read"]["paths"][::-1]}}, {"write": {"folder": str(tmp_path / "new")}}):
        assert "it would be read twice" in problems({**both, **other})
    run_file(tmp_path / "clean").write_text("[]")
    assert "it would be read twice" in problems(both)


def test_overrides_of_another_form_are_told(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text("")
    with pytest.raises(ConfigError, match=r"'folder' is not of the form section\.key=value. Write for instance write"):
        load(file, ["folder"])


def test_every_key_has_a_meaning() -> None:
    for name, section in sections(Recipe).items():
        assert section.__doc__, name
        for key, field in section.model_fields.items():
            assert field.description, f"{name}.{key}"


def test_the_example_is_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in (
        "raw/news.jsonl",
        "tests/lambada_test.jsonl",
        "tests/wiki.test.raw",
        "lists/urls.txt",
        "tokenizer.json",
    ):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    assert isinstance(load(EXAMPLE), Recipe)


@pytest.mark.slow
def test_cleaning_imports_no_torch() -> None:
    code = "import sys; import colonnade.data.cleaning; assert not {'torch', 'spacy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
