"""The shares in which data.split cuts a token file."""


def parse_split(split: str) -> tuple[float, float, float]:
    """'29:1' or '969:30:1' -> three shares. Raises ValueError unless two or three numbers >= 0, the first > 0."""
    shares = [float(part) for part in split.split(":")]
    if len(shares) not in (2, 3) or not all(0 <= share < float("inf") for share in shares) or shares[0] == 0:
        raise ValueError(split)
    train, validation, test = (*shares, 0.0)[:3]
    return train, validation, test
