"""What goes with model.kind = "t5", and what with nothing else."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.config.check import check
from colonnade.config.corruption import Lengths
from colonnade.config.model import ModelConfig
from colonnade.config.schema import Config

BASE: dict[str, Any] = {
    "model": {"kind": "t5", "num_layers": 2, "hidden_size": 16, "num_heads": 2, "seq_length": 64},
    "data": {"train": "x"},
    "train": {"steps": 1, "global_batch_size": 4, "micro_batch_size": 1},
    "optim": {"learning_rate": 1e-3},
    "run": {"folder": "x"},
}


def problems(overrides: dict[str, Any] | None = None, **model: Any) -> list[str]:
    """What is wrong with `BASE`, given keys by their full names, and others of [model]."""
    content: dict[str, Any] = copy.deepcopy(BASE)
    content["model"] |= model
    for name, value in (overrides or {}).items():
        *sections, key = name.split(".")
        place = content
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return [each.message for each in check(Config.model_validate(content))]


def test_unset_keys_are_t5s() -> None:
    model = ModelConfig(kind="t5", norm_epsilon=1e-5)
    found = (model.position, model.norm, model.bias, model.activation, model.norm_epsilon, model.init_std)
    assert found == ("relative", "rmsnorm", False, "relu", 1e-5, 1.0)
    assert problems() == [] and ModelConfig().decoder_layers == 0


def test_options_that_t5_has_not_are_named_at_once() -> None:
    (line,) = problems(position="rotary", window=8, bias=True, norm="layernorm", num_key_value_heads=1)
    for part in ('model.position = "rotary"', "model.window = 8", "model.bias = true", 'model.norm = "layernorm"'):
        assert part in line
    assert (
        "model.num_key_value_heads = 1" in line
        and 'has no such option. Leave them out, or write position = "rel' in line
    )
    (alibi,) = problems(position="alibi")
    assert alibi.endswith('Leave it out, or write position = "relative".')
    assert problems(num_key_value_heads=2) == [], "as many as queries have"


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("embedding_norm", True, "embedding_norm = false"),
        ("query_key_norm", True, "query_key_norm = false"),
        ("norm_position", "post", 'norm_position = "pre"'),
        ("activation", "gelu", 'activation = "relu" or "geglu_tanh"'),
    ],
)
def test_each_option_that_t5_has_not_is_refused_with_what_it_has(key: str, value: object, remedy: str) -> None:
    """It would be read by nothing, and the model be another than was asked for."""
    (line,) = problems(**{key: value})
    assert line.startswith(f"model.{key} = ") and line.endswith(f"Leave it out, or write {remedy}.")
    assert problems(activation="geglu_tanh") == []


@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_options_of_t5_are_refused_by_others(kind: str) -> None:
    said = "\n".join(
        problems(kind=kind, num_decoder_layers=2, position="relative", relative_buckets=8, decoder_seq_length=8)
    )
    for key in ("num_decoder_layers = 2", "relative_buckets = 8", "decoder_seq_length = 8"):
        assert f'model.{key} has no effect with model.kind = "{kind}": it is for t5. Leave it out.' in said
    assert f'model.position = "relative" does not go with model.kind = "{kind}": it is for t5.' in said


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        ({"data.documents": "separate"}, "data.documents = 'separate' has no effect with model.kind = \"t5\""),
        ({"data.masking.share": 0.2}, '[data.masking] has no effect with model.kind = "t5", whose samples are texts'),
        ({"model.relative_buckets": 9}, "model.relative_buckets = 9 is odd"),
        ({"model.relative_buckets": 9}, "what is behind it. Use 8 or 10."),
        ({"model.relative_distance": 16}, "model.relative_distance = 16 is not beyond 16"),
        ({"model.seq_length": 2}, "model.seq_length = 2 is too short for T5 samples. Set it to 3 or more."),
        (
            {"model.decoder_seq_length": 2},
            "model.decoder_seq_length = 2 is too short for T5 samples. Set it to 3 or more.",
        ),
        ({"data.corruption.share": 0.5}, "[data.corruption] makes decoder sequences of 65 tokens beside"),
        ({"data.corruption.mean_length": 1}, "Set model.decoder_seq_length = 19."),
        ({"parallel.pp": 8}, "parallel.pp = 8 stages, but 2 and 2 blocks, two embeddings and the head are 7 units"),
        (
            {"parallel.tp": 2, "parallel.sequence_parallel": True, "model.decoder_seq_length": 15},
            "model.decoder_seq_length = 15 is not divisible by it. Use a decoder_seq_length of 14 or 16",
        ),
        (
            {"parallel.tp": 2, "parallel.sequence_parallel": True, "model.seq_length": 72},
            "model.decoder_seq_length = 17 is not divisible by it. Use a decoder_seq_length of 16 or 18",
        ),
    ],
)
def test_what_does_not_go_together(overrides: dict[str, Any], part: str) -> None:
    said = "\n".join(problems(overrides))
    assert part in said, said


@pytest.mark.parametrize(
    "model", [{"relative_distance": 17}, {"seq_length": 3}, {"seq_length": 3, "decoder_seq_length": 3}]
)
def test_the_smallest_of_which_t5_can_be_made(model: dict[str, int]) -> None:
    assert problems(**model) == []


def test_spans_that_leave_the_decoder_as_long_as_it_is_need_no_length() -> None:
    assert problems({"model.seq_length": 16, "data.corruption.mean_length": 5}) == []
    assert problems({"model.seq_length": 72, "data.corruption.mean_length": 5}) != []


def test_masks_of_the_longer_stack_fit_a_stream() -> None:
    (line,) = problems(decoder_seq_length=65537, attention_dropout=0.1)
    assert "draws a mask of decoder_seq_length² = 65,537² elements for each head" in line
    assert line.endswith("Set attention_dropout = 0, or use a decoder_seq_length of at most 65,536.")
    (line,) = problems(decoder_seq_length=(1 << 28) + 1, dropout=0.1)
    assert "decoder_seq_length × hidden_size = 268,435,457 × 16" in line and "of at most 268,435,456." in line
    assert problems(decoder_seq_length=65536, attention_dropout=0.1, dropout=0.1) == []


def test_corruption_is_for_t5_alone() -> None:
    (line,) = problems({"data.corruption.share": 0.2}, kind="gpt")
    assert line == (
        '[data.corruption] has no effect with model.kind = "gpt", which reads text as it is. Leave it out, or set '
        'model.kind = "t5".'
    )


def test_lengths_are_the_papers() -> None:
    """Inputs of 512 tokens are made of 568, beside targets of 114 (their `random_spans_helper`)."""
    assert Lengths().text(512) == 568 and Lengths().widths(568) == (512, 114)
    assert ModelConfig(preset="t5-small").decoder_length == 114


@given(st.integers(3, 400), st.none() | st.integers(3, 100), st.floats(0.01, 0.9), st.integers(1, 10))
def test_the_longest_text_fits_and_none_is_longer(encoder: int, decoder: int | None, share: float, mean: int) -> None:
    lengths = Lengths(share, mean)

    def fits(text: int) -> bool:
        widths = lengths.widths(text)
        return widths[0] <= encoder and (decoder is None or widths[1] <= decoder)

    text = lengths.text(encoder, decoder)
    assert text >= 2 and fits(text) and not any(map(fits, range(text + 1, text + 50)))
