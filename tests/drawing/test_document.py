"""What stands around a page."""

import re

from colonnade.drawing.document import document
from colonnade.drawing.html import tag


def test_a_page_shows_what_is_within_it_and_loads_nothing() -> None:
    """Its style, its script, and pictures in it, which are `data:` URLs; a browser refuses all else."""
    page = document("A <title>", tag("p", "text"))
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    allowed = {name: sources for name, *sources in (each.split() for each in policy.split(";"))}
    assert allowed == {
        "default-src": ["'none'"],
        "style-src": ["'unsafe-inline'"],
        "script-src": ["'unsafe-inline'"],
        "img-src": ["data:"],
    }
    assert page.index("Content-Security-Policy") < page.index("<style>") < page.index("<p>text</p>")
    assert "A &lt;title&gt; · Colonnade" in page
