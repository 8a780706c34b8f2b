"""What models cost in time and memory; `lineartime.bench.measure` needs only PyTorch and numpy."""
