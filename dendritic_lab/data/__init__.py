"""Data sets and checkpoints from a local folder, the hub or Python packages."""

from .benchmarks import BENCHMARKS, available, load
from .language import DOMAINS
from .questions import QUESTIONS
from .sources import DataError, checkpoint_path, fetch
from .tables import hold_out_sentences
