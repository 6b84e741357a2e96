"""gemmconv's own exceptions. Every other error has the type that torch raises for this mistake."""

from __future__ import annotations

from collections.abc import Sequence


class KernelError(RuntimeError):
    """A kernel is not available on this machine, whatever the input. ``auto`` takes torch's operator instead.

    Attributes:
        cause: the line that a warning shows; equal for all kernels that fail for one reason.
    """

    def __init__(self, message: str, cause: str | None = None) -> None:
        super().__init__(message)
        self.cause = cause or message


class CompileError(KernelError):
    """A kernel did not compile: a defect of gemmconv or of the installed CUDA compiler, never of the input.

    Attributes:
        cause: the first error that the compiler printed.
        source_name: file name of the kernel under ``csrc``.
        options: the compiler options, macros included.
        log: the compiler's output.
        source: the source text that was compiled.
    """

    def __init__(self, source_name: str, options: Sequence[str], log: str, source: str) -> None:
        self.source_name = source_name
        self.options = tuple(options)
        self.log = log
        self.source = source
        numbered = "\n".join(f"{number:5d}  {line}" for number, line in enumerate(source.splitlines(), start=1))
        lines = [line.strip("\0 ") for line in log.splitlines()]
        first = next((line for line in lines if ": error: " in line), lines[0] if lines else "")
        super().__init__(
            f"{source_name} did not compile\noptions: {' '.join(options)}\nlog:\n{log}\nsource:\n{numbered}",
            f"a kernel did not compile: {first}; a named algorithm raises all that the compiler printed",
        )

    def __reduce__(self) -> tuple[type[CompileError], tuple[str, tuple[str, ...], str, str]]:
        return type(self), (self.source_name, self.options, self.log, self.source)
