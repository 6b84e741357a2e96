"""A command shared by several GPUs: it runs in a process for each, and each measures a share of the layers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence


def run_in_processes(
    module: str, arguments: Sequence[str], flags: Sequence[Sequence[str]], variables: Sequence[Mapping[str, str]] = ()
) -> int:
    """Run ``python -m module`` at once for each list of flags of its own. Returns the largest exit status.

    Args:
        module: of the command.
        arguments: of all processes; flags come after them, and count where both have one.
        flags: of each process.
        variables: of the environment of each process, where they need any.
    """
    command = [sys.executable, "-m", module, *arguments]
    environments = [{**os.environ, **own} for own in variables or [{}] * len(flags)]
    running = [
        subprocess.Popen([*command, *own], env=environment)
        for own, environment in zip(flags, environments, strict=True)
    ]
    try:
        return max(process.wait() for process in running)
    except KeyboardInterrupt:  # which the processes have got too; they may still write files
        return max(process.wait() for process in running)
