"""A search as a picture: which layouts are drawn and told, and as what."""

import re

import pytest

from colonnade.config.schema import Config
from colonnade.planner.page_search import drawn
from colonnade.planner.search import Candidate, Search
from tests.parity.runs import Case, Way, configured


def config() -> Config:
    return configured(Case(drop=0.0, precision="bf16", vocab_size=64, global_batch_size=4), Way(micro_batch_size=1))


def numbered(seconds: float, memory: int) -> Candidate:
    return Candidate(config(), seconds, memory, {"products": seconds, "tp": seconds / 2})


def front_of(count: int) -> list[Candidate]:
    """Each slower, with less memory."""
    return [numbered(1.0 + number, 10_000 - number) for number in range(count)]


def dots(text: str) -> list[str]:
    return re.findall(r'class="dots (\w+)"', text)


def test_all_layouts_are_drawn_below_the_front_and_the_best_above_both() -> None:
    best, slow = numbered(1.0, 2_000), numbered(3.0, 4_000)
    text = drawn(Search(20_000.0, [best, numbered(2.0, 1_000), slow], tried=4), best)
    assert dots(text) == ["quiet"] * 3 + ["c0"] * 2 + ["c1"]
    (curve,) = re.findall(r'class="line c0" d="(.*?)"', text)
    assert curve.count("L") == 1, "from one of the front to the other"
    assert "<title>one rank, micro-batch 1\n3 s, 4 kB</title>" in text and "are drawn" not in text
    assert "4 layouts were put together: 3 fit into 20 kB," in text
    assert "cannot be</summary>" not in text
    keys = re.findall(r'class="key (\w+)"></i>([\w ,]+)', text)
    assert keys == [
        ("c0", "no other is better in both"),
        ("c1", "the best, run on paper"),
        ("quiet", "others that fit"),
    ]


def test_times_that_are_near_each_other_are_spread_over_the_picture() -> None:
    """Memory begins at 0 where that is near."""
    text = drawn(Search(20_000.0, [numbered(1.0, 1_000), numbered(11.0, 11_000)]), numbered(1.0, 1_000))
    first = re.findall(r'class="dots quiet" d="M([\d.]+) ([\d.]+)h0"', text)[0]
    assert [float(at) for at in first] == pytest.approx([1000 * 0.6 / 11.2, 1000 * (1 - 1 / 11.6)], abs=0.1)


@pytest.mark.parametrize(("count", "shown"), [(1200, 1200), (1201, 601)])
def test_of_very_many_layouts_each_second_or_third_is_drawn_and_that_is_told(count: int, shown: int) -> None:
    one = numbered(1.0, 1_000)
    text = drawn(Search(20_000.0, [one] * count), one)
    assert dots(text).count("quiet") == shown
    assert ("Of 1,201 layouts 601 are drawn." in text) is (shown < count)


def test_the_front_is_told_as_far_as_one_reads_and_why_others_cannot_be() -> None:
    """Numbers stand to the right; what refuses most comes first."""
    found = Search(20_000.0, front_of(41), refused={"too long": 3, "too <wide>": 1_005})
    found.fitting.insert(1, numbered(1.5, 88_000))
    front, refused = re.findall(r"<tbody>(.*?)</tbody>", drawn(found, found.fitting[0]))
    rows = re.findall(r"<tr>(.*?)</tr>", front)
    assert len(rows) == 40 and not any("88 kB" in row for row in rows)
    assert rows[1] == (
        '<td class="number">2 s</td><td class="number">10 kB</td><td>one rank, micro-batch 1</td>'
        "<td>matrix products</td>"
    )
    assert refused == (
        '<tr><td class="number">1,005</td><td>too &lt;wide&gt;</td></tr>'
        '<tr><td class="number">3</td><td>too long</td></tr>'
    )
