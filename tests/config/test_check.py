from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from colonnade.config.check import BEGINNING, CHECKS
from colonnade.config.describe import all_keys
from colonnade.config.load import loads
from colonnade.config.numbers import counted, divisors, multiples_around, nearest_divisors, one_of, size_of_text
from colonnade.config.schema import Config
from colonnade.errors import ConfigError

from .conftest import SMALL

Problems = Callable[..., list[str]]
BLENDED = SMALL.replace('train = "corpus"', 'blend = {"tokens/web" = 0.7, "tokens/books" = 0.3}')


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("model.num_heads=16", "model.ffn_hidden_size=48", "parallel.tp=3"),
            "parallel.tp = 3 does not divide model.num_heads = 16: each tensor-parallel rank needs whole heads. "
            "Use 1, 2, 4, 8 or 16.",
        ),
        (
            ("model.ffn_hidden_size=30", "parallel.tp=4"),
            "parallel.tp = 4 does not divide model.ffn_hidden_size = 30: each tensor-parallel rank needs the same "
            "number of the MLP's columns. Use 1 or 2.",
        ),
        (
            ("model.num_heads=5",),
            "model.num_heads = 5 does not divide model.hidden_size = 64: all heads have the same width. "
            "Use a hidden_size of 60 or 65, or a num_heads of 4 or 8.",
        ),
        (
            ("model.seq_length=65537", "model.attention_dropout=0.1"),
            "model.attention_dropout = 0.1 draws a mask of seq_length² = 65,537² elements for each head: a stream of "
            "random numbers has 2^32, enough for 65,536 positions. Set attention_dropout = 0, or use a seq_length of "
            "at most 65,536.",
        ),
        (
            ("model.seq_length=67108865", "model.dropout=0.1"),
            "model.dropout = 0.1 draws a mask of seq_length × hidden_size = 67,108,865 × 64 elements for each sample: "
            "a stream of random numbers has 2^32. Set dropout = 0, or use a seq_length of at most 67,108,864.",
        ),
        (
            ("parallel.dp=4",),
            "train.global_batch_size = 24 is not divisible by train.micro_batch_size × parallel.dp = 4 × 4 = 16: each "
            "data-parallel rank computes whole micro-batches. Use a micro_batch_size of 3 or 6, or a dp of 3 or 6, "
            "which keeps the batch. Use a global_batch_size of 16 or 32 only in a new run: it changes what is "
            "computed.",
        ),
        (
            ("parallel.dp=8",),
            "train.global_batch_size = 24 is not divisible by train.micro_batch_size × parallel.dp = 4 × 8 = 32: each "
            "data-parallel rank computes whole micro-batches. Use a micro_batch_size of 3, or a dp of 6, which keeps "
            "the batch. Use a global_batch_size of 32 only in a new run: it changes what is computed.",
        ),
        (
            ("train.global_batch_size=22", "parallel.dp=3"),
            "train.global_batch_size = 22 is not divisible by train.micro_batch_size × parallel.dp = 4 × 3 = 12: each "
            "data-parallel rank computes whole micro-batches. Use a global_batch_size of 12 or 24 only in a new run: "
            "it changes what is computed.",
        ),
        (
            ("parallel.pp=5",),
            "parallel.pp = 5 stages, but 2 blocks, the embedding and the head are 4 units: each stage needs one. Use "
            "at most 4, or more layers.",
        ),
        (
            ("parallel.pp=2", "parallel.virtual_stages=3", "parallel.schedule=interleaved"),
            "parallel.pp × parallel.virtual_stages = 2 × 3 = 6 chunks, but 2 blocks, the embedding and the head are 4 "
            "units: each chunk needs one. Use virtual_stages = 2 or fewer stages.",
        ),
        (
            ("parallel.pp=3", "parallel.virtual_stages=2", "parallel.schedule=interleaved"),
            "parallel.pp × parallel.virtual_stages = 3 × 2 = 6 chunks, but 2 blocks, the embedding and the head are 4 "
            'units: each chunk needs one. Use virtual_stages = 1 with schedule = "1f1b", or fewer stages.',
        ),
        (
            ("parallel.pp=6", "parallel.virtual_stages=2", "parallel.schedule=interleaved"),
            "parallel.pp × parallel.virtual_stages = 6 × 2 = 12 chunks, but 2 blocks, the embedding and the head are 4 "
            "units: each chunk needs one. Use fewer stages, or more layers.",
        ),
        (
            ("parallel.pp=2", "parallel.cuts=[1, 1, 2]"),
            "parallel.cuts has 3 numbers, but parallel.pp × parallel.virtual_stages = 2 × 1 = 2: a number for each "
            "chunk. Give 2 numbers, 4 in all.",
        ),
        (
            ("parallel.pp=2", "parallel.cuts=[1, 2]"),
            "parallel.cuts = [1, 2] sums to 3, but the model has 4 units: 2 blocks, the embedding and the head. Give 2 "
            "numbers, 4 in all.",
        ),
        (
            ("parallel.pp=2", "parallel.virtual_stages=2"),
            'parallel.virtual_stages = 2 does not go with parallel.schedule = "1f1b", which runs one chunk a stage. '
            'Use schedule = "interleaved", or virtual_stages = 1.',
        ),
        (
            ("parallel.pp=2", "parallel.schedule=interleaved"),
            'parallel.schedule = "interleaved" with parallel.virtual_stages = 1 has nothing to interleave. Use '
            'virtual_stages = 2 or more, or schedule = "1f1b".',
        ),
        (
            (
                "parallel.pp=2",
                "parallel.virtual_stages=2",
                "parallel.schedule=interleaved",
                "train.global_batch_size=20",
            ),
            "a step has 5 micro-batches (train.global_batch_size ÷ train.micro_batch_size ÷ parallel.dp = 20 ÷ 4 ÷ 1), "
            "which parallel.pp = 2 does not divide: the interleaved schedule hands them round in groups of pp. Use a "
            'micro_batch_size of 2 or 5, or schedule = "1f1b" with virtual_stages = 1; or, in a new run, a '
            "global_batch_size of 16 or 24.",
        ),
        (
            (
                "parallel.pp=2",
                "parallel.dp=3",
                "parallel.virtual_stages=2",
                "parallel.schedule=interleaved",
                "train.global_batch_size=36",
            ),
            "a step has 3 micro-batches (train.global_batch_size ÷ train.micro_batch_size ÷ parallel.dp = 36 ÷ 4 ÷ 3), "
            "which parallel.pp = 2 does not divide: the interleaved schedule hands them round in groups of pp. Use a "
            'micro_batch_size of 3 or 6, or schedule = "1f1b" with virtual_stages = 1; or, in a new run, a '
            "global_batch_size of 24 or 48.",
        ),
        (
            (
                "parallel.pp=2",
                "parallel.dp=3",
                "parallel.virtual_stages=2",
                "parallel.schedule=interleaved",
                "train.global_batch_size=60",
            ),
            "a step has 5 micro-batches (train.global_batch_size ÷ train.micro_batch_size ÷ parallel.dp = 60 ÷ 4 ÷ 3), "
            "which parallel.pp = 2 does not divide: the interleaved schedule hands them round in groups of pp. Use a "
            'micro_batch_size of 2 or 5, or schedule = "1f1b" with virtual_stages = 1; or, in a new run, a '
            "global_batch_size of 48 or 72.",
        ),
        (
            (
                "model.num_layers=6",
                "parallel.pp=3",
                "parallel.virtual_stages=2",
                "parallel.schedule=interleaved",
                "train.global_batch_size=32",
            ),
            "a step has 8 micro-batches (train.global_batch_size ÷ train.micro_batch_size ÷ parallel.dp = 32 ÷ 4 ÷ 1), "
            "which parallel.pp = 3 does not divide: the interleaved schedule hands them round in groups of pp. Use pp "
            '= 2 or 4, or schedule = "1f1b" with virtual_stages = 1; or, in a new run, a global_batch_size of 24 or '
            "36.",
        ),
        (
            ("parallel.tp=2", "parallel.sequence_parallel=true", "model.seq_length=63"),
            "parallel.sequence_parallel cuts the sequence in parallel.tp = 2 equal parts, and model.seq_length = 63 is "
            "not divisible by it. Use a seq_length of 62 or 64, or sequence_parallel = false.",
        ),
        (
            ("parallel.offload=true",),
            'parallel.offload keeps master weights in CPU memory, but under train.precision = "fp32" there is no '
            'master copy: the optimizer updates the parameters themselves. Use precision = "bf16", or offload = false.',
        ),
        (
            ("train.reduce_precision=16-bit", "train.precision=fp64"),
            'train.reduce_precision = "16-bit" rounds gradients to the compute format, which under train.precision = '
            '"fp64" is none of 16 bits. Use precision = "bf16", or reduce_precision = "fp32".',
        ),
        (
            ("train.reduce_precision=16-bit",),
            'train.reduce_precision = "16-bit" rounds gradients to the compute format, which under train.precision = '
            '"fp32" is none of 16 bits. Use precision = "bf16", or reduce_precision = "fp32".',
        ),
        (
            ("parallel.recompute_every=2",),
            'parallel.recompute_every = 2 has no effect with parallel.recompute = "none". Use recompute = "full", or '
            "leave recompute_every out.",
        ),
        (
            ("parallel.recompute_every=2", "parallel.recompute=selective"),
            'parallel.recompute_every = 2 has no effect with parallel.recompute = "selective". Use recompute = "full", '
            "or leave recompute_every out.",
        ),
        (
            ("train.loss_scale=0.5",),
            "train.loss_scale = 0.5 is below train.min_loss_scale = 1: the first overflow would end the run. Use a "
            "loss_scale of 1 or more.",
        ),
        (
            ("checkpoint.keep=0",),
            "checkpoint.keep = 0 is out of range, where a whole number of at least 1 is expected.",
        ),
        (
            ("parallel.zero=4",),
            "parallel.zero = 4 is not one of the choices. Use 0, 1, 2 or 3.",
        ),
        (
            ("optim.min_learning_rate=0.0011",),
            "optim.min_learning_rate = 0.0011 is above optim.learning_rate = 0.001: the decay goes down. "
            "Use at most 0.001.",
        ),
        (
            ("optim.warmup_steps=51", "optim.decay_steps=50"),
            "optim.warmup_steps = 51 is more than optim.decay_steps = 50, where the decay ends: the learning rate "
            "would never get to its highest value. Use at most 50.",
        ),
        (
            ("optim.warmup_steps=10", "optim.warmup_tokens=5000"),
            "optim.warmup_steps = 10 and optim.warmup_tokens = 5000 say the same in two units. Leave one of them out.",
        ),
        (
            ("optim.decay_start=10", "optim.decay_start_tokens=5000"),
            "optim.decay_start = 10 and optim.decay_start_tokens = 5000 say the same in two units. Leave one of them "
            "out.",
        ),
        (
            ("optim.decay_steps=90", "optim.decay_tokens=5000"),
            "optim.decay_steps = 90 and optim.decay_tokens = 5000 say the same in two units. Leave one of them out.",
        ),
        (
            ("data.order=all_epochs",),
            'data.order = "all_epochs" shuffles the samples of all epochs as one, but data.epochs is not set. '
            'Set data.epochs, or use data.order = "epoch".',
        ),
        (
            ("data.epochs=2",),
            'data.epochs = 2 has no effect with data.order = "epoch": there train.steps alone ends the run. '
            'Leave it out, or use data.order = "all_epochs".',
        ),
        (
            ("data.split=1",),
            "data.split = 1 is a number, where text in quotes is expected. Write the shares of train and validation, "
            'like data.split = "9:1".',
        ),
        (
            ("data.split=0:1",),
            'data.split = "0:1" is not a list of shares: two or three numbers with colons between, none negative and '
            'the first above 0, for train:validation:test. Use for instance "9:1".',
        ),
        (
            ("data.split=1:0", "train.evaluate_every=5"),
            "train.evaluate_every = 5 asks for evaluations, but data.validation is not set and data.split = "
            '"1:0" leaves no validation part. Set data.validation, use a split like "29:1:0", or evaluate_every = 0.',
        ),
    ],
)
def test_values_that_do_not_go_together(problems: Problems, overrides: tuple[str, ...], message: str) -> None:
    assert problems(*overrides) == [message]


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.tp=4", "parallel.dp=3"),
        ("optim.warmup_steps=100",),
        ("optim.warmup_steps=101",),
        ("optim.warmup_steps=100", "train.steps=6"),
        ("optim.warmup_steps=50", "optim.decay_steps=50"),
        ("optim.min_learning_rate=0.001",),
        ("model.seq_length=65536", "model.attention_dropout=0.1"),
        ("model.seq_length=65537", "model.attention_dropout=0.0"),
        ("model.seq_length=67108864", "model.dropout=0.1"),
        ("model.seq_length=67108865", "model.dropout=0.0"),
        ("model.seq_length=65536", "model.hidden_size=65600", "model.attention_dropout=0.1", "model.dropout=0.0"),
        ("train.loss_scale=8.0", "train.min_loss_scale=8.0"),
        ("parallel.pp=4",),
        ("parallel.pp=2", "parallel.virtual_stages=2", "parallel.schedule=interleaved"),
        ("parallel.pp=2", "parallel.cuts=[1, 3]"),
        ("parallel.recompute_every=2", "parallel.recompute=full"),
        ("parallel.tp=2", "parallel.sequence_parallel=true"),
        ("parallel.tp=2", "model.seq_length=63"),
        ("parallel.offload=true", "train.precision=bf16"),
        ("parallel.offload=true", "train.precision=fp16"),
        ("train.reduce_precision=16-bit", "train.precision=fp16"),
        ("data.split=1:0", "train.evaluate_every=0"),
        ("data.split=1:0",),
        ("data.order=all_epochs", "data.epochs=2"),
        ("data.split=1:0", "train.evaluate_every=5", "data.validation=v"),
    ],
)
def test_values_that_do(loaded: Callable[..., Config], overrides: tuple[str, ...]) -> None:
    assert loaded(*overrides)


