"""Perplexity against torch's own cross entropy, sliding windows against brute force, every layout against one rank."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from colonnade import pace
from colonnade.data.loader import Batch, evaluation_positions
from colonnade.data.rows import Cut, TooLong
from colonnade.errors import ConfigError, DataError
from colonnade.evaluation.continuations import Continuation, score
from colonnade.evaluation.perplexity import Perplexity, evaluate, evaluate_tokens, exp_of
from colonnade.evaluation.progress import Progress
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, Mesh, build_mesh
from colonnade.model.gpt import GPT
from tests.distributed import run_on_ranks
from tests.evaluation.test_continuations import UNITS, stage
from tests.generation.tiny import tiny_gpt
from tests.model.whole import hidden

DP = Axis("dp")
TEXT = np.random.default_rng(5).integers(0, 21, 31).astype(np.uint16)


def batches(sizes: list[int], length: int = 9) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(21, (length + 1, size), generator=generator) for size in sizes]
    masks = [(torch.rand(length, size, generator=generator) < 0.6).float() for size in sizes]
    masks[0][3] = 0.0  # a position that no sample counts
    return [
        Batch(both[:-1], both[1:], mask, torch.arange(both.shape[1])) for both, mask in zip(rows, masks, strict=True)
    ]


def plain_losses(model: GPT, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Each token's loss [s, b], by torch's own cross entropy on whole logits. One rank."""
    with torch.no_grad():
        logits = model.head.norm(hidden(model, tokens)) @ model.head.output.weight[: model.vocab_size].T
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(
        labels.shape
    )


def test_it_is_torchs_cross_entropy() -> None:
    model, parts = tiny_gpt(Axis("tp")).train(), batches([3, 1])
    lengths = torch.arange(21) % 5
    total = sum(float((plain_losses(model, part.tokens, part.labels) * part.loss_mask).sum()) for part in parts)
    tokens = sum(int(part.loss_mask.sum()) for part in parts)
    num_bytes = sum(int((lengths[part.labels] * part.loss_mask).sum()) for part in parts)
    found = evaluate(model, parts, dp=DP, byte_lengths=lengths, words=11)
    assert (found.tokens, found.bytes, found.words) == (tokens, num_bytes, 11)
    assert len({tokens, num_bytes, 11}) == 3, "so that each is seen in its place"
    assert found.loss == pytest.approx(total / tokens, rel=1e-12)
    assert found.perplexity == pytest.approx(math.exp(total / tokens), rel=1e-12)
    assert found.bits_per_byte == pytest.approx(total / math.log(2) / num_bytes, rel=1e-12)
    assert found.word_perplexity == pytest.approx(math.exp(total / 11), rel=1e-12)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("weight", [0.01, 2.0**-12])
def test_labels_may_count_less_than_one_in_all(weight: float) -> None:
    """Only their relative weights matter, as in training."""
    model, (batch,) = tiny_gpt(Axis("tp")), batches([3])
    lengths = torch.arange(21) % 5
    light = replace(batch, loss_mask=batch.loss_mask.double() * weight)
    found, expected = (evaluate(model, [each], dp=DP, byte_lengths=lengths) for each in (light, batch))
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    assert found.perplexity == pytest.approx(expected.perplexity, rel=1e-12)
    assert found.bits_per_byte == pytest.approx(expected.bits_per_byte, rel=1e-12)


def test_documents_that_are_kept_apart_are_scored_as_if_each_were_alone() -> None:
    """Each from the first position on, and without a look at the one before it."""
    model, (joined,) = tiny_gpt(Axis("tp")), batches([2])
    lengths = (4, 2, 3)
    documents, positions = (
        torch.cat([part(length, number) for number, length in enumerate(lengths)])[:, None].expand(-1, 2)
        for part in (lambda length, number: torch.full((length,), number), lambda length, _: torch.arange(length))
    )
    apart = replace(joined, documents=documents, positions=positions)
    alone = [
        plain_losses(model, tokens, labels)
        for tokens, labels in zip(joined.tokens.split(lengths), joined.labels.split(lengths), strict=True)
    ]
    expected = float((torch.cat(alone) * joined.loss_mask).sum() / joined.loss_mask.sum())
    assert evaluate(model, [apart], dp=DP).loss == pytest.approx(expected, rel=1e-12)
    assert abs(evaluate(model, [joined], dp=DP).loss - expected) > 1e-3


def test_what_is_not_known_is_not_told() -> None:
    found = evaluate(tiny_gpt(Axis("tp")), batches([2]), dp=DP)
    assert found.bytes is found.bits_per_byte is found.words is found.word_perplexity is None
    assert "bits" not in found.summary() and "word" not in found.summary()


