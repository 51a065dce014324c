"""What a page holds is text, whatever it is made of."""

import html
import json

from colonnade.drawing.html import data


def test_numbers_and_texts_for_the_script_of_a_page_end_no_script_and_tell_no_credentials() -> None:
    content = {"title": "</script><b>&", "places": ["s3://me:topsecret@bucket/x?key=alsosecret"], "step": [1, 2.5]}
    page = str(data(content))
    head, tail = '<script type="application/json">', "</script>"
    inside = page.removeprefix(head).removesuffix(tail)
    assert page == head + inside + tail and not set("<>&") & set(inside)
    found = json.loads(html.unescape(inside))
    assert (found["title"], found["step"]) == (content["title"], content["step"])
    assert "secret" not in inside and found["places"][0].startswith("s3://")
