"""What models cost in time and memory.

This package imports nothing by itself: `lineartime.bench.measure` and `lineartime.bench.subjects` need only PyTorch and numpy.
"""
