"""Weights in the formats of other libraries."""
