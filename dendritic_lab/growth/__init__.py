"""Grown dendrites: PerforatedAI contained, its result as plain PyTorch, folding, quantisation."""

from .plain import dendrite_layout, export, exported_param_count, grown_class, grown_param_count, load_grown, put_dendrites
from .session import GrowthConfig, GrowthError, GrowthSession, growth_session
