"""One training run.

spec.py         the run's config
runtime.py      ranks, device, threads
build.py        config + data -> sharded model and its optimizers
communication.py  fewer bits between ranks
schedule.py     step -> learning-rate factor, for dense and embedding optimizers alike
clipping.py     one gradient norm over towers and embedding rows
loop.py         the run itself
evaluation.py   logits of every evaluated row -> metrics
stopping.py     SIGTERM: all ranks save at the same step and end
run_folder.py   what a run leaves behind
"""
