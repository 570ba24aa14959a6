"""recsys_basis: click models whose embedding tables share their optimizer state.

The data flow, top to bottom:

1. ``ingest``          raw click logs  ->  Parquet + manifest + vocabulary
2. ``batches``         Parquet         ->  dense [B, 13], sparse KeyedJaggedTensor, label [B]
3. ``embeddings``      sparse          ->  pooled vectors [B, F * D], sharded over ranks
   ``row_optimizers``  gradients [U, D] of the U distinct rows  ->  weights, inside backward
4. ``models``          dense + pooled  ->  one logit a row
5. ``metrics``         logits          ->  AUC, log loss, normalized entropy, calibration
6. ``report``          finished runs   ->  comparison table and plot

Jobs: ``synthesize``, ``prepare``, ``plan``, ``train``, ``compare``, ``inspect``, ``doctor``.
Shape letters: ``shapes.py``.
"""

__version__ = "0.1.0"
