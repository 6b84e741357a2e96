"""Compare the algorithms with torch on a real photograph. Run as ``python -m gemmconv``.

layers   which layers, and how they shrink on a CPU
photo    the input: windows of a photograph
timing   median times on CUDA and CPU
measure  one row per layer and algorithm; a wrong result is never timed
report   the table and the chart
"""

from __future__ import annotations

from importlib.util import find_spec


def require_demo_extra() -> None:
    """Raise ModuleNotFoundError if a package of the extra ``demo`` is not installed; the message names the extra."""
    missing = [name for name in ("rich", "matplotlib", "PIL") if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(f"the comparison needs {', '.join(missing)}; run: pip install 'gemmconv[demo]'")