def test_what_a_run_cannot_do_without() -> None:
    train = "[train]\nsteps = 1\nglobal_batch_size = 1\nmicro_batch_size = 1\n"
    text = train + '[optim]\nlearning_rate = 1.0\n[run]\nfolder = "x"'
    with pytest.raises(ConfigError, match=r"data\.train is not set"):
        loads(text)


def test_a_check_is_left_out_where_its_keys_already_have_a_problem(problems: Problems) -> None:
    assert len(problems("parallel.tp=3", "model.num_heads=four")) == 2  # the text, and tp against the ffn
    assert len(problems("parallel.tp=three")) == 1
    assert len(problems("model.hidden_sise=100", "model.num_heads=10")) == 1
    assert len(problems("model.preset=gpt2-125m", "parallel.tp=3")) == 1, "whatever it was meant to be is not known"


def test_checks_name_keys_that_exist() -> None:
    assert {key for each in CHECKS for key in each.keys} <= set(all_keys())


def noted(section: BaseModel, reads: set[str], prefix: str = "") -> Any:
    """The same, that adds to `reads` the keys which are asked for."""
    kind = type(section)

    class Noted(kind):  # type: ignore[valid-type, misc]
        def __getattribute__(self, name: str) -> Any:
            if name in kind.model_fields:
                reads.add(prefix + name)
            return super().__getattribute__(name)

    values = {
        name: noted(value, reads, f"{prefix}{name}.") if isinstance(value, BaseModel) else value
        for name, value in section
    }
    return Noted.model_construct(**values)


