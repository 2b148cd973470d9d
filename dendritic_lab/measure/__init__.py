"""Size, speed, memory, energy, and how sure the figures are. Modules are loaded when a name is first used."""

import importlib

_places = {
    "modes": ["evaluating"],
    "size": ["ParamCount", "count_flops", "count_operators", "count_params", "file_size", "state_bytes"],
    "speed": ["Comparison", "compare_forward", "compare_latencies", "compare_latency", "energy", "peak_memory"],
    "statistics": ["MARKERS", "Interval", "geometric_interval", "interval", "joint_verdict", "label_lines",
                   "median_interval", "number", "plot_intervals", "seed_interval", "verdict"]}
_module_of = {name: module for module, names in _places.items() for name in names}
__all__ = list(_module_of)


def __getattr__(name: str):
    if name not in _module_of: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_module_of[name]}"), name)
