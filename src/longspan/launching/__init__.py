"""Launching the processes of a run."""
