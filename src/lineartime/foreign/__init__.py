"""Checkpoints of other packages, from GAU-alpha and FLASH-pytorch, and the layers that only they need (`mixers`)."""
