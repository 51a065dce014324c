"""What commands are asked to write: refused before they work where it cannot be written, or would replace an input."""

import io
import json
import math
import os
import pty
import sys
from pathlib import Path

import numpy as np
import pytest

from colonnade.data.sidecar import ExampleFields
from colonnade.outputs import check_output, json_of, json_to_print, output_problems, write_output
from colonnade.planner import measure_hardware, search
from colonnade.report.write import write_report
from colonnade.serving.measure import Report
from colonnade.serving.measured import Measured
from colonnade.serving.predict import Predictions, show
from colonnade.train.sweep import SUMMARY, SUMMARY_TABLE
from tests.commands import TINIEST, here
from tests.report import written

NOWHERE = "/proc" if sys.platform == "linux" else "/dev/null"
"""Where not even root can make a file."""


def refused(*arguments: object) -> str:
    """What a command says, in one line, that refuses its arguments."""
    answer = here(*arguments)
    assert (answer.status, answer.out) == (2, ""), answer
    return " ".join(answer.err.split())


def test_what_can_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "old.svg").write_text("old")
    for output in (tmp_path / "old.svg", tmp_path / "new.svg", tmp_path / "a" / "b" / "c.svg", None):
        check_output(output, (".svg",), inputs=[tmp_path / "mine.toml"])
    assert [path.name for path in tmp_path.iterdir()] == ["old.svg"] and (tmp_path / "old.svg").read_text() == "old"


def test_links_rights_and_devices_are_as_they_were(tmp_path: Path) -> None:
    script, link, pipe = tmp_path / "job.sh", tmp_path / "link.sh", tmp_path / "pipe"
    script.write_text("old")
    script.chmod(0o755)
    link.symlink_to(script)
    os.mkfifo(pipe)
    screen, terminal = pty.openpty()  # a device that nothing can take the place of, as it could of /dev/null's
    device = Path(os.ttyname(terminal))
    for output in (link, device, pipe):
        check_output(output)
    write_output(link, b"new")
    assert link.is_symlink() and script.read_text() == "new" and script.stat().st_mode & 0o777 == 0o755
    write_output(device, b"new")
    assert os.read(screen, 9) == b"new" and device.is_char_device()
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_output(pipe, b"new")
    assert os.read(reader, 9) == b"new" and sorted(each.name for each in tmp_path.iterdir()) == [
        "job.sh",
        "link.sh",
        "pipe",
    ]
    for each in (reader, screen, terminal):
        os.close(each)


def test_what_cannot_be_written(tmp_path: Path) -> None:
    file, folder, link = tmp_path / "a.tsv", tmp_path / "b.tsv", tmp_path / "c.tsv"
    file.write_text("rows")
    folder.mkdir()
    link.symlink_to(file)

    def said(output: Path, *, makes_folder: bool = True) -> str:
        (problem,) = output_problems(output, (".tsv", ".json"), inputs=[file], makes_folder=makes_folder)
        return problem.removeprefix(f"--output {output}: ")

    assert said(tmp_path / "a.csv") == "what is written is .tsv or .json. Use a name that ends so."
    assert said(folder) == f"{folder} is a folder. Name a file."
    assert said(tmp_path) == f"{tmp_path} is a folder. Name a file.", "whatever its name ends with"
    assert said(link) == f"{link} is among what this command is given, and would be replaced. Name another."
    assert said(file / "x" / "y.tsv") == f"{file} is no folder. Name another."
    assert said(tmp_path / "x" / "y.tsv", makes_folder=False).startswith(f"there is no folder {tmp_path / 'x'}. Make")
    assert said(Path(NOWHERE) / "x" / "y.tsv").startswith(f"{NOWHERE} ")
    assert said(tmp_path / f"{'x' * 250}.tsv").startswith(f"{tmp_path} cannot be written to: ")  # no room for .partial
    (problem,) = output_problems(tmp_path / "p.json", files=[tmp_path / "p.json", link], inputs=[file])
    assert problem.startswith(f"--output {tmp_path / 'p.json'}: {link} is among")


def test_predictions_do_not_replace_what_they_are_made_of(tmp_path: Path) -> None:
    rows, questions, tokens = (tmp_path / name for name in ("rows.tsv", "questions.jsonl", "tokens"))
    beside = tmp_path / "dev.null_odds.json"
    for path in (rows, questions, beside, tmp_path / "tokens.idx", tmp_path / "tokens.json"):
        path.write_text("data")
    for given, output, lost in (
        (rows, rows, rows),
        (questions, questions, questions),
        (tokens, tmp_path / "tokens.json", tmp_path / "tokens.json"),
        (beside, tmp_path / "dev.json", beside),
    ):
        said = refused("predict", tmp_path / "run", given, "--output", output)
        assert f"--output {output}: {lost} is among what this command is given" in said
    assert "cannot be written to" in refused("predict", tmp_path / "run", rows, "--output", f"{NOWHERE}/p.jsonl")
    for command in (("predict", tmp_path / "run", rows), ("embed", tmp_path / "run", "--text", "dog")):
        output = tmp_path / "new" / ("v.npy" if command[0] == "embed" else "p.jsonl")
        assert f"there is no folder {tmp_path / 'new'}. Make it" in refused(*command, "--output", output)
    texts = tmp_path / "texts.npy"
    texts.write_text("a text\n")
    assert "is among what" in refused("embed", tmp_path / "run", "--texts", texts, "--output", texts)
    assert "cannot be written to" in refused("embed", tmp_path, "--text", "dog", "--output", f"{NOWHERE}/v.npy")


