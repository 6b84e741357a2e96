"""What shows that a change of structure changed nothing else: commands for developers, no tests.

python -m tests.gates.choices            what ``auto`` takes for every suite, beside tests/data/choices.csv
python -m tests.gates.choices --write    writes that file anew
python -m tests.gates.kernels main       compiled kernels, beside those of another commit
"""
