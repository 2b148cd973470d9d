"""One training loop, with checkpoints, progress and distillation."""

from dendritic_lab.evaluate import accuracy, predict, token_loss

from .checkpoint import CheckpointError
from .distillation import distillation_loss
from .loop import DivergenceError, fit
from .settings import Settings
from .state import Fit
