"""Attention over a sequence that is split across ranks (sequence, or context, parallelism)."""
