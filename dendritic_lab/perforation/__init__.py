"""Sparse attention and pruned caches for models that one already has."""

from ..layers.blocks import Layout, keep_blocks
from ..layers.selectors import DistilledGate, Oracle, PooledTopK, WindowSink, attention_mass, gate_loss
from .attention import Perforation, perforate
from .cache import CachePruning, PrunedLayer, prune_cache
from .calibration import distil_gates, gate_tensors, head_budgets, head_costs, load_gates, tune_gates
