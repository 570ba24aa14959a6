"""Raw click logs to Parquet, vocabulary and manifest.

``raw_files`` bytes of plain or .gz files, in blocks of whole lines
``lines``     a block of lines -> typed columns, or which line is bad and why
``staging``   pass 1: all lines -> one temporary Parquet file
``vocabulary``pass 2: the training part -> ids of every categorical column
``encoding``  pass 3: staged rows -> ids and scaled integers, in train/ and test/
``manifest``  what a prepared folder holds; ``folders`` makes it appear whole or not at all
``synthetic`` raw lines of clicks whose true probabilities are known (``teacher``)

The job that runs the passes is ``recsys_basis.prepare``.
"""
