"""What shows that a change of structure changed nothing else: commands for developers.

- ``python -m tests.gates.choices``: what ``auto`` takes for every suite, beside tests/data/choices.csv, which
  ``--write`` writes anew.
- ``python -m tests.gates.kernels COMMIT``: compiled kernels, beside those of another commit.
- ``python -m tests.gates.cpu_sanitizers``: random layers on a CPU under address and undefined-behaviour sanitizers.
- ``python -m tests.gates.modes``: branches of kernels that no layer of any suite takes.
"""
