"""One training loop, with checkpoints, progress and distillation."""

from .checkpoint import CheckpointError
from .loop import DivergenceError, Fit, Settings, accuracy, distillation_loss, fit, predict, token_loss
