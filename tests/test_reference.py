from colonnade.config.describe import all_keys
from colonnade.config.presets import PRESETS
from colonnade.reference import help_text, page


def test_the_help_has_every_key_and_fits_the_terminal() -> None:
    text = help_text(78)
    for name, key in all_keys().items():
        assert f"\n  {name.rpartition('.')[2]} " in text, name
        assert key.meaning.split()[-1] in text
    assert max(len(line) for line in text.split("\n")) <= 78
    assert "\n  steps  required  [steps, a whole number of at least 1]\n" in text, "the unit, and what is accepted"


def test_the_page_has_every_key_and_preset() -> None:
    text = page()
    for name in all_keys():
        assert f"| `{name.rpartition('.')[2]}`" in text, name
    for preset in PRESETS:
        assert f"| `{preset}` |" in text
    assert "| `learning_rate` ✎ | **required** | 1 | a number above 0 |" in text
    assert "| `steps` ↻ ✎ |" in text
