"""Batches made ahead of the training loop, so that it does not wait for Parquet to be decoded."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor

from recsys_basis.batches.batch import Batch


def prefetch(batches: Iterable[Batch], ahead: int) -> Generator[Batch, None, None]:
    """``batches`` in their order, of which a thread makes up to ``ahead`` before they are asked for.

    What the thread raises is raised here, in place of the batch that it was making. The thread ends with
    the last batch, or when the iterator is closed: use it inside ``contextlib.closing``. 0 makes no thread.
    """
    if ahead == 0:
        yield from batches
        return
    source = iter(batches)
    reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
    try:
        waiting = deque(reader.submit(next, source, None) for _ in range(ahead))
        while (batch := waiting.popleft().result()) is not None:
            waiting.append(reader.submit(next, source, None))
            yield batch
    finally:
        reader.shutdown(cancel_futures=True)
