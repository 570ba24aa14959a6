"""Prepared Parquet to batches.

batch.py    what a batch is: dense [B, 13], sparse KeyedJaggedTensor, label [B]
parquet.py  rows of Parquet files in bounded memory, by row group
stream.py   which rows make which batch on which rank, in which order
"""
