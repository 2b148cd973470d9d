"""Pruning of single weights and of units."""

from .comparison import Pruned, Start, core_left, find_start, prune_all, rise_from
from .masks import (
    ActiveWeights, Sparsity, active_weights, apply_masks, check_masks, load_masks, make_masks, save_masks, sparsity,
    two_of_four_masks)
from .quantised import core_bytes, round_weights
from .recovery import METHODS, prune_units, prune_weights, search_recovery
from .scores import magnitude_scores, prunable_weights, random_scores, wanda_scores
from .sparsegpt import sparsegpt
from .structured import shrink
from .unit_scores import (
    magnitude_unit_scores, random_unit_scores, taylor_unit_scores, units_for_sparsity, weakest_units)
from .units import Unit, check_units, list_units, mask_units, unit_masks
from .unstructured import CubicSchedule, hold_masks, prune_gradually
