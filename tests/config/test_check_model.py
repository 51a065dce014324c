"""Options of [model] that do not go together: one message each, all at once."""

from typing import Any

import pytest

from colonnade.config.load import apply_, build, loads, parse, to_toml
from colonnade.config.model import ModelConfig, RotaryConfig
from colonnade.errors import ConfigError

BASE = """
[model]
hidden_size = 48
num_heads = 6
{model}
[data]
train = "t"
[train]
steps = 100
global_batch_size = 8
micro_batch_size = 1
[optim]
learning_rate = 1e-3
[run]
folder = "r"
[parallel]
{parallel}
"""
YARN = 'position = "rotary"\nrotary.scaling = "yarn"\nrotary.factor = 4.0\nrotary.original_length = 4096'


def problems(model: str, parallel: str = "") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loads(BASE.format(model=model, parallel=parallel))
    return str(caught.value).split("\n  - ")[1:]


def test_the_share_of_a_head_that_is_turned_is_no_feature_short() -> None:
    """As products of floating point are: 100 × 0.58 is 57.99999999999999. What is left over is rounded down."""

    def width(head_dim: int, share: float) -> int:
        return ModelConfig(head_dim=head_dim, rotary=RotaryConfig(share=share)).rotary_width

    assert width(100, 0.58) == 58 and width(64, 0.4) == 25
    assert all(width(head_dim, n / head_dim) == n for head_dim in range(1, 257) for n in range(1, head_dim + 1))
    assert [width(96, 0.25), width(80, 0.4), width(64, 0.5), width(128, 1.0)] == [24, 32, 32, 128], "as published"


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"hidden_size": 2}, r"1 problem\n  - model\.num_heads = 6 does not divide model\.hidden_size = 2"),
        ({"head_dim": 1}, r'1 problem\n  - model\.position = "rotary" turns pairs of features, and heads are 1 wide'),
    ],
)
def test_of_heads_that_have_no_pair_of_features_no_share_is_proposed(shape: dict[str, int], words: str) -> None:
    content: Any = parse(BASE.format(model='position = "rotary"\nrotary.share = 0.4', parallel=""), "the file")
    content["model"] |= shape
    with pytest.raises(ConfigError, match=words):
        build(content, [], source="the file")


