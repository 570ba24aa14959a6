"""Ids sent to the ranks that hold their rows while earlier batches train.

The exchange (``ShardedModule.input_dist``) has two rounds: how many ids each rank will get, then the ids. No
weight takes part in it, so it may begin early without changing a bit: while batch t trains, the ids of t + 1
and the numbers of t + 2 are under way. torchrec 1.8 does the like in TrainPipelineSparseDist, inside a loop
of its own, over a model that it traces with torch.fx and rewrites. Our loop checks the loss, stops and saves
between forward and backward, and evaluates the same model between steps, so it calls what that class calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext, ShardedEmbeddingBagCollection
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_basis.batches.batch import Batch

T = TypeVar("T")


@dataclass
class SentIds:
    """One batch's ids on their way; the collection that sent them takes them in the place of the batch's."""

    context: EmbeddingBagCollectionContext
    exchange: Awaitable[Any]
    """The round that is under way."""

    @classmethod
    def announce(cls, collection: ShardedEmbeddingBagCollection, ids: KeyedJaggedTensor) -> SentIds:
        """Start the first round. Raises as the collection's ``input_dist``."""
        context = collection.create_context()
        return cls(context, collection.input_dist(context, ids))

    def send(self) -> None:
        """Wait for the first round and start the second."""
        self.exchange = self.exchange.wait()

    def receive(self) -> KJTList:
        """Wait for the second round: the ids of all ranks' batches for the rows that are here."""
        ids: KJTList = self.exchange.wait()
        return ids


def send_ahead(
    batches: Iterable[Batch], collection: ShardedEmbeddingBagCollection
) -> Iterator[tuple[Batch, SentIds]]:
    """``batches`` in their order, each with its ids, which were sent a batch before.

    All ranks must take the same number. Two more batches than were taken are made, where there are so many.
    """
    announced = ((batch, SentIds.announce(collection, batch.sparse)) for batch in batches)
    return _made_ahead(_sent(_made_ahead(announced)))


def _sent(announced: Iterable[tuple[Batch, SentIds]]) -> Iterator[tuple[Batch, SentIds]]:
    for batch, ids in announced:
        ids.send()
        yield batch, ids


def _made_ahead(items: Iterable[T]) -> Iterator[T]:
    """Each item, once the one after it is made."""
    made: deque[T] = deque()
    for item in items:
        made.append(item)
        if len(made) == 2:
            yield made.popleft()
    yield from made
