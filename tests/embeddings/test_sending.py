"""When each round of the exchange of ids starts; tests/training/test_ids_ahead.py: no bit changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from recsys_basis.embeddings.sending import send_ahead


@dataclass
class Recorder:
    """Stands for a sharded collection: what was started and awaited, in order."""

    events: list[str] = field(default_factory=list)

    def create_context(self) -> object:
        return object()

    def input_dist(self, context: object, ids: str) -> Any:
        self.events.append(f"numbers of {ids}")
        return SimpleNamespace(wait=lambda: self._send(ids))

    def _send(self, ids: str) -> Any:
        self.events.append(f"ids of {ids}")
        return SimpleNamespace(wait=lambda: ids)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5])
def test_each_batch_comes_once_with_its_ids_and_two_more_are_under_way(count: int) -> None:
    recorder = Recorder()
    batches: list[Any] = [SimpleNamespace(sparse=str(number)) for number in range(count)]
    taken = []
    for number, (batch, ids) in enumerate(send_ahead(batches, recorder)):  # type: ignore[arg-type]
        rounds = [f"numbers of {each}" for each in range(min(number + 3, count))]
        rounds += [f"ids of {each}" for each in range(min(number + 2, count))]
        assert sorted(recorder.events) == sorted(rounds)
        assert ids.receive() == batch.sparse  # type: ignore[comparison-overlap]
        taken.append(batch)
    assert taken == batches