def test_answers_are_not_measured_where_they_cannot_be_written(tmp_path: Path) -> None:
    data, other = tmp_path / "dev.json", tmp_path / "corpus.nbest_predictions.json"
    paragraph = {"context": "Ada.", "qas": [{"id": "1", "question": "Who?", "answers": []}]}
    data.write_text(json.dumps({"data": [{"title": "", "paragraphs": [paragraph]}]}))
    other.write_text("[]")
    asked = ("evaluate", tmp_path / "run", "squad", "--data", data, "--overlap", other, "--output")
    assert f"{data} is among what this command is given" in refused(*asked, data)
    assert f"{other} is among what this command is given" in refused(*asked, tmp_path / "corpus.json")
    assert f"{tmp_path} is a folder" in refused(*asked, tmp_path)
    assert "cannot be written to" in refused(*asked, f"{NOWHERE}/p.json")
    assert "is one object of all answers, and a .jsonl has an object a line" in refused(*asked, tmp_path / "p.jsonl")


def test_plans_are_not_made_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "search", lambda *_, **__: pytest.fail("searched"))
    monkeypatch.setattr(measure_hardware, "measured_file", lambda: pytest.fail("measured"))
    config = tmp_path / "mine.toml"
    config.write_text(TINIEST)
    for name in ("f.svg", "f.toml", "f.html"):
        (tmp_path / name).mkdir()
    searched = ("plan", config, "--hardware", "cpu", "--search")
    assert "f.svg is a folder" in refused("plan", config, "--output", tmp_path / "f.svg")
    assert "f.toml is a folder" in refused(*searched, "--output", tmp_path / "f.toml")
    assert "what is written is .toml" in refused(*searched, "--output", tmp_path / "o.svg")
    assert "what is written is .svg" in refused("plan", config, "--output", tmp_path / "o.png")
    assert "mine.toml is among what this command is given" in refused(*searched, "--output", config)
    assert f"--html {tmp_path}/f.html: " in refused("plan", config, "--html", tmp_path / "f.html")
    assert "what is written is .html or .htm" in refused("plan", config, "--html", tmp_path / "plan.pdf")
    assert "is a folder" in refused("hardware", "--output", tmp_path)
    assert config.read_text() == TINIEST


def test_what_a_command_did_not_write_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_hardware, "measured_file", lambda: "# Measured by `colonnade hardware` on Linux.\n")
    config, kept, written = (tmp_path / name for name in ("mine.toml", "kept.toml", "written.toml"))
    config.write_text(TINIEST)
    commands = ("hardware", "plan --search", "slurm")
    told = "".join(f"# found by `colonnade {name}`, the rest is mine\n" for name in commands)
    kept.write_text(told + TINIEST)
    asked: dict[str, tuple[object, ...]] = {
        "hardware": ("hardware",),
        "plan --search": ("plan", config, "--hardware", "cpu", "--search"),
        "slurm": ("slurm", config, "--ranks-per-node", 1),
    }
    for command, words in asked.items():
        said = refused(*words, "--output", kept)
        assert f"{kept} is not of `colonnade {command}`, and would be replaced. Name another, or remove it." in said
    assert kept.read_text() == told + TINIEST
    for command in ("hardware", "slurm"):
        written.write_text("")
        for _ in range(2):
            assert here(*asked[command], "--output", written).status == 0
        assert f"by `colonnade {command}`" in written.read_text()


