"""What the model eats: one rank's share of one global batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from recsys_basis.ingest.columns import SPARSE_COLUMNS


@dataclass
class Batch(Pipelineable):
    """dense [B, 13] float32; sparse: 26 keys of B bags with one id each; label [B] float32.

    ``global_rows`` is the number of rows of this global batch on all ranks together.
    """

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    label: torch.Tensor
    global_rows: int

    @classmethod
    def from_columns(
        cls, dense: np.ndarray, sparse: np.ndarray, label: np.ndarray, global_rows: int
    ) -> Batch:
        """dense [B, 13], sparse [26, B] int32 and label [B] arrays, all of one rank."""
        lengths = torch.ones(sparse.size, dtype=torch.int32)
        ids = KeyedJaggedTensor(
            keys=list(SPARSE_COLUMNS),
            values=torch.from_numpy(np.ascontiguousarray(sparse).reshape(-1)),
            lengths=lengths,
            offsets=torch.arange(sparse.size + 1, dtype=torch.int32),
            stride=sparse.shape[1],
        )
        return cls(torch.from_numpy(dense), ids, torch.from_numpy(label), global_rows)

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.label)

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(
            self.dense.to(device, non_blocking=non_blocking),
            self.sparse.to(device, non_blocking=non_blocking),
            self.label.to(device, non_blocking=non_blocking),
            self.global_rows,
        )

    def record_stream(self, stream: torch.Stream) -> None:
        self.dense.record_stream(stream)
        self.sparse.record_stream(stream)
        self.label.record_stream(stream)

    def pin_memory(self) -> Batch:
        return Batch(
            self.dense.pin_memory(), self.sparse.pin_memory(), self.label.pin_memory(), self.global_rows
        )
