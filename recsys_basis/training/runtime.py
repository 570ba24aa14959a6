"""Ranks, device and threads of a run, from torchrun's environment or alone."""

from __future__ import annotations

import datetime
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import torch
import torch.distributed as dist
from pydantic import Field
from torchrec.distributed import comm
from torchrec.distributed.comm_ops import set_use_sync_collectives

from recsys_basis.errors import UserError
from recsys_basis.schema import ConfigError, Section

T = TypeVar("T")


class StuckError(UserError):
    """Another rank has died or hangs."""


class RuntimeConfig(Section):
    """Section ``runtime``: what the run runs on."""

    device: Literal["auto", "cpu", "cuda"]
    threads_per_rank: Annotated[int, Field(ge=1)] | None
    """torch threads of each rank; null: the cores this process may use over its ranks on this machine."""
    collective_timeout_s: Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class Runtime:
    """Where this process stands among the ranks of a run."""

    rank: int
    world_size: int
    device: torch.device
    threads: int

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes."""
        return self.rank == 0


@contextmanager
def start_runtime(config: RuntimeConfig) -> Iterator[Runtime]:
    """Join the process group that torchrun's environment describes, or one of a single rank.

    Raises ConfigError for a device that is not there.
    """
    device = _device(config)
    threads = config.threads_per_rank or _share_of_cores()
    torch.set_num_threads(threads)
    # On GPUs gloo stays beside NCCL for what lives in CPU memory: gathered predictions, agreement.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=config.collective_timeout_s)
    number = next(_numbers)
    if "RANK" in os.environ:
        store, rank, world_size = _meet(timeout)
        store = dist.PrefixStore(f"run-{number}", store)
    else:
        store, rank, world_size = dist.HashStore(), 0, 1
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)
    # gloo's gather collectives refuse ranks with different batch sizes, as the last batch has.
    set_use_sync_collectives(backend == "gloo")
    try:
        yield Runtime(dist.get_rank(), dist.get_world_size(), device, threads)
    finally:
        dist.destroy_process_group()
        # TorchRec keeps the groups of its first model's nodes, which no later run can use.
        comm._INTRA_PG = comm._CROSS_PG = None


_numbers = itertools.count()
"""Of the runs of this process: all its ranks begin the same ones."""


@functools.cache
def _meet(timeout: datetime.timedelta) -> tuple[dist.Store, int, int]:
    """(where ranks find each other, rank, world size), from torchrun's environment.

    Kept while the process lives, and each run has names of its own there: a run after another, ended or
    failed, would else find the addresses that ranks left of the one before, or a server about to close.
    """
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return store, rank, world_size


def new_cpu_group(config: RuntimeConfig) -> dist.ProcessGroup:
    """A gloo group of all ranks, for collectives that run beside those of training."""
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=config.collective_timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    return group


def from_main(value: T) -> T:
    """The main rank's ``value``, on every rank."""
    values: list[T] = [value]
    dist.broadcast_object_list(values)
    return values[0]


def on_main(work: Callable[[], T]) -> T | None:
    """What ``work()`` gives on the main rank, None on the others; a UserError of it is raised on all."""
    value: T | None = None
    error: UserError | None = None
    if dist.get_rank() == 0:
        try:
            value = work()
        except UserError as raised:
            error = raised
    if (error := from_main(error)) is not None:
        raise error
    return value


@contextmanager
def collectives_named(config: RuntimeConfig, where: Callable[[], str]) -> Iterator[None]:
    """Turn the error of a collective that another rank did not answer into one that says ``where``."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise StuckError(
            f"rank {dist.get_rank()}, {where()}: another rank did not answer within "
            f"runtime.collective_timeout_s = {config.collective_timeout_s}, or is gone; its own output says "
            f"why ({str(error).splitlines()[0]})"
        ) from error


def _device(config: RuntimeConfig) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("runtime.device = cuda, but torch sees no GPU; see `recsys-basis doctor`")
    if config.device == "cpu" or not has_cuda:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def _share_of_cores() -> int:
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