def test_a_batch_script_is_a_file_and_not_its_configuration(tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text(TINIEST)
    asked = ("slurm", config, "--ranks-per-node", 1, "--output")
    assert "is a folder" in refused(*asked, tmp_path)
    assert "mine.toml is among what this command is given" in refused(*asked, config)


def test_a_report_is_a_page_and_replaces_no_table_of_its_sweep(tmp_path: Path) -> None:
    run, sweep = written.run(tmp_path / "run", steps=3), tmp_path / "sweep"
    before = (run / "metrics.jsonl").read_text()
    assert "what is written is .html" in refused("report", run, "--output", run / "metrics.jsonl")
    assert (run / "metrics.jsonl").read_text() == before
    sweep.mkdir()
    (sweep / SUMMARY).write_text(json.dumps({"points": [{"point": "a", "state": "done", "loss": 1.0}]}))
    (sweep / SUMMARY_TABLE).write_text("point\n")
    assert "summary.csv is among" in refused("report", sweep, "--output", sweep / "summary.html")
    write_report([sweep], None)
    assert (sweep / "report.csv").exists() and (sweep / SUMMARY_TABLE).read_text() == "point\n"


def test_token_files_and_tokenizers_replace_none_of_their_inputs(tmp_path: Path) -> None:
    text, tokenizer = tmp_path / "text.txt", tmp_path / "words.json"
    text.write_text("a text of some words\n" * 20)
    asked = ("data", "train-tokenizer", text, "--vocab-size", 270, "--overwrite", "--output")
    assert "what is written is .json" in refused(*asked, text)
    assert "is a folder" in refused(*asked, tmp_path)
    assert "cannot be written to" in refused(*asked, f"{NOWHERE}/words.json")
    assert here(*asked, tokenizer).status == 0
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n")
    examples = ("data", "examples", "chat", rows, "--template", "plain", "--tokenizer", tokenizer)
    tokens = ("data", "tokenize", text, "--tokenizer", tokenizer, "--overwrite")
    for making in (examples, tokens):
        assert f"writes {tokenizer}, which is read here" in refused(*making, "--output", tmp_path / "words")
        assert "cannot be written to" in refused(*making, "--output", f"{NOWHERE}/words")
    assert "cannot be written to" in refused("data", "merge", tmp_path / "a", "--output", f"{NOWHERE}/words")
    assert json.loads(tokenizer.read_text())["model"]["type"] == "BPE"


# --- JSON -------------------------------------------------------------------------------------------------------------


def strict(text: str) -> object:
    """As readers take it that know no NaN and no Infinity."""

    def refuse(constant: str) -> object:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_json_has_not_are_null() -> None:
    content = {"a": [math.nan, 1.5, (math.inf, "é")], "b": {"c": -math.inf, "d": None, "e": True, "f": np.float64(2)}}
    assert strict(json_of(content)) == {"a": [None, 1.5, [None, "é"]], "b": {"c": None, "d": None, "e": True, "f": 2.0}}
    assert json_of("é") == '"\\u00e9"' and json_of("é", ensure_ascii=False) == '"é"'


@pytest.mark.parametrize(
    ("encoding", "text", "line"),
    [
        ("utf-8", "é 😀", '{"text": "é 😀"}'),
        ("utf-8", "é \udcff", r'{"text": "\u00e9 \udcff"}'),
        ("latin-1", "é", '{"text": "é"}'),
        ("latin-1", "é 😀", r'{"text": "\u00e9 \ud83d\ude00"}'),
        ("ascii", "é", r'{"text": "\u00e9"}'),
    ],
)
def test_a_line_of_json_stays_json_on_an_output_that_lacks_its_letters(
    encoding: str, text: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding, "backslashreplace"))
    print(json_to_print({"text": text}), end="", flush=True)
    assert out.getvalue().decode(encoding) == line and strict(line) == {"text": text}


def test_predictions_stay_json_on_an_output_that_lacks_their_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, "ascii", "backslashreplace"))
    fields = ExampleFields("own", "classification", ("text",), ("né", "mort"))
    show(Predictions(fields, np.zeros((1, 2)), np.full(1, math.nan)), None, as_json=False)
    sys.stdout.flush()
    record = {"index": 0, "prediction": "né", "probabilities": {"né": 0.5, "mort": 0.5}}
    assert [strict(line) for line in out.getvalue().decode().splitlines()] == [record]


def test_what_a_model_without_finite_numbers_is_told_as_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    Report(Measured("perplexity", {}, {"loss": 800.0, "perplexity": math.inf}, ""), {}).show(as_json=True)
    fields = ExampleFields("sst2", "classification", ("text",), ("negative", "positive"))
    found = Predictions(fields, np.full((1, 2), math.nan), np.full(1, math.nan))
    show(found, None, as_json=True)
    show(found, None, as_json=False)
    told = [strict(line) for line in capsys.readouterr().out.splitlines()]
    record = {"index": 0, "prediction": "negative", "probabilities": {"negative": None, "positive": None}}
    assert told == [
        {"protocol": "perplexity", "loss": 800.0, "perplexity": None, "notes": [], "parameters": {}},
        {"format": "sst2", "examples": 1, "scores": {}, "predictions": [record]},
        record,
    ]


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_options_are_finite_numbers(number: str, tmp_path: Path) -> None:
    threshold = f"--null-threshold={number}"
    for command in (("evaluate", tmp_path, "squad", "--data", "a.json"), ("predict", tmp_path, "a.json")):
        assert f"--null-threshold {number} is no difference of logits" in refused(*command, threshold)
    assert f"temperature = {number} " in refused(*("generate", tmp_path, "--prompt", "a", f"--temperature={number}"))
    assert f"top_p = {number} " in refused(*("generate", tmp_path, "--prompt", "a", f"--top-p={number}"))
    run = written.run(tmp_path / "r", steps=3)
    assert "--every" in " ".join(here("watch", run, "--once", f"--every={number}").err.split())
