"""Weights and state in fewer bits: float32 in use, bfloat16, float16 or an 8-bit log code in memory.

What does not fit is rounded stochastically, up or down with the chances that make the expected value exact:
an average that moves by a thousandth at a time would never leave its place in bfloat16, whose numbers are
1/128 apart, if it were rounded to the nearest. The random bits are a hash of the place in the whole table and
of the update's number: a run repeats bit for bit, whatever the ranks, threads and order of updates, and C++
kernels take the same bits.

log8, for sums and averages of squares: code 0 is 0, and code c in 1..255 is 2^(-64 + c / 3), from 6.8e-20 to
2.1e6 in steps of 26 %; larger numbers become the largest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recsys_basis.row_optimizers.basis.buckets import mix64, partition_seeds
from recsys_basis.tables import TableShard

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "log8": torch.uint8,
}
LOG8_VALUES = torch.cat([torch.zeros(1), 2.0 ** (-64 + torch.arange(1, 256).double() / 3)]).float()
"""[256] float32: the number that each code stands for."""
LARGEST_FLOAT16 = 65504.0


class Stored:
    """One tensor, read and written as float32 by the keys of its first dimension.

    tensor         [n] or [n, D], of the dtype that holds it
    starts         [partitions] int64, first key of each partition on this rank
    seeds          [partitions] int64, the same for a partition on whichever rank
    first_columns  [partitions] int64, where ``tensor``'s columns begin in the whole table
    """

    def __init__(
        self, tensor: torch.Tensor, starts: torch.Tensor, seeds: torch.Tensor, first_columns: torch.Tensor
    ) -> None:
        self.tensor, self.starts, self.seeds, self.first_columns = tensor, starts, seeds, first_columns

    def read(self, keys: torch.Tensor) -> torch.Tensor:
        """float32 [U] or [U, D] at ``keys`` [U] int64."""
        return as_float32(self.tensor.index_select(0, keys))

    def write(self, keys: torch.Tensor, values: torch.Tensor, updates: torch.Tensor) -> None:
        """Round ``values`` (float32, shaped as ``read`` gives them) into place.

        updates [U] integers, another one at each write of a key: they make the random bits new.
        """
        if self.tensor.dtype != torch.float32:
            values = round_randomly(values, self._random(keys, updates, values), self.tensor.dtype)
        self.tensor.index_copy_(0, keys, values)

    def _random(self, keys: torch.Tensor, updates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """24 random bits for each of ``values``."""
        partition = torch.searchsorted(self.starts, keys, right=True) - 1
        place = keys - self.starts[partition]
        of_key = mix64(mix64(place ^ self.seeds[partition]) ^ updates.long())
        if values.dim() == 2:
            columns = torch.arange(values.shape[1], device=keys.device)
            of_key = of_key[:, None] + self.first_columns[partition][:, None] + columns
        return mix64(of_key) & 0xFFFFFF


def rounding_of(
    shards: Sequence[TableShard], use: str, seed: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """``seeds`` and ``first_columns`` of a ``Stored`` of all partitions of ``shards``, by its ``use``."""
    columns = torch.tensor([shard.column_offset for shard in shards])
    partitions = torch.tensor([shard.num_partitions for shard in shards])
    seeds = partition_seeds(shards, seed, [f"round/{use}"])[0]
    return seeds.to(device), columns.repeat_interleave(partitions).to(device)


def as_float32(stored: torch.Tensor) -> torch.Tensor:
    """The numbers that ``stored``, of any dtype of ``DTYPES``, stands for; same shape."""
    if stored.dtype == torch.uint8:
        return LOG8_VALUES.to(stored.device)[stored.long()]
    return stored.float()


def round_randomly(values: torch.Tensor, random: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``values`` in ``dtype``, up or down as ``random`` decides; its mean over all ``random`` is the value.

    values finite float32; random int64 of the same shape, 24 bits; dtype uint8 is the log code.
    """
    if dtype == torch.bfloat16:
        return _drop_bits(values, random, 16).bfloat16()
    if dtype == torch.float16:
        # Numbers below 2^-14 lie 2^-24 apart.
        small = torch.floor(values.double() * 2.0**24 + random / 2.0**24) * 2.0**-24
        rounded = torch.where(values.abs() < 2.0**-14, small, _drop_bits(values, random, 13).double())
        return rounded.clamp(-LARGEST_FLOAT16, LARGEST_FLOAT16).half()
    table = LOG8_VALUES.to(values.device)
    lower = (torch.searchsorted(table, values.contiguous(), right=True) - 1).clamp(0, 254)
    share = (values.double() - table[lower]) / (table[lower + 1].double() - table[lower])
    return (lower + (random / 2.0**24 < share)).to(torch.uint8)


def _drop_bits(values: torch.Tensor, random: torch.Tensor, bits: int) -> torch.Tensor:
    """Clear the last ``bits`` of each float32, after adding as many random ones: its size goes up or down."""
    mask = (1 << bits) - 1
    number = (values.view(torch.int32).long() & 0xFFFFFFFF) + (random & mask)
    return (number & ~mask & 0xFFFFFFFF).to(torch.int32).view(torch.float32)
