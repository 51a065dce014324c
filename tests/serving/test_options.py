"""What is wrong with the options of `generate` and `evaluate` is told at once, before torch is imported."""

import codecs
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from colonnade.config.model import ModelConfig
from colonnade.errors import ConfigError, DataError
from colonnade.examples.conversations import Conversation
from colonnade.generation.prompts import read_conversations, read_prompts
from colonnade.launch import launch
from colonnade.mesh.layout import Layout
from colonnade.model.precision import DTYPES
from colonnade.serving import options as checked
from colonnade.serving import trained
from colonnade.serving.measurement import Measurement, measurement_problems
from colonnade.serving.options import (
    all_conversations,
    all_prompts,
    check_options,
    device_problems,
    layout_problems,
    prompt_problems,
)
from tests.commands import here
from tests.runs import Finished


def test_generate_tells_all_wrong_options_at_once(finished: Finished) -> None:
    answer = here(
        *("generate", finished.folder, "--prompt", "a", "--temperature", -1, "--top-k", -2, "--top-p", 3, "--seed", -4),
        *("--tp", 3, "--pp", 9, "--device", "tpu", "--precision", "fp8"),
    )
    assert answer.status == 2 and answer.out == "" and answer.err.startswith("colonnade: 8 problems\n  - ")
    for said in ("temperature = -1", "top_k = -2", "top_p = 3", "seed = -4", "--tp 3", "--pp 9", "'tpu'", "'fp8'"):
        assert said in answer.err, said


def test_what_the_launcher_has_shown_its_ranks_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        check_options(tmp_path / "gone", tp=1, pp=1, device="tpu", precision=None, more=["no prompt"])

    with pytest.raises(ConfigError, match=r"^3 problems\n  - .*gone is neither") as caught:
        check()
    assert str(caught.value).count("\n  - ") == 3
    with pytest.raises(ConfigError, match=r"^no prompt$"):
        check_options(tmp_path, tp=1, pp=1, device="cpu", precision="bf16", more=["no prompt"])
    monkeypatch.setattr(launch, "has_supervisor", lambda: True)
    check()


@pytest.mark.parametrize("content", [None, b"[model", b"[model]\nnum_layers = 0\n", b"\xff"])
def test_a_layout_is_not_held_against_a_configuration_that_cannot_be_read(
    finished: Finished, tmp_path: Path, content: bytes | None
) -> None:
    """Whoever opens the checkpoint says what is wrong with it."""
    path = shutil.copytree(finished.newest, tmp_path / finished.newest.name)
    for options in ({"tp": 3, "pp": 1}, {"tp": 1, "pp": 9}):
        with pytest.raises(ConfigError, match="--tp 3" if options["tp"] == 3 else "--pp 9"):
            check_options(path, **options, device="cpu", precision=None)
    if content is None:
        (path / "config.toml").unlink()
    else:
        (path / "config.toml").write_bytes(content)
    check_options(path, tp=3, pp=9, device="cpu", precision=None)


