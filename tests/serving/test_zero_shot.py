"""WikiText-103 and LAMBADA from the command line: what a plain script with `transformers` finds, on every layout."""

import json
import math
import statistics
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from colonnade.data.tokenizer import Tokenizer
from colonnade.serving import measure
from tests.commands import forked, here
from tests.convert.published import saved
from tests.runs import Finished
from tests.serving.published import Pair, make_pair, measured
from tests.tiny import TinyCorpus

WORDS = (
    ' \n = Holmes = \n \n The man \'s hat ( 1887 ) was a well @-@ worn " bowler " ; it cost 3 @.@ 50 . Mr. Holmes said '
    "that it was , no doubt , the property of one of those who had fallen on evil days . \n = = Home = = \n \n He did "
    "not go home , though his wife waited for him and the lamp was lit until the morning came . \n "
)
PASSAGES = [
    "He had no doubt that the lamp was lit, and that she waited by the lamp",
    "The man took his hat and his coat, and walked home through the rain.\n\nMorning",
    '"What do you make of it?" said Holmes, and gave me the hat',
    "She said no",
    "They came to the house in the evening, but nobody was there to open the gentlemanly door",
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), tokenizer, seq_length=40)


@pytest.fixture(scope="module")
def wikitext(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wikitext") / "wikitext-103.test.tokens"
    path.write_text(WORDS)
    return path


@pytest.fixture(scope="module")
def lambada(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lambada") / "lambada_test.jsonl"
    path.write_text("".join(json.dumps({"text": passage}) + "\n" for passage in PASSAGES))
    return path


def plain_wikitext(pair: Pair, text: str, window: int, stride: int) -> float:
    """Sum of losses, as the page "Perplexity of fixed-length models" of transformers' documentation has it."""
    tokens = torch.tensor(pair.tokenizer.encode(text))
    total, scored_to = 0.0, 1
    for begin in range(0, len(tokens), stride):
        stop = min(begin + window, len(tokens) - 1)
        with torch.no_grad():
            logits = pair.twin(tokens[None, begin:stop]).logits[0]
        losses = F.cross_entropy(logits, tokens[begin + 1 : stop + 1], reduction="none")
        total += float(losses[scored_to - begin - 1 :].sum())
        scored_to = stop + 1
        if stop == len(tokens) - 1:
            return total
    raise AssertionError


@pytest.mark.parametrize(("window", "stride"), [(40, 32), (16, 3), (40, 40)])
@pytest.mark.parametrize("detokenizer", ["invertible", "none"])
def test_wikitext_is_a_plain_script_s(pair: Pair, wikitext: Path, window: int, stride: int, detokenizer: str) -> None:
    from colonnade.evaluation.detokenize import DETOKENIZERS

    options = ["--window", window, "--stride", stride, "--detokenizer", detokenizer]
    told = measured(pair, "wikitext103", "--data", wikitext, *options)
    original = len(WORDS.strip().split(" "))
    text = DETOKENIZERS[detokenizer](WORDS)
    wanted = math.exp(plain_wikitext(pair, text, window, stride) / original)
    assert told["perplexity"] == pytest.approx(wanted, rel=1e-9)
    assert told["original_tokens"] == original and told["tokens"] == len(pair.tokenizer.encode(text)) - 1
    first = len(pair.tokenizer.decode(pair.tokenizer.encode(text)[:1]).encode())
    assert told["bytes"] == len(text.encode()) - first


def test_without_options_the_papers_window_is_taken_or_all_that_the_model_has(
    pair: Pair, wikitext: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron-LM's paper: windows of 1,024 tokens, moved by 32 (appendix E.1)."""
    assert (measure.PAPER_WINDOW, measure.PAPER_STRIDE) == (1024, 32)
    told = measured(pair, "wikitext103", "--data", wikitext)["parameters"]
    assert (told["window"], told["stride"]) == (40, 32), "the model has no more"
    monkeypatch.setattr(measure, "PAPER_WINDOW", 24)
    told = measured(pair, "wikitext103", "--data", wikitext)["parameters"]
    assert (told["window"], told["stride"]) == (24, 24)


def plain_lambada(pair: Pair, cut: list[tuple[str, str]]) -> tuple[float, float, float]:
    """Accuracy, its standard error and perplexity, a passage at a time."""
    right, losses = [], []
    for context, word in cut:
        first, last = pair.tokenizer.encode(context), pair.tokenizer.encode(word)
        with torch.no_grad():
            logits = pair.twin(torch.tensor([first + last])).logits[0, len(first) - 1 : -1]
        right.append(float((logits.argmax(-1) == torch.tensor(last)).all()))
        losses.append(float(F.cross_entropy(logits, torch.tensor(last), reduction="sum")))
    error = statistics.stdev(right) / math.sqrt(len(right))
    return statistics.fmean(right), error, math.exp(sum(losses) / len(losses))


def split(passage: str) -> tuple[str, str]:
    word = passage.split()[-1]
    return passage[: -len(word)].strip(), f" {word}"


def test_lambada_is_a_plain_script_s(pair: Pair, lambada: Path, tmp_path: Path) -> None:
    accuracy, error, perplexity = plain_lambada(pair, [split(passage) for passage in PASSAGES])
    for batch_size in (1, 3):
        told = measured(pair, "lambada", "--data", lambada, "--batch-size", batch_size)
        assert told["accuracy"] == accuracy and told["perplexity"] == pytest.approx(perplexity, rel=1e-9)
        assert told["accuracy_error"] == pytest.approx(error, rel=1e-12)
    assert (told["passages"], told["protocol"]) == (5, "LAMBADA (whole-word)")
    lines = tmp_path / "lambada.txt"
    lines.write_text("".join(f"{passage}\n" for passage in PASSAGES if "\n" not in passage))
    assert measured(pair, "lambada", "--data", lines)["passages"] == 4


@pytest.mark.parametrize("variant", ["last-token", "lm-eval"])
def test_variants_by_their_names(pair: Pair, lambada: Path, variant: str) -> None:
    told = measured(pair, "lambada", "--data", lambada, "--variant", variant)
    whole = measured(pair, "lambada", "--data", lambada)
    assert told["protocol"] == f"LAMBADA ({variant})" and told["parameters"]["variant"] == variant
    assert (told["target_tokens"], told["loss"]) != (whole["target_tokens"], whole["loss"])
    words = forked("evaluate", pair.ours, "lambada", "--data", lambada, "--variant", variant).out
    assert words.startswith(f"LAMBADA ({variant}): accuracy ")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [("--tp", 2), ("--pp", 2), ("--dp", 2)], ids=lambda layout: layout[0][2:])
def test_every_layout_finds_what_one_rank_does(
    pair: Pair, wikitext: Path, lambada: Path, layout: tuple[str, int]
) -> None:
    for task, data, options in (("wikitext103", wikitext, ["--stride", 7]), ("lambada", lambada, [])):
        one = measured(pair, task, "--data", data, *options, "--batch-size", 2)
        two = measured(pair, task, "--data", data, *options, "--batch-size", 2, *layout, num_ranks=2)
        assert two.pop("layout") == {"tp": 1, "pp": 1, "dp": 1} | {layout[0][2:]: 2}
        del one["layout"]
        numbers = {name for name, value in one.items() if isinstance(value, float | int)}
        assert {name: two[name] for name in numbers} == pytest.approx({name: one[name] for name in numbers}, rel=1e-10)
        assert {name: value for name, value in two.items() if name not in numbers} == {
            name: value for name, value in one.items() if name not in numbers
        }


def test_a_result_tells_how_it_came_about(pair: Pair, wikitext: Path, lambada: Path) -> None:
    told = measured(pair, "wikitext103", "--data", wikitext)
    assert told["protocol"] == "WikiText-103"
    assert told["parameters"] == {"window": 40, "stride": 32, "detokenizer": "invertible", "batch_size": 8}
    assert len(told["checkpoint"]["sha256"]) == len(told["data"]["sha256"]) == 64
    assert told["versions"] == {"colonnade": "0.1.0", "torch": torch.__version__} and told["precision"] == "fp64"
    words = forked("evaluate", pair.ours, "wikitext103", "--data", wikitext).out
    assert words.startswith("WikiText-103: perplexity ") and "window 40 moved by 32" in words


@pytest.mark.slow
def test_the_overlap_with_a_corpus_stands_beside_the_score(
    pair: Pair, wikitext: Path, lambada: Path, finished: Finished, corpus: TinyCorpus, tmp_path: Path
) -> None:
    (tmp_path / "seen.txt").write_text("x y z. The lamp was lit until the morning came to the house.")
    told = measured(pair, "wikitext103", "--data", wikitext, "--overlap", tmp_path / "seen.txt")
    assert told["overlap"]["ngram"] == 8 and told["overlap"]["shared"] == 1
    (tmp_path / "seen.txt").write_text("He had no doubt that the lamp was lit, and that she waited by the door")
    told = measured(pair, "lambada", "--data", lambada, "--overlap", tmp_path / "seen.txt")
    assert told["overlap"]["shared"] == 8 and told["overlap"]["passages_touched"] == 1
    own = tmp_path / "own.txt"
    own.write_text(json.loads(corpus.text.read_text().splitlines()[0])["text"])
    answer = forked("evaluate", finished.folder, "--data", own, "--overlap", "run", "--json")
    assert json.loads(answer.out)["overlap"]["share"] == 1.0
    assert "of the 13 8-grams" in forked("evaluate", finished.folder, "--data", own, "--overlap", "run").out
    assert answer.err.startswith(f"  comparing the 8-grams of {own} with")
    refused = here("evaluate", pair.ours, "--data", own, "--overlap", "run")
    assert refused.status == 2


def test_a_corpus_without_a_document_is_refused_behind_the_score(
    pair: Pair, lambada: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("colonnade.serving.measure.num_cores", lambda: 1)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"content": "words"}\n')
    answer = here("evaluate", pair.ours, "lambada", "--data", lambada, "--overlap", corpus, "--json")
    assert answer.status == 2 and "overlap" not in json.loads(answer.out)
    assert f"{corpus} holds no document with text to compare" in answer.err and "data overlap --key" in answer.err


@pytest.mark.parametrize(
    ("task", "content", "options", "said"),
    [
        ("lambada", '{"text": "a b"}\nnope\n', [], "test.jsonl, line 2: not JSON"),
        ("lambada", "", [], "test.jsonl has no passage"),
        (
            "lambada",
            '{"text": "a b"}',
            ["--variant", "cloze"],
            "--variant 'cloze': there is no such variant. Use whole",
        ),
        ("lambada", '{"text": "a b"}', ["--stride", 3], "--stride is of the task perplexity and of wikitext103"),
        ("lambada", None, [], "does not exist"),
        ("wikitext103", "", [], "test.tokens is empty"),
        ("wikitext103", " a b", ["--stride", 9, "--window", 8], "--stride 9 is larger than --window 8"),
        ("wikitext103", " a b " * 30, ["--stride", 41], "--stride 41 is larger than the window, 40 tokens"),
        ("wikitext103", " a b " * 30, ["--window", 41], "seq_length = 41, but the model has learned 40 positions"),
        ("wikitext103", " a b", ["--detokenizer", "moses"], "--detokenizer 'moses': there is no such detokenizer"),
        ("wikitext103", " a b", ["--variant", "lm-eval"], "--variant is of the task lambada, not of wikitext103"),
        ("perplexity", "a b", ["--overlap", "nowhere"], "--overlap nowhere: there is no such text"),
        ("lambada", json.dumps({"text": "a b " * 60}), [], "test.jsonl, line 1: the passage has"),
    ],
)
def test_what_is_refused_with_one_message(
    pair: Pair, tmp_path: Path, task: str, content: str | None, options: list[object], said: str
) -> None:
    data = tmp_path / ("test.tokens" if task == "wikitext103" else "test.jsonl")
    if content is not None:
        data.write_text(content)
    answer = here("evaluate", pair.ours, task, "--data", data, *options)
    assert answer.status == 2 and answer.out == "" and answer.err.count("colonnade: ") == 1, answer
    assert said in answer.err and "Traceback" not in answer.err


def test_models_that_do_not_read_from_left_to_right(tmp_path: Path, lambada: Path, wikitext: Path) -> None:
    saved(tmp_path / "theirs", "bert")
    assert here("convert", tmp_path / "theirs", tmp_path / "ours").status == 0
    for task, data in (("lambada", lambada), ("wikitext103", wikitext)):
        answer = forked("evaluate", tmp_path / "ours", task, "--data", data)
        assert answer.status == 2 and 'a model of kind "bert" gives the tokens of a text no chances' in answer.err


def test_progress_is_told_on_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from colonnade.evaluation.progress import Progress

    said: list[str] = []
    times = iter([0.0, 0.0, 2.0, 6.0, 7.0, 12.0])
    progress = Progress("passages", clock=lambda: next(times), say=said.append)
    progress.begin(5153, 1000)
    for _ in range(4):
        progress.advance(1000, 200)
    assert said == ["  2,000 of 5,153 passages, 0:00:09 left", "  4,000 of 5,153 passages, 0:00:03 left"]
