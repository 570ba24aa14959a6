"""BASIS in plain PyTorch: the steps of ``spec.py`` in their order, with their numbers.

Other backends answer to this one. Work and memory of a step are proportional to its U rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from recsys_basis.row_optimizers.base import RowOptimizer, State
from recsys_basis.row_optimizers.basis.buckets import BucketMap, RowBuckets
from recsys_basis.row_optimizers.basis.row_counts import RowCounts
from recsys_basis.row_optimizers.basis.spec import BasisConfig
from recsys_basis.row_optimizers.bias import TableUpdates, bias_correction
from recsys_basis.row_optimizers.rows import change_rows
from recsys_basis.row_optimizers.storage import DTYPES, Stored, rounding_of
from recsys_basis.segments import Segments
from recsys_basis.tables import TableShard


@dataclass(frozen=True)
class Touched:
    """The bucket rows that a batch touches, and who touches them; C touched ones, U rows.

    segments items (row, bucket) grouped by bucket row: U of them, more where a row has two buckets
    source   row number of each item, or None where item j is row j
    first    [U] int64, position of each row's bucket among the C; second: of its other one, or None
    """

    segments: Segments
    source: torch.Tensor | None
    first: torch.Tensor
    second: torch.Tensor | None

    @classmethod
    def by(cls, buckets: RowBuckets) -> Touched:
        if buckets.second is None:
            segments = Segments.of(buckets.first)
            return cls(segments, None, segments.position_of_items(), None)
        twice = (buckets.second != buckets.first).nonzero().view(-1)
        segments = Segments.of(torch.cat([buckets.first, buckets.second[twice]]))
        first, others = segments.position_of_items().split([len(buckets.first), len(twice)])
        source = torch.cat([torch.arange(len(first), device=first.device), twice])
        return cls(segments, source, first, first.index_copy(0, twice, others))

    def mean(self, values: torch.Tensor, sign: torch.Tensor | None = None) -> torch.Tensor:
        """[C, D]: mean of sign(i) values[i] over the rows i of each bucket; values [U, D]."""
        if sign is not None and self.source is not None:
            sign = sign[self.source]
        return self.segments.sum(values, self.source, sign) / self.segments.counts[:, None]


@dataclass(frozen=True)
class Moments:
    """Bucket rows in float32: first [C, D] or None, second [C, D]; and their updates [C] int32."""

    first: torch.Tensor | None
    second: torch.Tensor
    updates: torch.Tensor

    def second_of_rows(self, touched: Touched, beta2: float) -> torch.Tensor:
        """V^ [U, D] of each row; of two buckets the elementwise smaller."""
        corrected = self.second / bias_correction(beta2, self.updates)[:, None]
        rows = corrected.index_select(0, touched.first)
        if touched.second is not None:
            rows = torch.minimum(rows, corrected.index_select(0, touched.second))
        return rows

    def first_of_rows(self, touched: Touched, sign: torch.Tensor | None, beta1: float) -> torch.Tensor:
        """sign(i) M^ [U, D] of each row; of two buckets the mean."""
        assert self.first is not None, "BasisConfig.first_moment says that M exists wherever it is read"
        corrected = self.first / bias_correction(beta1, self.updates)[:, None]
        rows = corrected.index_select(0, touched.first)
        if touched.second is not None:
            rows = (rows + corrected.index_select(0, touched.second)) / 2
        return rows if sign is None else rows * sign[:, None]


class Basis(RowOptimizer):
    """Moments shared by bucket, and at most one scalar a row; specification in ``spec.py``."""

    config_type = BasisConfig
    config: BasisConfig

    def __init__(
        self, config: BasisConfig, shards: Sequence[TableShard], device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(config, shards, device)
        self.buckets = BucketMap(config, self.shards, self.device)
        num_buckets, width = self.buckets.num_buckets, self.embedding_dim
        moment_dtype, scalar_dtype = DTYPES[config.moment_dtype], DTYPES[config.scalar_dtype]
        self.second = torch.zeros(num_buckets, width, dtype=moment_dtype, device=self.device)
        self.stored: dict[str, Stored] = {}
        """By name, the states that may be kept in fewer bits."""
        self._second = self._stored(self.second, self.buckets.bucket_start, "second_moment")
        self.updates = torch.zeros(num_buckets, dtype=torch.int32, device=self.device)
        self.state["second_moment"] = State(self.second, "bucket")
        self.state["updates"] = State(self.updates, "bucket")
        if config.first_moment != "none":
            rows = num_buckets if config.first_moment == "all" else self.buckets.num_private
            starts = self.buckets.bucket_start if config.first_moment == "all" else self.buckets.private_start
            self.first = torch.zeros(rows, width, dtype=moment_dtype, device=self.device)
            self._first = self._stored(self.first, starts, "first_moment")
            self.state["first_moment"] = State(self.first, "bucket")
        if config.scalar == "hypergradient":
            self.scalar = torch.ones(self.num_rows, dtype=scalar_dtype, device=self.device)
            self._scalar = self._stored(self.scalar, self.buckets.row_start, "scalar")
            self.state["scalar"] = State(self.scalar, "row")
        # A planner's rule has no memory, makes no step, and knows no counts.
        if config.needs_counts and self.device.type != "meta":
            self.row_counts = RowCounts(self.shards, self.device)
        if config.scalar == "energy":
            self.energy = torch.zeros(self.num_rows, dtype=scalar_dtype, device=self.device)
            self._energy = self._stored(self.energy, self.buckets.row_start, "energy")
            self.state["energy"] = State(self.energy, "row")
        if config.corrects_energy:
            self.table_updates = TableUpdates(self.row_starts, self.device)
            self.state["table_updates"] = State(self.table_updates.count, "table")

    def _stored(self, tensor: torch.Tensor, starts: torch.Tensor, name: str) -> Stored:
        rounding = rounding_of(self.shards, name, self.config.hash_seed, self.device)
        self.stored[name] = Stored(tensor, starts, *rounding)
        return self.stored[name]

    def buckets_of_shard(self, shard: TableShard, name: str) -> tuple[int, int, int]:
        """As in the base class; the first moment may have private bucket rows only."""
        sizes = self.buckets.sizes[self.shards.index(shard)]
        private_only = name == "first_moment" and self.config.first_moment == "private"
        size = sizes.num_private if private_only else sizes.num_buckets
        return (
            shard.num_partitions * size,
            shard.first_partition * size,
            shard.table.num_partitions * size,
        )

    def grow(self, step: int) -> bool:
        """As in the base class: bucket rows double after each of the steps ``grow_at``."""
        doublings = sum(each <= step for each in self.config.grow_at)
        if doublings == self.buckets.doublings:
            return False
        grown = BucketMap(self.config, self.shards, self.device, doublings)
        parents = grown.parents(self.buckets)
        self.buckets = grown
        self.second, self.updates = self.second[parents], self.updates[parents]
        self._second = self._stored(self.second, grown.bucket_start, "second_moment")
        self.state["second_moment"] = State(self.second, "bucket")
        self.state["updates"] = State(self.updates, "bucket")
        if self.config.first_moment == "all":
            self.first = self.first[parents]
            self._first = self._stored(self.first, grown.bucket_start, "first_moment")
            self.state["first_moment"] = State(self.first, "bucket")
        return True

    def update(
        self, weights: torch.Tensor, rows: torch.Tensor, gradients: torch.Tensor, learning_rate: float
    ) -> None:
        """Steps 1 to 6 of ``spec.py``; shapes as in the base class."""
        config = self.config
        buckets = self.buckets.of_rows(rows)
        touched = Touched.by(buckets)
        moments = self._read(touched)
        scalar = None
        if config.scalar == "hypergradient":
            scalar = self._step_1(moments, touched, buckets.sign, rows, gradients, learning_rate)
        squares = gradients.square()
        moments = self._steps_2_and_3(moments, touched, buckets.sign, gradients, squares)
        second = moments.second_of_rows(touched, config.beta2)
        if config.scalar == "energy":
            scalar = self._step_4(second, rows, squares, moments.updates[touched.first])
        direction = self._step_5(moments, touched, buckets, gradients)
        change = (learning_rate * direction).div_(second.sqrt_().add_(config.eps))  # 6
        if scalar is not None:
            change.mul_(scalar[:, None])
        change_rows(weights, change, learning_rate * config.weight_decay)

    def _read(self, touched: Touched) -> Moments:
        keys = touched.segments.keys
        first = self._first.read(keys) if self.config.first_moment == "all" else None
        return Moments(first, self._second.read(keys), self.updates.index_select(0, keys))

    def _step_1(
        self,
        moments: Moments,
        touched: Touched,
        sign: torch.Tensor | None,
        rows: torch.Tensor,
        gradients: torch.Tensor,
        learning_rate: float,
    ) -> torch.Tensor:
        """Hypergradient: the new s [U]."""
        config = self.config
        updates = moments.updates[touched.first]
        known = updates > 0
        if touched.second is not None:
            known &= moments.updates[touched.second] > 0
        root = moments.second_of_rows(touched, config.beta2).sqrt_().add_(config.eps)
        u = moments.first_of_rows(touched, sign, config.beta1) / root * known[:, None]
        inner = (u * gradients).sum(1)
        if config.hypergradient_normalized:
            norms = u.norm(dim=1) * gradients.norm(dim=1)
            inner = torch.where(norms > 0, inner / norms, 0)
        rate = config.hypergradient_rate * learning_rate
        if config.hypergradient_by_frequency != "none":
            by_row = config.hypergradient_by_frequency == "row"
            frequency = self.row_counts.of_rows(rows) if by_row else updates
            inner = inner / frequency.clamp(min=1)
        change = rate * learning_rate * inner
        old = self._scalar.read(rows)
        new = old + change if config.hypergradient_form == "linear" else old * change.exp()
        new.clamp_(config.scalar_min, config.scalar_max)
        self._scalar.write(rows, new, updates + 1)
        return new

    def _steps_2_and_3(
        self,
        moments: Moments,
        touched: Touched,
        sign: torch.Tensor | None,
        gradients: torch.Tensor,
        squares: torch.Tensor,
    ) -> Moments:
        """The moments of touched buckets after this step, also written to state."""
        config, keys, first = self.config, touched.segments.keys, None
        updates = moments.updates + 1
        self.updates.index_copy_(0, keys, updates)
        if moments.first is not None:
            first = moments.first.lerp(touched.mean(gradients, sign), 1 - config.beta1)
            self._first.write(keys, first, updates)
        second = moments.second.lerp(touched.mean(squares), 1 - config.beta2)
        self._second.write(keys, second, updates)
        return Moments(first, second, updates)

    def _step_4(
        self, second: torch.Tensor, rows: torch.Tensor, squares: torch.Tensor, updates: torch.Tensor
    ) -> torch.Tensor:
        """Energy: s [U], from each row's V^ [U, D] and its bucket's updates [U]."""
        config, shared, new = self.config, second.mean(1), squares.mean(1)
        decay, old = config.energy_decay, self._energy.read(rows)
        is_new = old == 0
        if config.energy_start == "prior":
            old = torch.where(is_new, config.energy_prior * shared, old)
        energy = old + new if decay == 1 else decay * old + (1 - decay) * new
        if config.energy_start == "first":
            energy = torch.where(is_new, new, energy)
        self._energy.write(rows, energy, updates)
        if config.corrects_energy:
            self.table_updates.advance(rows)
        return self.scalar_of_energy(shared, energy, rows)

    def scalar_of_energy(
        self, shared: torch.Tensor, energy: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """s [U] of step 4, float32, of mean_d V^ [U] and e [U] of ``rows`` [U], with T as it is."""
        if self.config.corrects_energy:
            decay, updates = self.config.energy_decay, self.table_updates.of_rows(rows)
            energy = energy / bias_correction(decay, updates)
        # Two roots, not the root of a quotient: that may leave float32's range where s itself is sound.
        return torch.where(energy > 0, shared.sqrt() / energy.sqrt(), 0)

    def _step_5(
        self, moments: Moments, touched: Touched, buckets: RowBuckets, gradients: torch.Tensor
    ) -> torch.Tensor:
        """direction [U, D]."""
        config = self.config
        if config.direction == "gradient":
            return gradients
        if config.first_moment == "all":
            momentum = moments.first_of_rows(touched, buckets.sign, config.beta1)
            if config.direction == "momentum":
                return momentum
            return torch.where(buckets.private[:, None], momentum, gradients)
        private = buckets.private.nonzero().view(-1)
        keys = buckets.private_row[private]
        # Steps 2 and 3 for M: a private bucket has one row, whose gradient is the mean.
        updates = moments.updates[touched.first[private]]
        first = self._first.read(keys).lerp_(gradients[private], 1 - config.beta1)
        self._first.write(keys, first, updates)
        return gradients.index_copy(0, private, first / bias_correction(config.beta1, updates)[:, None])
