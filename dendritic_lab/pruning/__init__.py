"""Pruning of single weights and of whole units."""

from .structured import (
    Unit, list_units, magnitude_unit_scores, mask_units, random_unit_scores, shrink, taylor_unit_scores, unit_masks, units_for_sparsity, weakest_units)
from .unstructured import (
    CubicSchedule, Sparsity, active_weights, apply_masks, hold_masks, load_masks, magnitude_scores, make_masks, prunable_weights, prune_gradually, random_scores,
    save_masks, sparsity, wanda_scores)
