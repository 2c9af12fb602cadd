"""Parallelism: the mesh of processes, and how a model is split over it."""
