"""What a page holds is text, whatever it is made of."""

import html
import json

from colonnade.drawing.html import data, tag, void


def test_numbers_and_texts_for_the_script_of_a_page_end_no_script_and_tell_no_credentials() -> None:
    content = {"title": "</script><b>&", "places": ["s3://me:topsecret@bucket/x?key=alsosecret"], "step": [1, 2.5]}
    page = str(data(content))
    head, tail = '<script type="application/json">', "</script>"
    inside = page.removeprefix(head).removesuffix(tail)
    assert page == head + inside + tail and not set("<>&") & set(inside)
    found = json.loads(html.unescape(inside))
    assert (found["title"], found["step"]) == (content["title"], content["step"])
    assert "secret" not in inside and found["places"][0].startswith("s3://")


def test_a_text_is_shown_without_credentials_and_control_characters() -> None:
    """Line breaks stay; of attributes too."""
    wrong, shown = "a\x1b[31m\x00b\n\tc <i>", "a\ufffd[31m\ufffdb\n\tc &lt;i&gt;"
    assert tag("p", wrong, title=wrong) == f'<p title="{shown}">{shown}</p>'
    told = tag("p", "s3://me:topsecret@bucket/x", title="s3://me:topsecret@bucket/x")
    assert "topsecret" not in told and told.count("bucket/x") == 2


def test_what_is_markup_already_stays_and_attributes_are_named_as_a_page_has_them() -> None:
    inside = tag("b", 1, class_="x", data_axis="step", hidden=None, value=0)
    assert inside == '<b class="x" data-axis="step" value="0">1</b>'
    assert tag("p", inside, "<") == f"<p>{inside}&lt;</p>"
    assert void("img", alt='"') == '<img alt="&quot;">'
