"""Runs a stage's part of a step: the actions that the schedule lists, in their order, nothing else.

    F   take the carry from the previous stage ─▶ chunk.forward  ─▶ put it for the next stage
    B   take its gradients from the next stage ─▶ chunk.backward ─▶ put those of what came in for the previous stage
    W   chunk.weights: weight gradients that B has deferred (zero_bubble)

One stage is a pipeline too: its schedule is forward, backward, forward, backward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from colonnade.mesh.mesh import Axis
from colonnade.pipeline.carry import Carry, Gradients, complete, gradient_buffers
from colonnade.pipeline.chunk import Chunk, Model, Owner
from colonnade.pipeline.mailbox import Mailbox
from colonnade.pipeline.messages import Message, chunk_number, sends
from colonnade.pipeline.schedule import Action, actions


def _nobody(action: Action | None) -> None:
    """Nobody listens."""


@dataclass(frozen=True)
class Runner:
    """One stage of the pipeline."""

    chunks: Sequence[Chunk]
    """This stage's chunks, in the order of the model."""
    starts: Sequence[str]
    """The unit with which each chunk of the model begins, those of other stages too."""
    model: Model
    pp: Axis
    owner: Owner
    schedule: str
    device: torch.device
    """Where the losses are."""
    first_trained: int = 0
    """The first chunk of the model with a backward, counted over all stages."""
    num_losses: int = 1
    """How many the model's last unit returns."""
    begins: Callable[[Action | None], object] = _nobody
    """Told of each action before it runs; None: all are done."""

    def run(self, inputs: Sequence[Any]) -> Tensor:
        """Forward and backward of every micro-batch, given what units read of each.

        Returns the sums of their losses, float64 [losses]; zeros on stages without them. Sends the carry of each
        micro-batch to the next stage and its gradients back, for every chunk.
        """
        for chunk in self.chunks:
            chunk.begin()
        schedules = [self._actions(stage, len(inputs)) for stage in range(self.pp.size)]
        mine = schedules[self.pp.rank]
        self.owner.expect([unit for action in mine if action.kind != "W" for unit in self._uses(action)])
        last = {(action.kind, action.chunk): action for action in mine}
        mailbox = Mailbox(
            sends(schedules, self.num_chunks, self.first_trained), self.pp, partial(self._buffers, inputs)
        )
        computed = [
            self.do(action, inputs[action.microbatch], mailbox, last=action is last[action.kind, action.chunk])
            for action in mine
        ]
        self.begins(None)
        mailbox.close()
        nothing = torch.zeros(self.num_losses, dtype=torch.float64, device=self.device)
        losses = [nothing, *(torch.stack(each).double() for each in computed if each is not None)]
        return torch.stack(losses, -1).sum(-1)

    @property
    def num_chunks(self) -> int:
        """Chunks of the whole model."""
        return len(self.starts)

    @property
    def _splits(self) -> bool:
        return self.schedule == "zero_bubble"

    def _actions(self, stage: int, num_microbatches: int) -> list[Action]:
        return actions(self.schedule, stage, self.pp.size, num_microbatches, len(self.chunks))

    def _uses(self, action: Action) -> list[str]:
        return self.chunks[action.chunk].uses(action.kind)

    def _buffers(self, inputs: Sequence[Any], message: Message) -> Gradients:
        """Memory for a message that will arrive."""
        start = message.chunk + 1 if message.kind == "F" else message.chunk
        carry = self.model.carry_buffers(inputs[message.microbatch], self.starts[start])
        return carry if message.kind == "F" else gradient_buffers(carry)

    def do(self, action: Action, inputs: Any, mailbox: Mailbox, *, last: bool) -> Carry | None:
        """Run one action; returns the losses where those are what it makes."""
        self.begins(action)
        if action.kind == "F":
            return self._forward(action, inputs, mailbox)
        if action.kind == "B":
            self._backward(action, inputs, mailbox, last=last)
        else:
            self.chunks[action.chunk].weights(action.microbatch, last=last)
        return None

    def _forward(self, action: Action, inputs: Any, mailbox: Mailbox) -> Carry | None:
        microbatch, number = action.microbatch, self._number(action)
        carry = complete(mailbox.take(Message("F", microbatch, number - 1))) if number > 0 else ()
        out = self.chunks[action.chunk].forward(microbatch, carry, inputs)
        if number == self.num_chunks - 1:
            return out
        mailbox.put(Message("F", microbatch, number), out)
        return None

    def _backward(self, action: Action, inputs: Any, mailbox: Mailbox, *, last: bool) -> None:
        microbatch, number = action.microbatch, self._number(action)
        if number < self.first_trained:
            return
        gradients = self.chunks[action.chunk].backward(
            microbatch,
            mailbox.take(Message("B", microbatch, number + 1)) if number < self.num_chunks - 1 else None,
            inputs,
            last=last,
            split=self._splits,
        )
        if number > self.first_trained:
            mailbox.put(Message("B", microbatch, number), gradients)

    def _number(self, action: Action) -> int:
        return chunk_number(self.pp.rank, action.chunk, self.pp.size)