@pytest.mark.parametrize(
    ("model", "parallel", "words"),
    [
        ("num_key_value_heads = 4", "", "num_key_value_heads = 4 does not divide model.num_heads = 6"),
        ("num_key_value_heads = 2", "tp = 3", "goes neither with nor into model.num_key_value_heads = 2"),
        ("num_key_value_heads = 2", "tp = 3", "or one of which others have copies. Use 1, 2 or 6."),
        ("num_key_value_heads = 2", "tp = 4", "each tensor-parallel rank needs whole heads. Use 1, 2 or 6."),
        ('position = "rotary"\nhead_dim = 7', "", "heads are 7 wide. Use an even head_dim"),
        ('position = "rotary"\nrotary.share = 0.4', "", "share = 0.4 of heads that are 8 wide is 3 features"),
        ('position = "rotary"\nrotary.share = 0.4', "", "Use a share that gives an even number, like 0.25"),
        ('position = "rotary"\nrotary.share = 0.1', "", "Use a share that gives an even number, like 0.25"),
        ("rotary.share = 0.5", "", 'model.rotary.share has no effect with model.position = "learned"'),
        (
            'parallel_residual = true\nnorm_position = "post"',
            "",
            'parallel_residual = true does not go with model.norm_position = "post"',
        ),
        ("rotary.base = 500000.0", "", 'model.rotary.base has no effect with model.position = "learned"'),
        ('position = "rotary"\nrotary.factor = 4.0', "", 'factor = 4 has no effect with model.rotary.scaling = "none"'),
        ('position = "rotary"\nrotary.scaling = "yarn"', "", "needs model.rotary.original_length"),
        ('position = "rotary"\nrotary.scaling = "llama3"', "", "needs model.rotary.original_length"),
        (
            'position = "rotary"\nrotary.scaling = "llama3"\nrotary.original_length = 8192\n'
            "rotary.low_frequency_factor = 4.0",
            "",
            "low_frequency_factor = 4 is not below high_frequency_factor = 4",
        ),
        *(
            (f"{YARN}\nrotary.base = {base}", "", f"model.rotary.base = {base:g} does not go with model.rotary.scaling")
            for base in (1.0, 0.5)
        ),
        (
            f"{YARN}\nrotary.beta_fast = 1.0\nrotary.beta_slow = 32.0",
            "",
            "beta_fast = 1 is below beta_slow = 32: angles between them are blended. YaRN has 32 and 1.",
        ),
        ('kind = "bert"\nwindow = 4', "", 'window = 4 does not go with model.kind = "bert"'),
        ('kind = "bert"\nposition = "alibi"', "", 'position = "alibi"'),
        ('kind = "bert"\nhead = "choice"\nnum_labels = 1', "", 'num_labels is 1, and model.head = "choice" needs 2'),
        ('kind = "bert"\nhead = "classification"', "", 'is unset, and model.head = "classification" needs 1 or more'),
        ('kind = "bert"\nnum_labels = 1', "", 'num_labels = 1 has no effect with model.head = "pretraining"'),
        *(
            (f'head = "{head}"', "", f'head = "{head}" is for model.kind = "bert"')
            for head in ("spans", "choice", "none")
        ),
        ("rotary.bas = 1.0", "", "model.rotary.bas is not a key: did you mean model.rotary.base?"),
        ("rotary = 3", "", "rotary = 3 gives a value to a section. Write [model.rotary]"),
    ],
)
def test_one_message(model: str, parallel: str, words: str) -> None:
    (found,) = problems(model, parallel)
    assert words in found


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        ('kind = "bert"\nposition = "rotary"', ""),
        ('kind = "bert"\ntoken_types = 3', ""),
        ("window = 4", ""),
        ('position = "alibi"\nwindow = 4', ""),
        ('position = "rotary"\nhead_dim = 6\nrotary.base = 500000.0', ""),
        ('position = "learned"\nhead_dim = 7', ""),
        ('position = "rotary"\nrotary.scaling = "linear"\nrotary.factor = 4.0', ""),
        (YARN, ""),
        (f"{YARN}\nrotary.beta_fast = 4.0\nrotary.beta_slow = 4.0", ""),
        ('position = "rotary"\nrotary.scaling = "linear"\nrotary.factor = 4.0\nrotary.base = 1.0', ""),
        ('position = "rotary"\nrotary.share = 0.25\nparallel_residual = true', "tp = 2"),
        ("bias = false\nquery_key_value_bias = true", "tp = 2"),
        ("num_key_value_heads = 3", "tp = 3"),
        ('kind = "bert"\nhead = "classification"\nnum_labels = 1', ""),
        ('kind = "bert"\nhead = "choice"\nnum_labels = 2', ""),
        ("num_key_value_heads = 2", "tp = 6"),
        ("num_key_value_heads = 6", "tp = 2"),
    ],
)
def test_what_goes_together(model: str, parallel: str) -> None:
    assert loads(BASE.format(model=model, parallel=parallel))


def test_heads_whose_width_is_given_need_not_divide_the_hidden_size() -> None:
    text = BASE.replace("hidden_size = 48", "hidden_size = 50")
    assert loads(text.format(model="head_dim = 8", parallel=""))
    with pytest.raises(ConfigError, match="num_heads = 6 does not divide"):
        loads(text.format(model="", parallel=""))


TUNED = 'head = "preferences"'
LEARNS = ("train.init_from=w",)
ASKED = "data.questions=dev.json"


