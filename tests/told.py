"""A monitor that keeps what it is told."""

from typing import Any


class Told:
    """In place of a `Monitor`, which writes it into the run's folder."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.said: list[str] = []

    def event(self, kind: str, **details: Any) -> None:
        self.events.append((kind, details))

    def say(self, text: str) -> None:
        self.said.append(text)

    def follow(self, **_: object) -> None:
        """It has no pace of its own."""

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The details of all events of a kind."""
        return [details for each, details in self.events if each == kind]
