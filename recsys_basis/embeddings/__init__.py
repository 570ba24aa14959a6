"""Sparse ids to pooled vectors, sharded over ranks, updated inside backward.

bags.py      our table-batched embedding bags: lookup, duplicates summed, row optimizer
weights.py   a group's weights, in as many bits as wanted
features.py  the features of a group, and the bags of a batch
torch_lookup.py, cpp_lookup.py    lookup, sums of duplicates and update: in plain PyTorch, by C++ kernels
choice.py    which of them runs
striping.py  ids to rows, so that row-wise shards share the hot ids
kernel.py    the bags as a TorchRec compute kernel
state.py     their optimizer state as a TorchRec fused optimizer: ShardedTensors by table name
collection.py  numbers of ids to tables and to TorchRec's collection of them
replicas.py  data-parallel tables: one update for the gradients of all ranks
sharder.py   the door into EmbeddingBagCollection and DistributedModelParallel
plan.py      which table goes where, from TorchRec's planner
constraints.py, storage.py    what the planner may choose from, and what each choice costs
initial.py   initial weights, the same for every number of ranks
"""
