"""Everything a run is, on disk: whole or not at all, and reading it runs no code.

A checkpoint is a folder ``step-N`` of torch.distributed.checkpoint files. Its tensors are keyed by names,
never by ranks:

    model/<parameter>                      tables as ShardedTensors in row order (``tables.py``)
    row_optimizer/<table>.<state>          as each row optimizer declares it
    dense_optimizer/<parameter>/<state>
    tower_average/<parameter>              where the run keeps one
    rng/<rank>/<device>                    the one exception: torch's generators, for rules that draw

and ``progress.json`` beside them: step, position in the data, evaluation, layout, identity, checksums.

folder.py   which checkpoints a run has, their records, checksums, and which are kept
save.py     in the background, to ``step-N.partial``, renamed when whole
load.py     at any number of ranks; what does not fit is refused key by key
layout.py   what must agree between checkpoint and run
growth.py   tables that have more rows now
state.py    a run's tensors under their names
index.py    DCP's pickled index, read safely
"""
