"""What one rank knows and all must act on, at the same step: a signal to stop, a fault."""

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
    """What any rank says is known to every rank. All ranks call its methods at the same points.

    Saying starts one all-reduce of a few bytes and waits for nothing; hearing waits for that.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._under_way: tuple[dist.Work, torch.Tensor] | None = None

    def say(self, stop: bool, fault: bool) -> None:
        """Whether this rank wants to stop, and whether something is wrong on it. Hear before saying more."""
        assert self._under_way is None
        said = torch.tensor([int(stop), int(fault)])
        work = dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._under_way = work, said

    def hear(self) -> tuple[bool, bool]:
        """(stop, fault): what any rank has said; afterwards nothing is under way. No, where nobody spoke."""
        if self._under_way is None:
            return False, False
        work, said = self._under_way
        self._under_way = None
        work.wait()
        stop, fault = said.tolist()
        return bool(stop), bool(fault)

    def hear_all(self, fault: str | None) -> str:
        """After a ``fault`` was heard: the first rank's that has one."""
        faults: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(faults, fault, group=self._group)
        return next(each for each in faults if each is not None)
