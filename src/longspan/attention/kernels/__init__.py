"""Triton and Gluon kernels for GPUs, and how they are launched."""
