"""Legend of the shape letters used in every comment and docstring of this package.

| letter | meaning |
|---|---|
| B | rows of a batch on this rank |
| F | embedding features (26 categorical columns for Criteo) |
| L | ids in the bags of a batch, all features together |
| N | rows of one table; a multiple of P |
| P | virtual partitions of one table (``tables.py``) |
| R | rows of all table shards of a group on this rank |
| D | embedding width |
| U | distinct rows touched in a step |
| K | bucket rows of shared optimizer state of one table; a multiple of P. B is never buckets |
| H | head rows of one table, each with a bucket of its own |
| W | ranks (world size) |
| T | tables of a group |
| C | bucket rows touched in a step |
| S | seeds, in the statistics of a comparison |
"""
