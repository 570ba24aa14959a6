"""Which bucket a row's moments live in: computed from the row at every step, never stored.

A table has P partitions of n = N/P places and k = K/P bucket rows each (``recsys_basis.tables``: ids are
striped, so place q of any partition holds its (q+1)-th most frequent id). Places q < h are the head: each
has bucket q to itself. Place q >= h, the x = q - h th of n - h shared ones, has bucket h + f(x):

balanced  keyed bijection of 0..n-h-1, then mod k-h: the loads of shared buckets differ by at most one
murmur3   (mix64(x xor seed) mod 2^63) mod k-h, which is a mask where k-h is a power of two
double    two murmur3 of different seeds
modulo    x mod k-h, the cautionary baseline

Seeds are of the table's name, ``hash_seed`` and the partition, so a bucket's rows are the same on
whichever rank the partition lies. One pass serves all tables of a group: the sizes and seeds of
each partition stand in small tensors, indexed by the partition of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from recsys_basis.row_optimizers.basis.spec import BasisConfig
from recsys_basis.schema import ConfigError
from recsys_basis.tables import Table, TableShard

NUM_KEYS = {"balanced": 4, "murmur3": 1, "double": 2, "modulo": 0}
"""Seeds that a hash takes for each partition; for ``balanced`` one a round of its Feistel network."""


def mix64(values: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's 64-bit finaliser (Appleby 2011, fmix64), int64 in and out; a bijection of 64 bits."""
    values = (values ^ _shift_right(values, 33)) * _signed(0xFF51AFD7ED558CCD)
    values = (values ^ _shift_right(values, 33)) * _signed(0xC4CEB9FE1A85EC53)
    return values ^ _shift_right(values, 33)


