"""Several runs that differ in one thing, judged side by side.

spec.py     which variants, seeds and learning rates
runs.py     runs in processes of their own, each finished once
search.py   each variant's own learning rate, chosen without the test rows
"""