@pytest.mark.parametrize("text", [SMALL, BLENDED], ids=["one file", "a blend"])
def test_checks_name_all_keys_that_they_read(text: str) -> None:
    """Or one is asked of a key that has a problem of its own, and answers for its default. Here nothing is wrong: what
    is read only to say what would fit need not be named."""
    reads = set[str]()
    config = noted(loads(text), reads)
    for each in (*CHECKS, *BEGINNING):
        reads.clear()
        list(each.messages(config))
        assert reads & set(all_keys()) <= set(each.keys), each.messages


@given(st.integers(1, 10_000))
def test_divisors(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_nearest(number: int, wanted: int) -> None:
    near = nearest_divisors(number, wanted)
    assert near and all(number % d == 0 for d in near)
    below, above = multiples_around(number, wanted)
    assert below % wanted == above % wanted == 0
    assert below <= number < above == below + wanted


def test_lists_in_words() -> None:
    assert [one_of([1]), one_of([1, 2]), one_of([1, 2, 4])] == ["1", "1 or 2", "1, 2 or 4"]


def test_counts_and_sizes_in_words() -> None:
    assert [counted(n, "document") for n in (0, 1, 1234)] == ["0 documents", "1 document", "1,234 documents"]
    sizes = (1, 20, 1_000, 99_949, 100_000, 1_234_500_000)
    assert [size_of_text(n) for n in sizes] == ["1 byte", "20 bytes", "1.0 kB", "99.9 kB", "0.1 MB", "1,234.5 MB"]