def permute(index: torch.Tensor, size: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Keyed bijection of 0..size-1 applied to each of ``index``.

    index [U] int64 with index < size; size [U] int64, >= 1; keys [rounds, U] int64.
    A generalized Feistel network over left * right >= size numbers, walked until it is back in range
    (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, method 3 and section 4).
    left * right exceeds size by less than sqrt(size) + 1, so few numbers need a second walk.
    """
    left_size = size.double().sqrt().ceil().long()
    right_size = (size + left_size - 1) // left_size
    result = _feistel(index, left_size, right_size, keys)
    outside = (result >= size).nonzero().view(-1)
    while outside.numel() > 0:
        walked = _feistel(result[outside], left_size[outside], right_size[outside], keys[:, outside])
        result[outside] = walked
        outside = outside[walked >= size[outside]]
    return result


def _feistel(
    index: torch.Tensor, left_size: torch.Tensor, right_size: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    left, right = index % left_size, index // left_size
    for number, key in enumerate(keys):
        if number % 2 == 0:
            left = (left + _round(right, key)) % left_size
        else:
            right = (right + _round(left, key)) % right_size
    return right * left_size + left


def _round(half: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    # 62 bits, so that adding a half to it never leaves int64.
    return mix64(half ^ key) & ((1 << 62) - 1)


def _shift_right(values: torch.Tensor, bits: int) -> torch.Tensor:
    # Logical: torch's >> copies the sign bit.
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


@dataclass(frozen=True)
class PartitionSizes:
    """Sizes of every partition of one table."""

    num_places: int
    """n = N / P."""
    num_buckets: int
    """k = K / P."""
    num_private: int
    """h: the first places, each with a bucket of its own."""

    @classmethod
    def of(cls, table: Table, config: BasisConfig, doublings: int = 0) -> PartitionSizes:
        """h is rounded up from H / P, and leaves the shared places of a partition at least one bucket.

        Then the shared buckets double, ``doublings`` times or until there would be more of them than places.

        Raises ConfigError while a state budget is not solved: it is of several tables (``budget.py``).
        """
        places = table.rows_per_partition
        if config.bucket_rows is not None:
            buckets = min(places, max(1, config.bucket_rows // table.num_partitions))
        elif config.rows_per_bucket is not None:
            buckets = max(1, int(places / config.rows_per_bucket))
        else:
            raise ConfigError("state_budget is of all tables together: solve_state_budgets comes first")
        most_private = buckets if buckets == places else buckets - 1
        wanted = -(-config.head_rows // table.num_partitions) or round(config.head_bucket_share * buckets)
        private = min(wanted, most_private)
        shared = buckets - private
        for _ in range(doublings):
            shared = 2 * shared if 2 * shared <= places - private else shared
        return cls(places, private + shared, private)


@dataclass(frozen=True)
class RowBuckets:
    """Where the moments of U rows live; bucket rows are numbered within the group on this rank.

    first       [U] int64, bucket row
    second      [U] int64, the other bucket row (hash=double), or None
    private     [U] bool, whether the row is alone in its bucket row
    private_row [U] int64, number among the group's private bucket rows; meaningless where not private
    sign        [U] float32 of -1 and 1 (signed), or None
    """

    first: torch.Tensor
    second: torch.Tensor | None
    private: torch.Tensor
    private_row: torch.Tensor
    sign: torch.Tensor | None


class BucketMap:
    """The map h from a group's rows to its bucket rows on this rank, and the map's signs."""

    def __init__(
        self, config: BasisConfig, shards: Sequence[TableShard], device: torch.device, doublings: int = 0
    ) -> None:
        self.config = config
        self.doublings = doublings
        self.sizes = [PartitionSizes.of(shard.table, config, doublings) for shard in shards]
        local = [shard.num_partitions for shard in shards]
        self.num_buckets = sum(p * size.num_buckets for p, size in zip(local, self.sizes, strict=True))
        self.num_private = sum(p * size.num_private for p, size in zip(local, self.sizes, strict=True))

        def per_partition(values: list[int]) -> torch.Tensor:
            return torch.tensor(values).repeat_interleave(torch.tensor(local)).to(device)

        self.places = per_partition([size.num_places for size in self.sizes])
        self.buckets = per_partition([size.num_buckets for size in self.sizes])
        self.private = per_partition([size.num_private for size in self.sizes])
        self.shared = (self.places - self.private).clamp(min=1)
        self.shared_buckets = (self.buckets - self.private).clamp(min=1)
        self.row_start = self.places.cumsum(0) - self.places
        self.bucket_start = self.buckets.cumsum(0) - self.buckets
        self.private_start = self.private.cumsum(0) - self.private
        uses = [f"key{number}" for number in range(NUM_KEYS[config.hash])]
        self.keys = partition_seeds(shards, config.hash_seed, uses).to(device)
        self.sign_seeds = partition_seeds(shards, config.hash_seed, ["sign"])[0].to(device)

    def of_rows(self, rows: torch.Tensor) -> RowBuckets:
        """Buckets of group ``rows`` [U] int64."""
        partition = torch.searchsorted(self.row_start, rows, right=True) - 1
        place = rows - self.row_start[partition]
        num_private = self.private[partition]
        private = place < num_private
        shared_place = (place - num_private).clamp_(min=0)
        second = None
        if self.config.hash == "double":
            second = self._bucket(partition, place, private, self._murmur3(shared_place, partition, 1))
        sign = None
        if self.config.signed:
            bit = mix64(shared_place ^ self.sign_seeds[partition]) & 1
            sign = torch.where(private, 1, 2 * bit - 1).float()
        return RowBuckets(
            first=self._bucket(partition, place, private, self._hash(shared_place, partition)),
            second=second,
            private=private,
            private_row=self.private_start[partition] + place,
            sign=sign,
        )

    def rows_of_bucket(self, bucket: int) -> torch.Tensor:
        """Group rows [n] int64, ascending, that read or write bucket row ``bucket``."""
        partition = int(torch.searchsorted(self.bucket_start, bucket, right=True)) - 1
        start = int(self.row_start[partition])
        rows = torch.arange(start, start + int(self.places[partition]), device=self.row_start.device)
        where = self.of_rows(rows)
        found = where.first == bucket
        return rows[found if where.second is None else found | (where.second == bucket)]

    def parents(self, smaller: BucketMap) -> torch.Tensor:
        """[K] int64: for each bucket row, that of ``smaller``, with fewer doublings, where its rows were."""
        bucket = torch.arange(self.num_buckets, device=self.buckets.device)
        partition = torch.searchsorted(self.bucket_start, bucket, right=True) - 1
        local = bucket - self.bucket_start[partition]
        private = self.private[partition]
        shared = private + (local - private) % smaller.shared_buckets[partition]
        return smaller.bucket_start[partition] + torch.where(local < private, local, shared)

    def _bucket(
        self, partition: torch.Tensor, place: torch.Tensor, private: torch.Tensor, shared: torch.Tensor
    ) -> torch.Tensor:
        local = torch.where(private, place, self.private[partition] + shared)
        return self.bucket_start[partition] + local

    def _hash(self, shared_place: torch.Tensor, partition: torch.Tensor) -> torch.Tensor:
        """f(x) [U] of the module's docstring, the first one of ``double``."""
        if self.config.hash == "balanced":
            shuffled = permute(shared_place, self.shared[partition], self.keys.index_select(1, partition))
            return shuffled % self.shared_buckets[partition]
        if self.config.hash == "modulo":
            return shared_place % self.shared_buckets[partition]
        return self._murmur3(shared_place, partition, 0)

    def _murmur3(self, shared_place: torch.Tensor, partition: torch.Tensor, number: int) -> torch.Tensor:
        mixed = mix64(shared_place ^ self.keys[number][partition]) & ((1 << 63) - 1)
        return mixed % self.shared_buckets[partition]


def partition_seeds(shards: Sequence[TableShard], hash_seed: int, uses: Sequence[str]) -> torch.Tensor:
    """[uses, partitions of all shards] int64: of table, partition and use, whatever the rank."""
    partitions = [
        (shard.table, shard.first_partition + number)
        for shard in shards
        for number in range(shard.num_partitions)
    ]
    seeds = [[table.seed("bucket", use, hash_seed, number) for table, number in partitions] for use in uses]
    return torch.tensor(seeds, dtype=torch.int64)
