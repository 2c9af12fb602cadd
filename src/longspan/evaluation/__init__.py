"""Evaluates trained models: losses by position and by document, and recall by distance."""
