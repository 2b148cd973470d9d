"""Grown dendrites: PerforatedAI contained, its result as plain PyTorch, folding, quantisation."""

from .fitting import fit_growing
from .folding import FoldedLayer, Folding, fold, folding_curve
from .plain import (dendrite_layout, export, exported_param_count, grown_class, grown_param_count, load_grown,
                    put_dendrites)
from .quantised import quantisation_curve, quantise, quantised_bytes
from .session import GrowthSession, growth_session
from .settings import GrowthConfig, GrowthError
from .trainer import GrowthCallback
