"""Runs a stage's part of a step: the actions that the schedule lists, in their order, nothing else.

    F   take the stream from the stage before ─▶ chunk.forward  ─▶ put it for the stage behind
    B   take the gradient from the stage behind ─▶ chunk.backward ─▶ put it for the stage before
    W   chunk.weights: gradients that B has put off (zero_bubble)

One stage is a pipeline too: its schedule is forward, backward, forward, backward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colonnade.mesh.mesh import Axis
from colonnade.pipeline.chunk import Chunk, Owner
from colonnade.pipeline.mailbox import Mailbox
from colonnade.pipeline.messages import Message, chunk_number, sends
from colonnade.pipeline.schedule import Action, actions


@dataclass(frozen=True)
class Runner:
    """One stage of the pipeline."""

    chunks: Sequence[Chunk]
    """This stage's chunks, in the order of the model."""
    pp: Axis
    owner: Owner
    schedule: str
    stream: Callable[[Any], Tensor]
    """Memory for the residual stream of a micro-batch, given its inputs."""

    def run(self, inputs: Sequence[Any]) -> Tensor:
        """Forward and backward of every micro-batch, given what units read of each.

        Returns the sum of their losses, float64 []; zero on stages without the head. Sends the stream of each
        micro-batch, [s, b, h], to the next stage and its gradient back, for every chunk.
        """
        schedules = [self._actions(stage, len(inputs)) for stage in range(self.pp.size)]
        mine = schedules[self.pp.rank]
        self.owner.expect([unit for action in mine if action.kind != "W" for unit in self._uses(action)])
        last = {(action.kind, action.chunk): action for action in mine}
        sent = sends(schedules, self.num_chunks)
        mailbox = Mailbox(sent, self.pp, lambda message: self.stream(inputs[message.microbatch]))
        losses = [
            self._do(action, inputs[action.microbatch], mailbox, last=action is last[action.kind, action.chunk])
            for action in mine
        ]
        mailbox.close()
        nothing = torch.zeros((), dtype=torch.float64, device=self.stream(inputs[0]).device)
        return torch.stack([nothing, *(loss.double() for loss in losses if loss is not None)]).sum()

    @property
    def num_chunks(self) -> int:
        """Chunks of the whole model."""
        return self.pp.size * len(self.chunks)

    @property
    def _splits(self) -> bool:
        return self.schedule == "zero_bubble"

    def _actions(self, stage: int, num_microbatches: int) -> list[Action]:
        return actions(self.schedule, stage, self.pp.size, num_microbatches, len(self.chunks))

    def _uses(self, action: Action) -> list[str]:
        return self.chunks[action.chunk].uses(action.kind)

    def _do(self, action: Action, inputs: Any, mailbox: Mailbox, *, last: bool) -> Tensor | None:
        """Run one action; returns the loss where that is what it makes."""
        kind, microbatch, index = action
        chunk, number = self.chunks[index], chunk_number(self.pp.rank, index, self.pp.size)
        if kind == "W":
            chunk.weights(microbatch, last=last)
            return None
        if kind == "F":
            x = None if number == 0 else mailbox.take(Message("F", microbatch, number - 1))
            y = chunk.forward(microbatch, x, inputs)
            if number == self.num_chunks - 1:
                return y
            mailbox.put(Message("F", microbatch, number), y)
            return None
        grad = None if number == self.num_chunks - 1 else mailbox.take(Message("B", microbatch, number + 1))
        grad = chunk.backward(microbatch, grad, inputs, last=last, split=self._splits)
        if number > 0:
            assert grad is not None, "only the embedding has no gradient to hand on"
            mailbox.put(Message("B", microbatch, number), grad)
        return None
