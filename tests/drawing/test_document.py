"""What stands around a page."""

import re
import time
from datetime import UTC, datetime

import pytest

from colonnade import __version__
from colonnade.drawing.document import document, foot, notes, tile
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
    assert 0 < page.index("</p><script>") < page.index('"use strict"') < page.index("</script></body></html>")


def test_a_page_tells_who_made_it_and_when_wherever_that_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """In UTC, on a machine in Japan too."""
    monkeypatch.setenv("TZ", "JST-9")
    time.tzset()
    try:
        before, made_by = datetime.now(UTC), foot()
    finally:
        monkeypatch.undo()
        time.tzset()
    (version, when) = re.findall(r"^<footer>Colonnade (.*), (.*) UTC</footer>$", made_by)[0]
    made = datetime.strptime(when, "%Y-%m-%d %H:%M").replace(tzinfo=UTC)
    assert version == __version__ and before.replace(second=0, microsecond=0) <= made <= datetime.now(UTC)


def test_a_tile_has_its_name_its_number_and_what_is_to_be_said_of_it() -> None:
    assert tile("MFU", "40%", "of <it>") == (
        '<div class="tile"><span>MFU</span><b>40%</b><small>of &lt;it&gt;</small></div>'
    )


def test_each_note_stands_out_once() -> None:
    assert notes(iter(["one", "<two>", "one"])) == ["<aside><p>one</p><p>&lt;two&gt;</p></aside>"]
    assert notes([]) == []
