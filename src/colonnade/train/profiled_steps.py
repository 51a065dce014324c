"""Which steps `--profile` names: told before torch is imported."""

from colonnade.errors import ConfigError

MOST_STEPS = 50


def steps_of(text: str | None, *, last_step: int) -> range:
    """None -> no steps; '5' -> step 5; '5:8' -> steps 5 to 8. ConfigError for what names none, or steps behind the
    last one of the run.
    """
    if text is None:
        return range(0)
    begin, colon, end = text.partition(":")
    try:
        first, last = int(begin), int(end if colon else begin)
    except ValueError:
        first, last = 0, 0
    if not 1 <= first <= last < first + MOST_STEPS:
        raise ConfigError(
            f"--profile {text} names no steps. Give one, like --profile 5, or the first and the last of up to "
            f"{MOST_STEPS}, like --profile 5:8."
        )
    if last > last_step:
        raise ConfigError(
            f"--profile {text}: the run ends with step {last_step:,} (train.steps). Name steps up to that one."
        )
    return range(first, last + 1)
