"""Transfers between stages: sent and received in the background, in an order that both sides know."""

from collections import deque
from collections.abc import Callable, Sequence

from colonnade.mesh.mesh import Axis
from colonnade.pipeline.carry import Gradients
from colonnade.pipeline.messages import Message, Sent
from colonnade.pipeline.transfer import Transfer, start_receiving, start_sending

_AHEAD = 1  # receives posted beyond the one that is waited for: a transfer goes on while the stage computes


class Mailbox:
    """One stage's messages of one pass through a schedule."""

    def __init__(self, sent: Sequence[Sequence[Sent]], pp: Axis, buffers: Callable[[Message], Gradients]) -> None:
        """`sent`: what every stage sends. `buffers` makes memory for the tensors of a message that will arrive."""
        self.pp, self.buffers = pp, buffers
        self._mine = {each.message: each for each in sent[pp.rank]}
        self._made_at = {each.message: (stage, each.made_at) for stage, all_ in enumerate(sent) for each in all_}
        self._expected = {
            stage: deque(each.message for each in all_ if each.to == pp.rank)
            for stage, all_ in enumerate(sent)
            if stage != pp.rank
        }
        self._arriving: dict[Message, Transfer] = {}
        self._leaving: dict[int, deque[tuple[int, Transfer]]] = {stage: deque() for stage in self._expected}
        self._kept: dict[Message, Gradients] = {}
        for stage in self._expected:
            self._post(stage)

    def put(self, message: Message, entries: Gradients) -> None:
        """Send `entries` to whoever uses them; they must not change afterwards."""
        sent = self._mine[message]
        if sent.to == self.pp.rank:
            self._kept[message] = entries
            return
        self._leaving[sent.to].append((sent.used_at, start_sending(entries, self.pp, sent.to)))

    def take(self, message: Message) -> Gradients:
        """Return when `message` is here."""
        stage, made_at = self._made_at[message]
        if stage == self.pp.rank:
            return self._kept.pop(message)
        while message not in self._arriving:
            self._post_next(stage)
        transfer = self._arriving.pop(message)
        self._post(stage)
        transfer.wait()
        self._forget(stage, made_at)
        return transfer.entries

    def close(self) -> None:
        """Return when everything sent has arrived."""
        for leaving in self._leaving.values():
            while leaving:
                leaving.popleft()[-1].wait()

    def _post(self, stage: int) -> None:
        """Have receives posted for what comes next from `stage`."""
        ahead = sum(self._made_at[message][0] == stage for message in self._arriving)
        for _ in range(min(_AHEAD - ahead, len(self._expected[stage]))):
            self._post_next(stage)

    def _post_next(self, stage: int) -> None:
        message = self._expected[stage].popleft()
        self._arriving[message] = start_receiving(self.buffers(message), self.pp, stage)

    def _forget(self, stage: int, made_at: int) -> None:
        """Let go of what `stage` must have used before it made, at `made_at`, what has just come."""
        leaving = self._leaving[stage]
        while leaving and leaving[0][0] < made_at:
            leaving.popleft()[-1].wait()
