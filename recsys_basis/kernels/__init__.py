"""Fused C++ kernels for lookup, row updates and Balanced Adam on a CPU; plain PyTorch is their truth.

extension.py   the compiled module, or why there is none
stored.py      tensors kept in fewer bits, to float32 and back
rules.py       a row optimizer's state and settings, handed to its C++ rule
cpp/           the sources; read arrays.h first, then lookup.h, sum_rows.h, rules.h, basis.h
"""