def test_words_that_are_none() -> None:
    found = evaluate_tokens(tiny_gpt(Axis("tp")), np.tile(TEXT, 20), dp=DP, words=1)  # as in text without spaces
    assert found.words == 1 and found.word_perplexity is None


def test_a_perplexity_is_told_in_few_characters_however_large_it_is() -> None:
    told = [Perplexity(700.0, each, None, 3, None).summary() for each in (1234.5678, 1.234e300, math.inf)]
    assert told == [f"loss 700.0000, perplexity {each}, 3 tokens" for each in ("1,234.57", "1.23e+300", "inf")]


def test_the_summary_names_its_numbers() -> None:
    found = evaluate(tiny_gpt(Axis("tp")), batches([2]), dp=DP, byte_lengths=torch.full((21,), 2), words=40)
    told = (f"perplexity {found.perplexity:,.2f}", f"{found.word_perplexity:,.2f} a word", f"({found.bytes} bytes)")
    assert found.bytes == 2 * found.tokens and all(number in found.summary() for number in told)
    assert found.summary().endswith(f", {found.tokens} tokens")
    summary = found.summary()
    for number in (f"loss {found.loss:.4f}", f"{found.bits_per_byte:.4f} bits per byte", "(40 words)"):
        assert number in summary
    assert found.numbers() == {
        "loss": found.loss,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
    }


def test_a_loss_of_which_no_number_holds_the_exponential_has_an_infinite_perplexity() -> None:
    assert exp_of(800.0) == math.inf and exp_of(709.0) == math.exp(709.0)


def test_of_tokens_that_stand_for_no_text_there_are_no_bits_per_byte() -> None:
    found = evaluate(tiny_gpt(Axis("tp")), batches([2]), dp=DP, byte_lengths=torch.zeros(21))
    assert (found.bytes, found.bits_per_byte) == (0, None) and "bits" not in found.summary()


def test_ids_that_the_tokenizer_does_not_have_stand_for_no_text() -> None:
    parts = batches([2])
    found = evaluate(tiny_gpt(Axis("tp")), parts, dp=DP, byte_lengths=torch.full((15,), 2))
    known = (parts[0].labels < 15) & parts[0].loss_mask.bool()
    assert found.bytes == 2 * int(known.sum())


def test_ids_that_the_model_does_not_have_are_none_of_the_text() -> None:
    found = evaluate(tiny_gpt(Axis("tp")), (parts := batches([2])), dp=DP, byte_lengths=torch.arange(30))
    assert found.bytes == int((parts[0].labels * parts[0].loss_mask).sum())


@pytest.mark.parametrize("parts", [[], [0.0]], ids=["no batches", "all masked"])
def test_nothing_to_score(parts: list[float]) -> None:
    masked = [Batch(b.tokens, b.labels, b.loss_mask * mask, b.samples) for b in batches([2]) for mask in parts]
    with pytest.raises(DataError, match="no token to score"):
        evaluate(tiny_gpt(Axis("tp")), masked, dp=DP)


