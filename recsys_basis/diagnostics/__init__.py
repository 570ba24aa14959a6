"""What the row optimizer does to each table, read from outside while a run trains.

watch.py     which rows a step touched, and their weights before
buckets.py   how a shard's rows share its buckets, and the rows that are looked at: found once
reading.py   numbers of one table shard on one rank, after a step
merging.py   the shards of a table put together
recorder.py  when a step is due, all of that over all ranks
"""
