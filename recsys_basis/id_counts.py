"""How often each id of a table came in the training part, in a few numbers.

Ids are ordered by falling count, so neighbours often came equally often: they are one run. In T training
rows there are at most sqrt(2 T) + 1 runs, since ids 1, 2, ... have no more different counts, and id 0
(missing or rare) stands apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class IdCounts:
    """starts [runs] int64: the first id of each run, from 0 on; counts [runs] int64: of its every id."""

    starts: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, counts: np.ndarray) -> IdCounts:
        """Of ``counts`` [num_ids] int64, in the order of ids."""
        starts = np.flatnonzero(np.diff(counts, prepend=-1))
        return cls(torch.from_numpy(starts), torch.from_numpy(counts[starts]))