def brute_force(model: GPT, tokens: np.ndarray, seq_length: int, stride: int) -> float:
    """Sum of losses: a token at a time, each with the context that its window gives it."""
    total = 0.0
    for label in range(1, len(tokens)):
        behind = label - seq_length  # labels up to seq_length belong to window 0
        start = 0 if behind <= 0 else -(-behind // stride) * stride
        inputs = torch.tensor(tokens[start:label].astype(np.int64))[:, None]
        labels = torch.tensor(tokens[start + 1 : label + 1].astype(np.int64))[:, None]
        total += float(plain_losses(model, inputs, labels)[-1, 0])
    return total


@pytest.mark.parametrize(("length", "stride"), [(12, 12), (12, 5), (7, 1), (7, 7), (1, 1)])
@pytest.mark.parametrize("num_tokens", [22, 2, 8, 13])
def test_sliding_windows_are_brute_force(length: int, stride: int, num_tokens: int) -> None:
    model, text = tiny_gpt(Axis("tp")), TEXT[:num_tokens]
    expected = brute_force(model, text, length, stride)
    for batch_size in (1, 4):
        found = evaluate_tokens(model, text, dp=DP, seq_length=length, stride=stride, batch_size=batch_size)
        assert found.tokens == num_tokens - 1
        assert found.loss * found.tokens == pytest.approx(expected, rel=1e-12)


def test_how_far_it_is_is_told_in_windows_and_by_their_tokens() -> None:
    said, times = list[str](), iter([0.0, 0.0, 6.0, 12.0, 20.0])
    progress = Progress("windows", clock=lambda: next(times), say=said.append)
    evaluate_tokens(tiny_gpt(Axis("tp")), TEXT, dp=DP, seq_length=12, stride=5, batch_size=2, progress=progress)
    assert said == [f"  {done} of 5 windows, 0:00:0{left} left" for done, left in ((2, 9), (4, 3), (5, 0))]


def test_who_asks_for_no_progress_is_told_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run evaluates while it trains, and has lines of its own."""
    monkeypatch.setattr(pace, "EVERY_SECONDS", 0.0)
    evaluate_tokens(tiny_gpt(Axis("tp")), TEXT, dp=DP)
    score(tiny_gpt(Axis("tp")), [Continuation([1], [2])], mesh=Mesh(), batch_size=1)
    assert capsys.readouterr().err == ""
    said = list[str]()
    Progress("windows", shown=False, say=said.append).advance(1, 1)
    assert said == []


def test_windows_take_all_positions_and_do_not_overlap_unless_asked() -> None:
    model = tiny_gpt(Axis("tp"))
    assert evaluate_tokens(model, TEXT, dp=DP) == evaluate_tokens(model, TEXT, dp=DP, seq_length=12, stride=12)


@pytest.mark.parametrize("too_long", ["drop", "truncate"])
def test_all_of_a_document_is_scored_whatever_training_leaves_out(too_long: TooLong) -> None:
    """Of documents of 4, 20 and 7 tokens in rows of 12: every token but the first of each."""
    model, starts = tiny_gpt(Axis("tp")), np.array([0, 4, 24])
    found, whole = (
        evaluate_tokens(model, TEXT, dp=DP, starts=starts, cut=Cut(separate=True, whole=True, too_long=which))
        for which in (too_long, "cut")
    )
    assert found.tokens == len(TEXT) - 3 and found == whole


@pytest.mark.parametrize("packing", ["best_fit", "whole"])
def test_a_stride_that_is_asked_for_is_that_of_windows_however_training_packed(packing: str) -> None:
    model, starts = tiny_gpt(Axis("tp")), np.array([0, 4, 24])
    separate, packed = Cut(separate=True), Cut(separate=True, **{packing: True})
    found, expected = (
        evaluate_tokens(model, TEXT, dp=DP, starts=starts, cut=cut, stride=5) for cut in (packed, separate)
    )
    assert found == expected and found != evaluate_tokens(model, TEXT, dp=DP, starts=starts, cut=packed)


# With 4 data-parallel ranks and 3 windows, one of them has nothing to do.
@pytest.mark.parametrize(
    "layout", [Layout(dp=2), Layout(tp=2), Layout(pp=2), Layout(dp=2, tp=2), Layout(dp=4)], ids=str
)
def test_every_layout_finds_what_one_rank_does(layout: Layout) -> None:
    lengths = torch.arange(21) % 5

    def on(mesh: Mesh) -> tuple[Any, ...]:
        units = UNITS[mesh.pp.rank] if mesh.pp.ranks[1:] else None
        model, parts = tiny_gpt(mesh.tp, units=units), batches([2, 1, 3, 2])
        axes: dict[str, Any] = {"dp": mesh.dp, "pp": mesh.pp, "hidden": stage(model, mesh, units)}
        share = evaluation_positions(4, micro_batch_size=1, dp_rank=mesh.dp.rank, dp_size=mesh.dp.size)
        mine = [parts[number[0]] for number in share]
        return (
            evaluate(model, mine, **axes, byte_lengths=lengths, words=9),
            evaluate_tokens(model, TEXT, **axes, byte_lengths=lengths, batch_size=2),
        )

    serial = on(Mesh())
    results = run_on_ranks(lambda rank, _: on(build_mesh(layout, rank)), layout.num_ranks)
    for result in results:
        assert result == results[0], "the same on every rank"
        for found, expected in zip(result, serial, strict=True):
            assert (found.tokens, found.bytes, found.words) == (expected.tokens, expected.bytes, expected.words)
            assert found.loss == pytest.approx(expected.loss, rel=1e-12)
            assert found.bits_per_byte == pytest.approx(expected.bits_per_byte, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"seq_length": 13}, ConfigError, "seq_length = 13, but the model has learned 12"),
        ({"seq_length": 0}, ConfigError, "seq_length = 0, but the model has learned 12"),
        ({"stride": 0}, ConfigError, "stride = 0"),
        ({"seq_length": 4, "stride": 5}, ConfigError, "stride = 5 does not go with seq_length = 4"),
        ({"batch_size": 0}, ConfigError, "batch_size = 0"),
        ({"tokens": TEXT[:1]}, DataError, "the text has 1 tokens"),
        ({"tokens": np.array([1, 2, 50])}, DataError, "token id 50"),
    ],
)
def test_what_is_refused(options: dict[str, Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        evaluate_tokens(tiny_gpt(Axis("tp")), **{"tokens": TEXT, "dp": DP, **options})
