"""Benchmarks: networks and the host in wall-clock time, and every algorithm beside torch's settings and the floor.

Run as ``python -m benchmarks.networks``, ``python -m benchmarks.host`` and ``python -m benchmarks.compare``.

networks      whole networks, torch's own and converted: inference and training steps, in every run mode
host          the host's part of a call
turns         what these two share: torch and gemmconv by turns, a row for each thing that is waited for
waiting       their tables
workloads     which layers: suites, and the one-line notation of a layer
environment   where and with what: device, driver, versions, commit
reference     the same layers in float64
contenders    what is compared: gemmconv's algorithms, and torch in its settings
timing        samples of device time, and CUDA graphs
floor         the least time that the machine allows
measure       one row for each contender and direction; a wrong result is never timed
results       the files: JSON to go on from, CSV to read
summary       geometric means, worst cases, rows that lose
check         two result files, row by row
random_layers layers that nobody picked, the same for a seed
compile_time  what compiling a training step's kernels takes, beside another checkout
first_call    what the first call of a layer costs, in a process of its own
plot          charts of speed-ups
report        summary, charts and the tables of docs/guide/results.md
compare       the command line
commands      what command lines share: flags, progress, processes for several GPUs
precompile    kernels compiled ahead, in processes
rows          measured times of every kernel and of torch's operator, for many layers
fit           corrections of estimates, fitted to the times that rows keeps
fold          col2im and im2col alone
volumes       layers of volumes, device time and wall-clock time
kernelbench   KernelBench's problems with a transposed convolution, converted
algorithms    every algorithm beside torch on a few layers: tables and a chart, for `make demo`
cpu           layers and networks on a CPU: every algorithm beside torch, as calls of modules
cpu_fit       the rule by which auto chooses on a CPU, fitted to rows of cpu
"""
