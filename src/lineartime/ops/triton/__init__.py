"""Kernels for GPUs. Triton may be absent, and is imported where a kernel is launched."""
