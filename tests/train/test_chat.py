"""A decoder fine-tuned on conversations: the loss of answers alone, on any layout; and the answers that it gives."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from colonnade.data.indexed import TokenFile
from colonnade.data.tokenizer import Tokenizer
from tests.commands import Answer, forked, here
from tests.examples.chats import CHATML, TEXT, folder_of, jsonl
from tests.runs import assert_near, metrics

CONFIG = """
[model]
num_layers = 2
hidden_size = 32
num_heads = 4
seq_length = 64
activation = "gelu_tanh"
dropout = 0.1
[data]
train = "{folder}/talks"
tokenizer = "{folder}/tokenizer"
split = "4:1"
documents = "separate"
packing = "whole"
too_long = "truncate"
loss_on = "answers"
[train]
steps = 4
global_batch_size = 4
micro_batch_size = 2
precision = "fp64"
evaluate_every = 2
[optim]
learning_rate = 3e-3
warmup_steps = 1
[run]
folder = "{run}"
"""


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and a token file of conversations, some longer than a sample."""
    folder = tmp_path_factory.mktemp("talks")
    folder_of(folder / "tokenizer", CHATML)
    chance = random.Random(3)
    words = TEXT.split()
    records = [
        {
            "messages": [
                {"role": role, "content": " ".join(chance.choices(words, k=chance.randint(1, 9)))}
                for _ in range(chance.randint(1, 3))
                for role in ("user", "assistant")
            ]
        }
        for _ in range(60)
    ]
    file = jsonl(folder / "talks.jsonl", *records)
    answer = here("data", "examples", "chat", file, "--output", folder / "talks", "--tokenizer", folder / "tokenizer")
    assert answer.status == 0, answer
    return folder


def run(talks: Path, folder: Path, *more: str, num_ranks: int = 1) -> Answer:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(CONFIG.format(folder=talks, run=folder / "run"))
    return forked("train", folder / "config.toml", *more, num_ranks=num_ranks)


@pytest.fixture(scope="module")
def tuned(talks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuned")
    answer = run(talks, folder)
    assert answer.status == 0, answer
    return folder / "run"


@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.tp=2", "parallel.sequence_parallel=true"),
        pytest.param(("parallel.pp=2",), marks=pytest.mark.slow),
        pytest.param(("parallel.dp=2", "parallel.zero=3"), marks=pytest.mark.slow),
    ],
    ids=["sp", "pp", "zero 3"],
)
def test_answers_are_learned_alike_on_every_layout(
    layout: tuple[str, ...], talks: Path, tuned: Path, tmp_path: Path
) -> None:
    answer = run(talks, tmp_path, *layout, num_ranks=2)
    assert answer.status == 0, answer
    assert_near(tmp_path / "run", tuned)


def test_the_loss_is_that_of_each_conversation_alone_in_transformers(talks: Path, tmp_path: Path) -> None:
    """Mean over the answers of the held-out conversations, each read by itself, of the initial model as exported."""
    fixed = ("model.dropout=0", "data.too_long=drop", "optim.learning_rate=1e-12", "train.evaluate_samples=1000")
    answer = run(talks, tmp_path, *fixed)
    assert answer.status == 0, answer
    answer = here("convert", tmp_path / "run", tmp_path / "theirs")
    assert answer.status == 0, answer
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "theirs", dtype=torch.float64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert tokenizer.chat_template == CHATML
    records = [json.loads(line)["messages"] for line in (talks / "talks.jsonl").read_text().splitlines()]
    losses = []
    for messages in records[48:]:
        told = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
        ids, mask = torch.tensor(told["input_ids"]), torch.tensor(told["assistant_masks"]).bool()
        if len(ids) > 64:
            continue
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        losses.append(nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")[mask[1:]])
    expected = float(torch.cat(losses).mean())
    assert metrics(tmp_path / "run")[-1]["validation_loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_a_model_answers_until_the_turn_ends(talks: Path, tuned: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(talks / "tokenizer")
    answer = here("generate", tuned, "--chat", "--prompt", "What is it?", "--max-new-tokens", "200", "--json")
    assert answer.status == 0, answer
    (made,) = json.loads(answer.out)["texts"]
    prompt = tokenizer.encode_marked([("<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\n", ())])[0][0]
    assert made["prompt"] == "What is it?" and made["end"] in ("stop", "full")
    assert made["end"] == "stop" or made["tokens"] == 64 - len(prompt) + 1
    file = jsonl(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "What is it?"}]})
    again = here("generate", tuned, "--messages", file, "--max-new-tokens", "200", "--json")
    assert json.loads(again.out) == json.loads(answer.out)
    plain = here("generate", tuned, "--prompt", "What is it?", "--max-new-tokens", "4")
    assert plain.status == 0 and plain.out.startswith("What is it?")


