"""Size, speed, memory, energy, and how sure the figures are."""

from .evaluating import evaluating
from .size import ParamCount, count_flops, count_params, file_size
from .speed import Comparison, compare_latency, energy, peak_memory, throughput
from .statistics import Interval, McNemar, bootstrap_interval, mcnemar
