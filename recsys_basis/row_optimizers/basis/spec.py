"""BASIS: the algorithm, step by step, and its config section.

An embedding row keeps at most one number of its own; the second moment (and the first, where a rule
reads it) lives in K bucket rows that about N/K rows share. Count-sketch optimizers (Spring et al.,
"Compressing Gradient Optimizers via Count-Sketches", ICML 2019) are the nearest relative; the paper
named BASIS (arXiv 2604.16324) sketches activations, not optimizer state: this is an adaptation of its
two ideas, shared buckets and a scalar a row.

State of one table (letters: ``recsys_basis.shapes``); only what the config reads exists
-------------------------------------------------------------------------------------
V  second moment     [K, D] float     always
t  updates so far    [K]    int32     always: buckets are touched at different rates
M  first moment      [K, D] float     direction=momentum or scalar=hypergradient
                     [H, D] float     direction=head_momentum otherwise (H private bucket rows)
s  scalar            [N]    float     scalar=hypergradient, from 1
e  gradient energy   [N]    float     scalar=energy, 0 before a row's first update; s follows from it
T  table's updates   one    int64     scalar=energy with energy_correction=table

V and M are kept in ``moment_dtype``, s and e in ``scalar_dtype``. Every step computes in float32; what is
kept for later ones is rounded stochastically into its dtype (``../storage.py``), last of all.

h(i) is row i's bucket, sign(i) its sign (``buckets.py``); sign is 1 unless ``signed``, and 1 for private
rows. V^ and M^ are V / (1 - beta2^t) and M / (1 - beta1^t). With ``hash=double`` a row has two buckets
and counts once in each: its V^ is the elementwise smaller, its M^ the mean of the two (once if they
coincide). eta is this step's learning rate.

After each of the steps ``grow_at``, the shared bucket rows of a table double (K - H to 2 (K - H)), and the
two children of a bucket row inherit its V, M and t. Every hash is a number of the row, drawn once, modulo
the shared bucket rows, so a row of bucket b moves to b or to b + K - H: to a child of the bucket it was in.
What a row reads is then what it was; a row alone in its bucket stays private, and scalars are no bucket's.

One step, for the distinct rows i of a batch with summed gradients g_i [D]; b = h(i)
-------------------------------------------------------------------------------------
1. scalar=hypergradient (Baydin et al., "Online Learning Rate Adaptation with Hypergradient Descent",
   ICLR 2018, equations 5 and 8), with the state from before this step; u = 0 where a bucket is new:
       u   = sign(i) M^_b / (sqrt(V^_b) + eps)
       g_s = -eta <u, g_i>                      normalized: <u, g_i> / (|u| |g_i|), 0 if either is 0
       s_i <- clip(s_i - eta_s g_s, s_min, s_max)          log form: s_i exp(-eta_s g_s) is clipped
   eta_s = hypergradient_rate * eta, divided by max(t_b, 1) with hypergradient_by_frequency=bucket, and with
   =row by max(c_i, 1), where row i's id came c_i times in the training part (``row_counts.py``; not state).
2. For each touched bucket, over its distinct rows in this batch:
       g_b = mean of sign(i) g_i;  q_b = mean of g_i^2, elementwise
3.     M_b <- beta1 M_b + (1 - beta1) g_b;  V_b <- beta2 V_b + (1 - beta2) q_b;  t_b <- t_b + 1
4. scalar=energy:
       e_i <- prior mean_d V^_b                         start=prior, where e_i is 0: it leans on its bucket
       e_i <- decay e_i + (1 - decay) mean_d g_i^2      start=first: an e_i still 0 becomes mean_d g_i^2
       e_i <- e_i + mean_d g_i^2                        decay=1: summed, as rowwise Adagrad does
       s_i = sqrt(mean_d V^_b / e^_i), 0 where e_i = 0
   e^_i = e_i; with correction=table and decay < 1: T <- T + 1 and e^_i = e_i / (1 - decay^T), as lazy Adam
   corrects its V: while the table is young, all its rows take small steps.
   scalar=none: s_i = 1
5. direction:  momentum = sign(i) M^_b;  gradient = g_i;  head_momentum = M^_b if private, else g_i
6. w_i <- w_i - eta s_i direction / (sqrt(V^_b) + eps) - eta lambda w_i
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from recsys_basis.row_optimizers.base import RowOptimizerConfig

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
LEAST_EPS_FLOAT16 = 2.0**-12
"""The root of the least number above 0."""


class BasisConfig(RowOptimizerConfig):
    """Keys of ``rule: basis``; defaults and their reasons in configs/row_optimizer/basis.yaml."""

    direction: Literal["momentum", "gradient", "head_momentum"]
    scalar: Literal["none", "hypergradient", "energy"]
    beta1: Decay
    """Decay of M."""
    beta2: Decay
    """Decay of V."""
    eps: Positive
    moment_dtype: Literal["float32", "bfloat16", "float16"]
    """How V and M are kept."""
    scalar_dtype: Literal["float32", "bfloat16", "float16", "log8"]
    """How s or e is kept."""

    energy_decay: Annotated[float, Field(gt=0.0, le=1.0)]
    """Decay of e; 1 sums."""
    energy_start: Literal["first", "prior"]
    """Where e starts: at the energy of the row's first gradient, or at energy_prior times its bucket's."""
    energy_prior: Annotated[float, Field(ge=0.0)]
    """First e as a multiple of mean_d V^, read with energy_start = prior."""
    energy_correction: Literal["none", "table"]
    """Whether e is divided by 1 - energy_decay^T; no effect where energy_decay = 1."""

    hypergradient_rate: Annotated[float, Field(ge=0.0)]
    """eta_s / eta."""
    hypergradient_form: Literal["linear", "log"]
    hypergradient_normalized: bool
    hypergradient_by_frequency: Literal["none", "bucket", "row"]
    scalar_min: Annotated[float, Field(gt=0.0, le=1.0)]
    """s_min of step 1; s starts at 1."""
    scalar_max: Annotated[float, Field(ge=1.0)]
    """s_max of step 1."""

    rows_per_bucket: Annotated[float, Field(ge=1.0)] | None
    """N / K; every partition has at least one bucket."""
    bucket_rows: Annotated[int, Field(ge=1)] | None
    """K of each table, instead; rounded down to a multiple of P, and never more than N."""
    state_budget: Annotated[str, Field(pattern=r"^\d+(\.\d+)? ?(%|[kMGT]?i?B)$")] | None
    """Bytes of state of all tables under this section together, instead: 200MB, 1.5GiB, or 2% of the moments
    that Adam would keep (``budget.py``)."""
    grow_at: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)]
    """Ascending numbers of steps of the run; after each, shared bucket rows double, where a table then has no
    more of them than rows."""
    head_rows: Annotated[int, Field(ge=0)]
    """H: ids of each table with a bucket of their own, rounded up to a multiple of P."""
    head_bucket_share: Annotated[float, Field(ge=0.0, le=1.0)]
    """H / K, instead of head_rows."""
    hash: Literal["balanced", "murmur3", "double", "modulo"]
    hash_seed: Annotated[int, Field(ge=0)]
    signed: bool

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if sum(each is not None for each in (self.rows_per_bucket, self.bucket_rows, self.state_budget)) != 1:
            raise ValueError(
                "rows_per_bucket, bucket_rows and state_budget each say how many bucket rows there are: give "
                "one of them, and set the others to null"
            )
        if list(self.grow_at) != sorted(set(self.grow_at)):
            raise ValueError(f"grow_at = {list(self.grow_at)}: steps must ascend")
        if self.head_rows > 0 and self.head_bucket_share > 0:
            raise ValueError(
                "head_rows and head_bucket_share both say how many rows are private: set one to 0"
            )
        has_head = self.head_rows > 0 or self.head_bucket_share > 0
        if self.direction == "head_momentum" and not has_head:
            raise ValueError(
                "direction = head_momentum needs private rows: set head_rows or head_bucket_share"
            )
        if self.signed and self.first_moment != "all":
            raise ValueError(
                "signed has no effect here: it needs direction = momentum or scalar = hypergradient"
            )
        if self.moment_dtype == "float16" and self.eps < LEAST_EPS_FLOAT16:
            raise ValueError(
                f"eps = {self.eps}: with moment_dtype = float16 a V below 6e-8 may become 0, and leaves eps "
                f"alone in the divisor; set eps >= {LEAST_EPS_FLOAT16}, or moment_dtype = bfloat16"
            )
        if self.scalar_dtype == "log8" and self.scalar == "hypergradient":
            raise ValueError(
                "scalar_dtype = log8 has steps of 26 %, too coarse for scalar = hypergradient between its "
                "clips; set bfloat16"
            )
        if self.scalar_dtype == "float16" and self.scalar == "energy":
            raise ValueError(
                "scalar_dtype = float16 ends at 6e-8, above the squares of usual gradients: with "
                "scalar = energy set bfloat16 or log8"
            )
        return self

    @property
    def needs_counts(self) -> bool:
        """As in the base class."""
        return self.scalar == "hypergradient" and self.hypergradient_by_frequency == "row"

    @property
    def corrects_energy(self) -> bool:
        """Whether T is kept."""
        return self.scalar == "energy" and self.energy_correction == "table" and self.energy_decay < 1

    @property
    def first_moment(self) -> Literal["all", "private", "none"]:
        """Which bucket rows keep M."""
        if self.direction == "momentum" or self.scalar == "hypergradient":
            return "all"
        return "private" if self.direction == "head_momentum" else "none"
