"""Build the C++ extension ahead of its first use."""

import sys

from .cpp import _library

library, reason = _library()
print(f"not built: {reason}" if reason else f"built {library._name}")
sys.exit(reason is not None)