def test_prompts_come_before_those_of_a_file_and_conversations_last(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("c\n")
    (tmp_path / "asked.jsonl").write_text('{"messages": [{"role": "user", "content": "d"}]}\n')
    assert all_prompts(["a", "b"], tmp_path / "prompts.txt") == ["a", "b", "c"]
    asked = all_conversations(["a", "b"], tmp_path / "prompts.txt", tmp_path / "asked.jsonl")
    assert asked == [Conversation([{"role": "user", "content": text}]) for text in "abcd"]
    assert list(prompt_problems(None, None, tmp_path / "asked.jsonl")) == []


def test_in_conversations_no_text_is_a_control_token(finished: Finished, tmp_path: Path) -> None:
    (tmp_path / "asked.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    for asked in (("--chat", "--prompt", "a"), ("--messages", tmp_path / "asked.jsonl")):
        answer = here("generate", finished.folder, *asked, "--control-tokens")
        assert (answer.status, answer.out) == (2, "")
        assert f"--control-tokens beside {asked[0]}: where control tokens stand in a conversation" in answer.err


def test_the_best_checkpoint_is_shown_by_the_first_rank_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All open it; without --best nobody looks for it."""
    monkeypatch.setattr(checked, "best_checkpoint", lambda path: (path / "step_00000004", "loss 2.5 at step 4"))
    run = Path("run")
    for rank, told in ((0, "run/step_00000004: loss 2.5 at step 4, the lowest of its run's checkpoints.\n"), (1, "")):
        monkeypatch.setattr(launch, "rank_and_size", lambda rank=rank: (rank, 2))
        assert checked.chosen(run, False) == run and capsys.readouterr().err == ""
        assert checked.chosen(run, True) == run / "step_00000004" and capsys.readouterr().err == told


def test_where_there_is_no_folder_nothing_is_said_of_its_best_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_options(tmp_path / "gone", tp=1, pp=1, device="cpu", precision=None, best=True)
    assert str(caught.value).startswith(f"{tmp_path / 'gone'} is neither a checkpoint nor the folder of a run")
    with pytest.raises(ConfigError, match=r"--best chooses among the checkpoints of a run"):
        check_options(tmp_path, tp=1, pp=1, device="cpu", precision=None, best=True)


@pytest.mark.parametrize("within", ["", "checkpoints"])
@pytest.mark.usefixtures("ascii_locale")
def test_a_layout_is_held_against_the_newest_checkpoint(finished: Finished, tmp_path: Path, within: str) -> None:
    """Whose model has other heads, as a run's folder may be used again; whatever the locale."""
    for step, heads in ((1, 2), (2, 4)):
        path = tmp_path / "run" / within / f"step_{step:08d}"
        shutil.copytree(finished.newest, path)
        content = (path / "config.toml").read_text()
        (path / "config.toml").write_text(
            re.sub(r"(?m)^num_heads = .*$", f"num_heads = {heads}  # größer", content), "utf-8"
        )
    check_options(tmp_path / "run", tp=4, pp=1, device="cpu", precision=None)
    with pytest.raises(ConfigError, match=r"--tp 8 does not divide.*step_00000002.*Use 1, 2, 4\."):
        check_options(tmp_path / "run", tp=8, pp=1, device="cpu", precision=None)


def test_a_model_is_not_cut_into_more_stages_than_it_has_units(finished: Finished) -> None:
    answer = here("generate", finished.folder, "--prompt", "a", "--pp", 9, "--tp", 1)
    assert answer.status == 2 and "--pp 9 stages" in answer.err and "Use at most 4." in answer.err, answer


def test_prompts_that_are_none_are_told_with_the_rest(finished: Finished, tmp_path: Path) -> None:
    for name, content, said in (
        ("nowhere.txt", None, "nowhere.txt cannot be read: No such file or directory"),
        ("blank.txt", b" \n\n", "blank.txt holds no prompt"),
        ("latin.txt", "schön".encode("latin-1"), "latin.txt is not UTF-8 (byte 3)"),
        ("bad.jsonl", b'{"prompt": "a"}\nb\n', "bad.jsonl, line 2: not JSON"),
        ("other.jsonl", b'{"text": "a"}\n', 'other.jsonl, line 1: no text under "prompt"'),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        answer = here("generate", finished.folder, "--prompts", tmp_path / name, "--top-k", -2)
        assert answer.status == 2 and answer.out == "" and "2 problems" in answer.err and said in answer.err, answer
    answer = here("generate", finished.folder)
    assert answer.status == 2 and answer.err.startswith("colonnade: neither --prompt nor --prompts is given"), answer


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "--prompt", "a"),
        ("evaluate", "--part", "test"),
        ("predict", "examples"),
        ("fill-mask", "--text", "a"),
        ("embed", "--text", "a"),
    ],
    ids=lambda command: command[0],
)
def test_every_command_that_runs_a_model_says_with_how_many_threads(
    command: tuple[str, ...], finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 leaves it to the rule that training has (`launch.num_threads`)."""
    chosen: list[int] = []

    def joined(layout: Layout, device: str, threads: int) -> NoReturn:
        chosen.append(threads)
        raise ConfigError("no further")

    monkeypatch.setattr(trained, "joined", joined)
    for options in ([], ["--threads", 3]):
        answer = here(command[0], finished.folder, *command[1:], *options)
        assert answer.status == 2 and answer.err == "colonnade: no further\n", answer
    assert chosen == [0, 3]
    assert "--threads" in here(command[0], finished.folder, *command[1:], "--threads", -1).err


def test_prompts_of_a_file_are_its_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("one \u2028still\r\n\n  two \r\n".encode())
    (tmp_path / "a.jsonl").write_text('{"prompt": "x\\ny", "id": 3}\n{"prompt": ""}\n')
    assert read_prompts(tmp_path / "a.txt") == ["one \u2028still", "  two "]
    assert read_prompts(tmp_path / "a.jsonl") == ["x\ny", ""]
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / f"marked {name}").write_bytes(codecs.BOM_UTF8 + (tmp_path / name).read_bytes())
        assert read_prompts(tmp_path / f"marked {name}") == read_prompts(tmp_path / name), "no mark of byte order"


def test_conversations_of_a_file_end_before_an_answer(tmp_path: Path) -> None:
    asked, answered = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ada."}
    lines = [[asked], [asked, answered, asked], [{"role": "system", "content": "Be short."}, asked]]
    file = tmp_path / "asked.jsonl"
    file.write_text("\n\n".join(json.dumps({"messages": each}) for each in lines))
    assert read_conversations(file) == [Conversation(messages) for messages in lines]
    for wrong, said in (
        ([asked, answered], "its last message is the assistant's: there is nothing to answer"),
        ([], "no list of messages"),
        (None, "no list of messages"),
        ([{"role": "user"}], "message 1 .user. has no text in content"),
    ):
        file.write_text(json.dumps({"messages": [asked]}) + "\n" + json.dumps({"messages": wrong}) + "\n")
        with pytest.raises(DataError, match=rf"asked\.jsonl, line 2: {said}"):
            read_conversations(file)
    file.write_text("[]\n")
    with pytest.raises(DataError, match=r"line 1: no list of messages"):
        read_conversations(file)


def test_evaluate_tells_all_wrong_options_at_once(tmp_path: Path) -> None:
    answer = here("evaluate", tmp_path / "x", "cloze", "--data", "nope.txt", "--device", "tpu")
    assert answer.status == 2 and answer.err.startswith("colonnade: 4 problems\n")
    for said in ("no task 'cloze'", "nope.txt does not exist", "is neither a checkpoint nor", "'tpu'"):
        assert said in answer.err, said


@pytest.mark.parametrize(
    ("data", "part", "stride", "samples", "said"),
    [
        ("text.txt", None, 8, None, []),
        (None, "test", None, 5, []),
        (None, None, None, None, ["neither --data nor --part is given"]),
        ("text.txt", "test", None, None, ["--data text.txt and --part test are given"]),
        (None, "train", None, None, ["--part 'train'"]),
        (None, "test", 8, None, ["--stride 8 does not go with --part"]),
        ("text.txt", None, None, 5, ["--samples 5 is of a --part"]),
    ],
)
def test_what_is_measured_on_what(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    data: str | None,
    part: str | None,
    stride: int | None,
    samples: int | None,
    said: list[str],
) -> None:
    (tmp_path / "text.txt").write_text("a text")
    monkeypatch.chdir(tmp_path)
    found = list(measurement_problems(Measurement(data=data, part=part, stride=stride, samples=samples)))
    assert len(found) == len(said) and all(text in problem for text, problem in zip(said, found, strict=True))


@pytest.mark.parametrize("stride", [0, -3])
def test_a_window_moves_by_a_token_or_more(stride: int, tmp_path: Path) -> None:
    answer = here("evaluate", tmp_path, "squad", "--data", "dev.json", "--stride", stride)
    assert answer.status == 2 and "Invalid value for '--stride'" in answer.err, answer


def test_an_overlap_is_that_of_a_text_file(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.bin"
    tokens.touch()
    for text in (Measurement(part="test"), Measurement(data=str(tokens.with_suffix("")))):
        (problem,) = measurement_problems(replace(text, overlap=("run",)))
        assert problem == "--overlap compares the words of a text file with a corpus. Name one with --data."


def test_a_text_may_be_compared_with_whatever_a_corpus_is(tmp_path: Path) -> None:
    """A text, a folder, the prefix of a token file, or the run's own data."""
    text = tmp_path / "text.txt"
    text.touch()
    (tmp_path / "tokens.idx").touch()
    corpora = (str(text), str(tmp_path), str(tmp_path / "tokens"), "run")
    assert list(measurement_problems(Measurement(data=str(text), overlap=corpora))) == []
    (problem,) = measurement_problems(Measurement(data=str(text), overlap=(*corpora, "gone")))
    assert problem.startswith("--overlap gone: there is no such text, folder or token file.")


def test_answers_are_not_written_over_what_is_read(tmp_path: Path) -> None:
    data, corpus = tmp_path / "dev.json", tmp_path / "corpus.json"
    for file in (data, corpus):
        file.touch()
        asked = Measurement(task="squad", data=str(data), overlap=(str(corpus),), output=str(file))
        (problem,) = (each for each in measurement_problems(asked) if each.startswith("--output"))
        assert f"{file} is among what this command is given" in problem


@pytest.mark.slow
def test_data_that_is_not_there_is_told_before_torch_is_imported(finished: Finished) -> None:
    program = """
import sys
from colonnade import cli
try:
    cli.main()
except SystemExit as end:
    print(end.code, "torch" in sys.modules)
"""
    command = [sys.executable, "-c", program, "evaluate", str(finished.folder), "perplexity", "--data", "nope.txt"]
    answer = subprocess.run([*command, "--tp", "2"], capture_output=True, text=True, timeout=60, check=False)
    assert answer.stdout == "2 False\n" and answer.stderr.startswith("colonnade: nope.txt does not exist"), answer


def test_every_precision_that_the_model_knows_is_an_option() -> None:
    assert [list(device_problems("cpu", name)) for name in DTYPES] == [[] for _ in DTYPES]


def test_layouts_that_cut_heads_the_mlp_or_units_are_refused() -> None:
    model = ModelConfig(num_layers=2, num_heads=4, hidden_size=16, ffn_hidden_size=30)

    def refused(tp: int, pp: int) -> bool:
        return bool(list(layout_problems(Path("step"), model, tp, pp)))

    assert [tp for tp in (1, 2, 3, 4) if refused(tp, 1)] == [3, 4], "30 columns are cut in 2, 4 heads in 2 or 4"
    assert [pp for pp in (1, 4, 5) if refused(1, pp)] == [5], "two blocks, the embedding and the head"


@pytest.mark.parametrize(
    ("heads", "tp", "fits"), [(3, 2, False), (2, 3, False), (3, 3, True), (2, 6, True), (6, 2, True)]
)
def test_heads_of_keys_and_values_are_whole_on_each_rank(heads: int, tp: int, fits: bool) -> None:
    """Six heads of queries: three of keys and values are not for two ranks, nor two for three."""
    model = ModelConfig(num_layers=2, hidden_size=36, num_heads=6, num_key_value_heads=heads, ffn_hidden_size=48)
    problems = list(layout_problems(Path("step"), model, tp, 1))
    assert problems == [] if fits else f"goes neither with nor into the {heads} heads" in problems[0]
    assert fits or "Use 1, 2" in problems[0] or "Use 1, 3, 6." in problems[0]
