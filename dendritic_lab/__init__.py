"""Reproducible research on neural networks inspired by dendrites."""

__version__ = "0.1.0"

from .torchvision_ops import install_finder

install_finder()
del install_finder
