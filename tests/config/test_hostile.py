"""Configurations that nobody means: one message, at once, whatever they say."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.config.load import load, loads
from colonnade.errors import ConfigError

GOOD = """\
[model]
hidden_size = 8
num_heads = 2
[data]
train = "x"
[train]
steps = 3
global_batch_size = 4
micro_batch_size = 1
[optim]
learning_rate = 1e-3
[run]
folder = "run"
"""
DEEP = "it has more than 8 lists or tables within each other"
LARGE = "it has a whole number that 64 bits cannot hold"
ZERO = "it has a text with a zero byte (\\u0000)"
VALUES = {
    "model.hidden_size=9223372036854775807": "is out of range: it may be 1,000,000,000 at most",
    "model.num_layers=1000000000": "model.num_layers = 1000000000 is out of range: it may be 100,000 at most.",
    "train.steps=9223372036854775807": "train.steps = 9223372036854775807 is out of range",
    "train.global_batch_size=1000000007": "train.global_batch_size = 1000000007 is out of range",
    "parallel.cuts=[9223372036854775807]": "parallel.cuts has 9223372036854775807 in it, where",
    "train.steps=" + "9" * 5000: LARGE,
    "train.steps=0x" + "f" * 50_000: LARGE,
    "optim.learning_rate=1" + "0" * 400: LARGE,
    "train.steps=" + "[" * 2000: DEEP,
    "train.steps=" + "[" * 2000 + "]" * 2000: DEEP,
    "train.steps=" + "{a = " * 2000 + "1" + "}" * 2000: DEEP,
    "train.steps={" + ".".join("a" * 2000) + " = 1}": DEEP,
    'run.folder="a\\u0000b"': ZERO,
    'data.blend={"a\\u0000" = 1.0}': ZERO,
    'thermometers.sites=["\\u0000"]': ZERO,
}


def refused(action: Callable[[], object]) -> str:
    started = time.process_time()
    with pytest.raises(ConfigError) as caught:
        action()
    assert time.process_time() - started < 5
    assert len(str(caught.value)) < 1000
    return str(caught.value)


@pytest.mark.parametrize("override", VALUES, ids=lambda text: text[:30])
def test_in_a_file_and_on_the_command_line(tmp_path: Path, override: str) -> None:
    path = tmp_path / "good.toml"
    path.write_text(GOOD)
    assert load(path).train.steps == 3
    said = refused(lambda: load(path, [override]))
    assert VALUES[override] in said and override.partition("=")[0] in said
    name, _, value = override.partition("=")
    section, _, key = name.partition(".")
    lines = [line for line in GOOD.splitlines() if not line.startswith(f"{key} =")]
    text = "\n".join(lines).replace(f"[{section}]", f"[{section}]\n{key} = {value}")
    text = text if f"[{section}]" in text else f"{text}\n[{section}]\n{key} = {value}\n"
    said = refused(lambda: loads(text))
    assert VALUES[override] in said or ("is not TOML" in said and value.count("[") > value.count("]"))


def test_the_largest_proposal_is_found_at_once() -> None:
    text = GOOD.replace("hidden_size = 8", "hidden_size = 999999937").replace("num_heads = 2", "num_heads = 7")
    assert "or a num_heads of 1 or 999999937." in refused(lambda: loads(text))


PIECES = st.sampled_from(
    ["[", "]", "{", "}", "=", ".", ",", '"', "'", "#", "\n", "0x", "9e", "inf", "-", "\\u", "\0", "é"]
)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(GOOD)), PIECES | st.text(max_size=3)), max_size=6))
def test_any_text(changes: list[tuple[int, str]]) -> None:
    text = GOOD
    for place, inserted in changes:
        text = text[:place] + inserted + text[place:]
    try:
        loads(text)
    except ConfigError as error:
        assert len(str(error)) < 5000


@pytest.mark.parametrize(("number", "said"), [(2**63 - 1, "is out of range"), (2**63, LARGE), (-(2**63) - 1, LARGE)])
def test_whole_numbers_are_those_of_64_bits(number: int, said: str) -> None:
    assert said in refused(lambda: loads(GOOD.replace("steps = 3", f"steps = {number}")))
    assert said in refused(lambda: loads(GOOD.replace("steps = 3", f"steps = 3\nno_key = {number}"))) or (
        "train.no_key is not a key" in refused(lambda: loads(GOOD.replace("steps = 3", "steps = 3\nno_key = 1")))
    )
    assert LARGE not in refused(lambda: loads(GOOD.replace("steps = 3", f"steps = {-(2**63)}")))


@pytest.mark.parametrize("value", ["[{}]", "[1, [{}]]", "{{ a = [{}] }}"])
def test_whole_numbers_within_values_are_those_of_64_bits_too(value: str) -> None:
    for number, is_large in ((2**63 - 1, False), (2**63, True)):
        text = GOOD.replace("steps = 3", f"steps = {value.format(number)}")
        assert (LARGE in refused(lambda text=text: loads(text))) == is_large


def test_values_may_lie_eight_deep() -> None:
    """A section is one, and what stands in the innermost list another."""
    for depth, said in ((5, "train.steps = [[[[[1]]]]]"), (6, DEEP)):
        value = "[" * depth + "1" + "]" * depth
        assert said in refused(lambda value=value: loads(GOOD.replace("steps = 3", f"steps = {value}")))
