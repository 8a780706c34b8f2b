"""What models cost in time and memory.

Nothing is imported here: `lineartime.bench.measure` and `lineartime.bench.subjects` need only PyTorch and numpy.
"""
