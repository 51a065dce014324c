"""Data keys that do not go together: what is said, in whole sentences."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from colonnade.config.load import load, loads, to_toml
from colonnade.config.schema import Config
from colonnade.errors import ConfigError

from .conftest import SMALL

Problems = Callable[..., list[str]]
BLENDED = SMALL.replace('train = "corpus"', 'blend = {"tokens/web" = 0.7, "tokens/books" = 0.3}')


@pytest.fixture
def blended(small: Path) -> Path:
    """The small configuration, blended."""
    small.write_text(BLENDED)
    return small


def test_a_blend_is_a_table_and_comes_back(blended: Path) -> None:
    config = load(blended)
    assert config.data.blend == {"tokens/web": 0.7, "tokens/books": 0.3}
    assert list(loads(to_toml(config)).data.blend or {}) == ["tokens/web", "tokens/books"]
    assert loads(to_toml(config)) == config
    as_section = SMALL.replace('train = "corpus"', "").replace("[train]", '[data.blend]\n"a" = 1\n\n[train]')
    assert loads(as_section).data.blend == {"a": 1.0}


@pytest.mark.parametrize(
    ("length", "batch", "layout"),
    [
        (1, 24, ("parallel.tp=2",)),
        (512, 12, ("parallel.pp=2",)),
    ],
    ids=["sequences that tp does not divide", "micro-batches that pp does not divide"],
)
def test_phases_are_cut_by_what_cuts_them_alone(
    loaded: Callable[..., Config], length: int, batch: int, layout: tuple[str, ...]
) -> None:
    """Sequences under sequence parallelism, rounds of micro-batches under the interleaved schedule."""
    lists = (f"curriculum.seq_length=[{length}, 1024]", f"curriculum.global_batch_size=[{batch}, 24]")
    assert loaded("curriculum.tokens=[0, 7]", *lists, *layout).curriculum.tokens == (0, 7)


def test_a_curriculum_of_three_lists(loaded: Callable[..., Config]) -> None:
    config = loaded(
        "curriculum.tokens=[0, 1000, 9000]",
        "curriculum.seq_length=[256, 512, 1024]",
        "curriculum.global_batch_size=[8, 8, 24]",
    )
    assert config.curriculum.seq_length == (256, 512, 1024)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ('data.blend={"a" = 0, "b" = 2}',),
            "data.blend has 0 in it, where a table of numbers above 0 is expected.",
        ),
        (
            ("data.blend=0.7 a",),
            'data.blend = "0.7 a" is text, where a table of numbers above 0 is expected.',
        ),
        (
            ("data.blend_by=epochs",),
            'data.blend_by = "epochs" says what the numbers of data.blend are, but that is not set. Set data.blend, or '
            "leave blend_by out.",
        ),
        (
            ("data.packing=best_fit",),
            'data.packing = "best_fit" puts documents side by side that have nothing to do with each other, but '
            'data.documents = "joined" lets each see the one before. Set data.documents = "separate", or packing = '
            '"stream".',
        ),
        (
            ("data.packing=whole",),
            'data.packing = "whole" puts documents side by side that have nothing to do with each other, but '
            'data.documents = "joined" lets each see the one before. Set data.documents = "separate", or packing = '
            '"stream".',
        ),
        (
            ("data.too_long=drop",),
            'data.too_long = "drop" has no effect with data.packing = "stream", which cuts documents. Set data.packing '
            '= "whole", or leave too_long out.',
        ),
        (
            ("data.too_long=truncate", "data.packing=best_fit", "data.documents=separate"),
            'data.too_long = "truncate" has no effect with data.packing = "best_fit", which cuts documents. Set '
            'data.packing = "whole", or leave too_long out.',
        ),
        (
            ("model.kind=bert", "data.loss_on=answers"),
            "data.loss_on = 'answers' has no effect with model.kind = \"bert\", whose samples are two texts of one "
            "document. Leave it out; [data.masking] says how they are made.",
        ),
        (
            ("curriculum.tokens=[0, 5]", "curriculum.seq_length=[1024]", "curriculum.global_batch_size=[24]"),
            "curriculum.tokens has 2 places, curriculum.seq_length 1 and curriculum.global_batch_size 1: each phase "
            "needs one in all three lists.",
        ),
        (
            ("curriculum.tokens=[9]", "curriculum.seq_length=[1024]", "curriculum.global_batch_size=[24]"),
            "curriculum.tokens begins with 9: the first phase begins at 0. Put a 0 there.",
        ),
        (
            ("curriculum.tokens=[0,7,7]", "curriculum.seq_length=[4,8,1024]", "curriculum.global_batch_size=[4,8,24]"),
            "curriculum.tokens goes from 7 to 7: each phase begins after the one before.",
        ),
        (
            ("curriculum.tokens=[0, 7]", "curriculum.seq_length=[100, 1024]", "curriculum.global_batch_size=[4, 24]"),
            "curriculum.seq_length has 100, which does not divide model.seq_length = 1024: samples are cut in equal "
            "pieces. Use divisors.",
        ),
        (
            ("curriculum.tokens=[0, 7]", "curriculum.seq_length=[1024, 512]", "curriculum.global_batch_size=[4, 24]"),
            "curriculum.seq_length ends with 512, but model.seq_length = 1024: the last phase is the whole length. End "
            "with 1024.",
        ),
        (
            ("curriculum.tokens=[0, 7]", "curriculum.seq_length=[512, 1024]", "curriculum.global_batch_size=[24, 12]"),
            "curriculum.global_batch_size ends with 12, but train.global_batch_size = 24: the last phase is the whole "
            "batch. End with 24.",
        ),
        (
            ("curriculum.tokens=[0, 7]", "curriculum.seq_length=[512, 1024]", "curriculum.global_batch_size=[6, 24]"),
            "curriculum.global_batch_size has 6, which is not divisible by train.micro_batch_size × parallel.dp = 4 × "
            "1 = 4: each data-parallel rank computes whole micro-batches. Use multiples of 4.",
        ),
        (
            (
                "curriculum.tokens=[0, 7]",
                "curriculum.seq_length=[512, 1024]",
                "curriculum.global_batch_size=[4, 24]",
                "parallel.dp=2",
            ),
            "curriculum.global_batch_size has 4, which is not divisible by train.micro_batch_size × parallel.dp = 4 × "
            "2 = 8: each data-parallel rank computes whole micro-batches. Use multiples of 8.",
        ),
        (
            (
                "curriculum.tokens=[0, 7]",
                "curriculum.seq_length=[1, 1024]",
                "curriculum.global_batch_size=[4, 24]",
                "parallel.sequence_parallel=true",
                "parallel.tp=2",
            ),
            "curriculum.seq_length has 1, which parallel.tp = 2 does not divide: parallel.sequence_parallel cuts the "
            "sequence in equal parts. Use multiples of 2, or sequence_parallel = false.",
        ),
        (
            (
                "curriculum.tokens=[0, 7]",
                "curriculum.seq_length=[512, 1024]",
                "curriculum.global_batch_size=[12, 24]",
                "parallel.schedule=interleaved",
                "parallel.virtual_stages=2",
                "parallel.pp=2",
                "model.num_layers=6",
            ),
            "curriculum.global_batch_size has 12, which makes 3 micro-batches, and parallel.pp = 2 does not divide "
            "them: the interleaved schedule hands them round in groups of pp. Use multiples of 8.",
        ),
        (
            (
                "curriculum.tokens=[0, 7]",
                "curriculum.seq_length=[512, 1024]",
                "curriculum.global_batch_size=[24, 48]",
                "parallel.schedule=interleaved",
                "parallel.virtual_stages=2",
                "parallel.pp=2",
                "parallel.dp=2",
                "model.num_layers=6",
                "train.global_batch_size=48",
            ),
            "curriculum.global_batch_size has 24, which makes 3 micro-batches, and parallel.pp = 2 does not divide "
            "them: the interleaved schedule hands them round in groups of pp. Use multiples of 16.",
        ),
    ],
)  # fmt: skip
def test_one_problem_in_words(problems: Problems, overrides: tuple[str, ...], message: str) -> None:
    assert problems(*overrides) == [message]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("data.train=corpus",),
            "data.train = 'corpus' and data.blend are both set: data.blend stands in place of data.train. Put that "
            "file into data.blend with a number, or leave one of the two out.",
        ),
        (
            ("data.blend={}",),
            "data.blend names no token file: there is nothing to train on. Give it at least one, with a number.",
        ),
        (
            ('data.blend={"https://h/a?key=1" = 1, "https://h/a?key=2" = 3}',),
            "data.blend has 2 files that are 'https://h/a?key=…' once credentials are hidden, as they are in all that "
            "a run stores: it could not tell them apart. Give them names that differ in something else.",
        ),
        (
            ("data.blend_by=temperature",),
            'data.blend_by = "temperature" needs data.temperature. Set it to 1 or more; 3 is common for languages.',
        ),
        (
            ("data.temperature=3.0",),
            'data.temperature = 3.0 has no effect with data.blend_by = "samples". Leave it out, or use blend_by = '
            '"temperature".',
        ),
        (
            ("data.epochs=2",),
            "data.epochs = 2 is for data.train alone; the files of a blend have epochs of their own. Leave it out, and "
            'use data.blend_by = "epochs" to say how often each file is read.',
        ),
        (
            ("data.order=all_epochs",),
            'data.order = "all_epochs" shuffles all epochs of a file as one and has to know how many there are. Use '
            'data.blend_by = "epochs", or data.order = "epoch".',
        ),
        (
            ("data.order=all_epochs", "data.blend_by=epochs", 'data.blend={"a" = 1.5}'),
            'data.blend has 1.5 epochs of a file: with data.order = "all_epochs" they are whole. Use whole numbers, or '
            'data.order = "epoch".',
        ),
    ],
)  # fmt: skip
def test_one_problem_of_a_blend(blended: Path, problems: Problems, overrides: tuple[str, ...], message: str) -> None:
    assert problems(*overrides) == [message]


@pytest.mark.parametrize("blend_by", ["samples", "tokens", "epochs", "temperature"])
@pytest.mark.parametrize("order", ["epoch", "all_epochs"])
def test_which_keys_of_a_blend_go_together(blended: Path, blend_by: str, order: str) -> None:
    """Every combination, with a temperature or without, with epochs of its own or without, of whole numbers or not."""
    for temperature, epochs, share in itertools.product((None, 3.0), (None, 2), ("1", "1.5")):
        given = {"data.temperature": temperature, "data.epochs": epochs}
        keys = [f"{key}={value}" for key, value in given.items() if value is not None]
        keys += [f"data.blend_by={blend_by}", f"data.order={order}", f'data.blend={{"a" = 2, "b" = {share}}}']
        fits = (temperature is not None) == (blend_by == "temperature") and epochs is None
        fits = fits and (order == "epoch" or (blend_by == "epochs" and share == "1"))
        try:
            load(blended, keys)
        except ConfigError as error:
            assert not fits, error
        else:
            assert fits, keys
