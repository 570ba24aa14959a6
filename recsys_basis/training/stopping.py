"""A run asked to stop: by a signal to one rank, agreed on by all, at the same step."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event

import torch
import torch.distributed as dist


class Stopped(Exception):
    """All ranks have agreed to stop here."""


def nobody_asks() -> bool:
    """For a run that no signal ends."""
    return False


@contextmanager
def termination_noted() -> Iterator[Callable[[], bool]]:
    """Inside, SIGTERM ends nothing: the yielded function says whether it has come. For the main thread."""
    asked = Event()
    previous = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGTERM, previous)


class Agreement:
    """What any rank wants is known to every rank, one call later than it was said.

    Each call starts one all-reduce of a few bytes and reads that of the call before, so a step
    waits for nothing.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._under_way: tuple[dist.Work, torch.Tensor] | None = None

    def any_rank(self, wants: bool) -> bool:
        """Whether some rank wanted it at the last call. All ranks call it at the same points."""
        before = self.finish()
        said = torch.tensor([int(wants)])
        work = dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._under_way = work, said
        return before

    def finish(self) -> bool:
        """The outcome of the last call; afterwards nothing is under way."""
        if self._under_way is None:
            return False
        work, said = self._under_way
        self._under_way = None
        work.wait()
        return bool(said.item())