def test_texts_and_answers_end_with_the_tokens_that_an_exported_folder_names(
    talks: Path, tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr("colonnade.serving.trained.generate", lambda *_, **options: asked.append(options) or iter(()))
    for chat in ([], ["--chat"]):
        answer = here("generate", tuned, *chat, "--prompt", "What is it?", "--max-new-tokens", "2")
        assert answer.status == 0, answer
    tokenizer = Tokenizer.load(talks / "tokenizer")
    end, turn = tokenizer.end_of_document, tokenizer.id_of("<|im_end|>")
    assert [set(each["stop"]) for each in asked] == [{end, turn}] * 2 and end != turn
    assert here("convert", tuned, tmp_path / "theirs").status == 0
    assert json.loads((tmp_path / "theirs" / "generation_config.json").read_text())["eos_token_id"] == [end, turn]


def test_what_is_shown_before_an_answer_is_the_message_that_it_answers(
    talks: Path, tuned: Path, tmp_path: Path
) -> None:
    system, user = (
        {"role": role, "content": text} for role, text in (("system", "Be brief."), ("user", "What is it?"))
    )
    file = jsonl(tmp_path / "a.jsonl", {"messages": [system, user]})
    answer = here("generate", tuned, "--messages", file, "--max-new-tokens", "1", "--json")
    assert answer.status == 0, answer
    assert [made["prompt"] for made in json.loads(answer.out)["texts"]] == ["What is it?"]


@pytest.mark.slow
def test_a_template_writes_for_others_what_it_wrote_in_training(talks: Path, tmp_path: Path) -> None:
    """It would begin with the token that begins a text, of which its tokenizer has none."""
    folder = folder_of(tmp_path / "tokenizer", "{{- bos_token }}" + CHATML)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["bos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    answer = here(
        "data", "examples", "chat", talks / "talks.jsonl", "--output", tmp_path / "talks", "--tokenizer", folder
    )
    assert answer.status == 0, answer
    answer = run(talks, tmp_path, f"data.train={tmp_path / 'talks'}", f"data.tokenizer={folder}", "train.steps=1")
    assert answer.status == 0, answer
    assert here("convert", tmp_path / "run", tmp_path / "theirs").status == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    messages = json.loads((talks / "talks.jsonl").read_text().splitlines()[0])["messages"]
    told = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    trained = TokenFile(tmp_path / "talks").document(0).tolist()
    assert told == trained[: len(told)] and tokenizer.eos_token == "</s>"


def test_others_end_an_answer_there_too(talks: Path, tuned: Path, tmp_path: Path) -> None:
    """In what `convert` makes of it: programs that read a folder of Hugging Face know of no turns."""
    assert here("convert", tuned, tmp_path / "theirs").status == 0
    tokenizer = Tokenizer.load(talks / "tokenizer")
    wanted = sorted([tokenizer.end_of_document or 0, tokenizer.id_of("<|im_end|>") or 0])
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "theirs" / name).read_text())["eos_token_id"] == wanted


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", "line 1: not JSON"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "nothing to answer"),
        ({"messages": ["a"]}, "message 1 is str, where an object with role and content belongs"),
        ({"messages": [{"role": "cat", "content": "a"}]}, "message 1 has the role 'cat'"),
        ({"messages": [{"role": "user", "content": "a<|im_end|>"}]}, "the control token"),
    ],
)
def test_conversations_that_cannot_be_answered(record: object, message: str, tuned: Path, tmp_path: Path) -> None:
    answer = here("generate", tuned, "--messages", jsonl(tmp_path / "a.jsonl", record))
    assert answer.status == 2 and message in answer.err and "Traceback" not in answer.err


@pytest.mark.slow
def test_a_model_of_text_has_no_template(talks: Path, tmp_path: Path) -> None:
    made = here("data", "tokenize", talks / "talks.jsonl", "--key", "messages", "--output", tmp_path / "x",
                "--tokenizer", talks / "tokenizer")  # fmt: skip
    assert made.status == 2, "no text in there"
    text = jsonl(tmp_path / "a.jsonl", *[{"text": "What is the capital of France? " * 20}] * 8)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes((talks / "tokenizer" / "tokenizer.json").read_bytes())
    made = here("data", "tokenize", text, "--output", tmp_path / "text", "--tokenizer", tokenizer)
    assert made.status == 0, made
    files = (f"data.train={tmp_path / 'text'}", f"data.tokenizer={tokenizer}", "train.steps=1")
    answer = run(talks, tmp_path, *files)
    assert answer.status == 2 and "in which no answers are marked" in answer.err
    answer = run(talks, tmp_path, *files, "data.loss_on=all")
    assert answer.status == 0, answer
    answer = here("generate", tmp_path / "run", "--chat", "--prompt", "a")
    assert answer.status == 2 and "no tokenizer_config.json with a chat template" in answer.err


@pytest.mark.slow
def test_a_merged_model_writes_conversations_as_it_did_before(talks: Path, tuned: Path, tmp_path: Path) -> None:
    answer = run(talks, tmp_path, f"train.init_from={tuned}", "lora.rank=2", "train.steps=1")
    assert answer.status == 0, answer
    assert here("merge", tmp_path / "run", tmp_path / "merged").status == 0
    kept = (tmp_path / "merged" / "tokenizer_config.json").read_text()
    assert json.loads(kept)["chat_template"] == CHATML
    answer = here("generate", tmp_path / "merged", "--chat", "--prompt", "What is it?", "--max-new-tokens", "4")
    assert answer.status == 0, answer


@pytest.mark.slow
def test_conversations_that_are_left_out_are_counted_aloud(talks: Path, tmp_path: Path) -> None:
    answer = run(talks, tmp_path, "data.too_long=drop", "model.seq_length=24", "train.steps=1")
    file = TokenFile(str(talks / "talks"))
    lengths = [file.document_start(number + 1) - file.document_start(number) for number in range(48)]  # split 4:1 of 60
    longer = sum(length > 24 for length in lengths)
    assert answer.status == 0 and 1 < longer < 48, answer
    assert f"{longer} documents of 48 to train on longer than model.seq_length and left out" in answer.out
