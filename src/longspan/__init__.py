"""Longspan trains long-context transformers from one run file."""

__version__ = "0.1.0"
