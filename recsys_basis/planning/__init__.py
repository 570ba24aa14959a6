"""What a model's tables would cost on ranks that are not there.

spec.py       which tables, ranks and memory
placement.py  where TorchRec's planner would put the tables, and how many ranks they need
report.py     all of it as tables for people
"""
