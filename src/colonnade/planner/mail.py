"""Messages between stages that take memory, on paper: the moves of `pipeline/mailbox.py` alone. Pure."""

from collections import deque
from collections.abc import Sequence

from colonnade.pipeline.messages import Message, sends
from colonnade.pipeline.schedule import Action

AHEAD = 1  # receives posted for what comes next from each stage


class Mail:
    """One stage's messages of one step: memory for those that will arrive, and of those that may not have arrived."""

    def __init__(self, schedules: Sequence[Sequence[Action]], stage: int, num_chunks: int) -> None:
        sent = sends(schedules, num_chunks)
        others = [other for other in range(len(schedules)) if other != stage]
        self._mine = {each.message: each for each in sent[stage]}
        self._from = {each.message: (other, each.made_at) for other in others for each in sent[other]}
        self._expected = {other: deque(e.message for e in sent[other] if e.to == stage) for other in others}
        self._arriving: dict[int, set[Message]] = {other: set() for other in others}
        self._leaving: dict[int, deque[tuple[int, int]]] = {other: deque() for other in others}
        for other in others:
            self._post(other)

    def put(self, message: Message, size: int) -> None:
        """`size`: bytes that nobody else holds."""
        sent = self._mine.get(message)
        if sent is not None and sent.to in self._leaving:
            self._leaving[sent.to].append((sent.used_at, size))

    def take(self, message: Message) -> None:
        """Its memory is the taker's from now on."""
        if message not in self._from:
            return
        other, made_at = self._from[message]
        while message not in self._arriving[other]:
            self._arriving[other].add(self._expected[other].popleft())
        self._arriving[other].remove(message)
        self._post(other)
        while self._leaving[other] and self._leaving[other][0][0] < made_at:
            self._leaving[other].popleft()

    def bytes(self, stream: int) -> int:
        """`stream`: of a message that will arrive."""
        arriving = sum(len(messages) for messages in self._arriving.values()) * stream
        return arriving + sum(size for leaving in self._leaving.values() for _, size in leaving)

    def _post(self, other: int) -> None:
        while self._expected[other] and len(self._arriving[other]) < AHEAD:
            self._arriving[other].add(self._expected[other].popleft())
