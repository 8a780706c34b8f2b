"""Training: options (config.py), loop (loop.py), checkpoints (checkpoint.py), what is shown and recorded (reporting.py)."""