@pytest.mark.parametrize(
    ("model", "overrides", "message"),
    [
        (
            TUNED,
            (),
            'train.init_from is unset, and model.head = "preferences" holds the model to the weights that it names',
        ),
        (f'kind = "bert"\n{TUNED}', LEARNS, 'model.head = "preferences" is for model.kind = "gpt"'),
        (
            TUNED,
            (
                *LEARNS,
                "curriculum.tokens=[0, 4096]",
                "curriculum.seq_length=[512, 1024]",
                "curriculum.global_batch_size=[8, 8]",
            ),
            'curriculum.seq_length has 512 beside model.seq_length = 1024, and model.head = "preferences" has pairs of '
            "one length. Set all of curriculum.seq_length to 1024, so that batches alone grow.",
        ),
        (
            TUNED,
            (*LEARNS, "data.no_loss_on=[3]"),
            "data.no_loss_on = (3,) has no effect with model.head",
        ),
        (TUNED, (*LEARNS, "data.loss_on=answers"), "data.loss_on = 'answers' has no effect with model.head"),
        (
            'kind = "bert"\nhead = "classification"\nnum_labels = 3',
            (ASKED,),
            'data.questions = "dev.json" has no effect with model.head = "classification"',
        ),
        (
            'kind = "bert"\nhead = "spans"',
            (ASKED, "train.evaluate_every=0"),
            'data.questions = "dev.json" has no effect with train.evaluate_every = 0',
        ),
        ("", ("preferences.beta=0.5",), '[preferences] has no effect with model.head = "pretraining". Leave it out.'),
        (
            TUNED,
            (*LEARNS, "preferences.loss=ipo", "preferences.label_smoothing=0.1"),
            'preferences.label_smoothing = 0.1 has no effect with preferences.loss = "ipo". Leave it out.',
        ),
        (
            'kind = "bert"\nhead = "classification"\nnum_labels = 3',
            ("data.masking.share=0.2",),
            '[data.masking] has no effect with model.head = "classification", whose samples are examples as they are.',
        ),
    ],
)
def test_what_does_not_go_with_a_head(model: str, overrides: tuple[str, ...], message: str) -> None:
    content = parse(BASE.format(model=model, parallel=""), "text")
    assert [apply_(content, override) for override in overrides] == [[]] * len(overrides)
    with pytest.raises(ConfigError) as caught:
        build(content, [], source="text")
    (found,) = str(caught.value).split("\n  - ")[1:]
    assert found.startswith(message)


def test_questions_are_answered_at_the_usual_evaluations_too() -> None:
    content = parse(BASE.format(model='kind = "bert"\nhead = "spans"', parallel=""), "text")
    assert apply_(content, ASKED) == []
    assert build(content, [], source="text").data.questions == "dev.json"


def test_all_at_once() -> None:
    assert len(problems('num_key_value_heads = 4\nrotary.base = 3.0\nnorm = "batch"')) == 3


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_beyond_key_value_heads_are_fine_where_one_divides_the_other(tp: int) -> None:
    text = BASE.replace("num_heads = 6", "num_heads = 8").format(model="num_key_value_heads = 2", parallel=f"tp = {tp}")
    assert loads(text).parallel.tp == tp


def test_sections_within_sections_come_from_the_command_line_and_go_to_toml_and_back() -> None:
    content = parse(BASE.format(model='position = "rotary"', parallel=""), "text")
    assert apply_(content, "model.rotary.base=500000") == []
    config = build(content, [], source="text")
    assert config.model.rotary.base == 500_000.0
    assert "[model.rotary]\nbase = 500000.0" in to_toml(config)
    assert loads(to_toml(config)) == config


def test_a_preset_has_sections_too_and_keys_beside_it_take_precedence_one_by_one() -> None:
    config = loads(
        BASE.replace("hidden_size = 48\nnum_heads = 6", 'preset = "llama3.1-8b"').format(
            model="attention_dropout = 0.0\ndropout = 0.0\nrotary.factor = 2.0", parallel=""
        )
    )
    rotary = config.model.rotary
    assert (rotary.base, rotary.scaling, rotary.factor, rotary.original_length) == (500_000.0, "llama3", 2.0, 8192)
