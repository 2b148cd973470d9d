"""Sparse attention and pruned caches for models that one already has."""

from .attention import Perforation, perforate
from .cache import CachePruning, PrunedLayer, prune_cache
from .selectors import DistilledGate, Layout, Oracle, PooledTopK, WindowSink, attention_mass, gate_loss, keep_blocks
