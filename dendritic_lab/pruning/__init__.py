"""Pruning of single weights and of whole units."""
