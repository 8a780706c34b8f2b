"""What models cost in time and memory: `lineartime bench`.

Nothing is imported here: `lineartime.bench.measure` and `lineartime.bench.subjects` need no more than PyTorch and numpy.
"""
