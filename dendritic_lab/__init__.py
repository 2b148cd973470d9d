"""Reproducible research on neural networks inspired by dendrites."""

__version__ = "0.1.0"

from .extras import leave_out_noise
from .torchvision_ops import install_finder

install_finder()
leave_out_noise()
del install_finder, leave_out_noise
