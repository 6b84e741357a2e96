"""Compiles translated kernels and the scheduler into shared libraries, a few at a time, and keeps them in a folder."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tests.emulator.translate import Read, translate

_HERE = Path(__file__).parent
_OPTIONS = ["-std=c++17", "-shared", "-fPIC", "-w", "-U_FORTIFY_SOURCE"]
# The scheduler has the handlers of the checks, so that a mistake ends a launch and not the process: no libubsan, hence
# -nostdlib. What is needed of libc is there already.
_KERNEL_OPTIONS = [
    *("-Og", "-fvisibility=hidden", "-fno-strict-aliasing", "-ffp-contract=off", "-nostdlib"),
    "-fsanitize=alignment,bounds,signed-integer-overflow,integer-divide-by-zero,shift",
    "-fno-sanitize-recover=all",
]
_TRAPS = "-fsanitize-undefined-trap-on-error"  # instead of calls of handlers, which take a fifth of a compiler's time
# What a compiler says that was kept from its work, by a shortage of processes or memory mostly.
_HINDRANCES = ("Resource temporarily unavailable", "Cannot allocate memory", "Killed signal", "cannot execute")
_PAUSES = (1, 2, 4, 8, 15, 30, 60)  # seconds between tries
_AFTER_OTHERS = ["nice", "-n", "10"] if shutil.which("nice") else []  # tests go first
_KEPT_SECONDS = 3 * 24 * 3600  # for libraries that no test has used
_SCHEDULERS: dict[str, ctypes.CDLL] = {}  # of the process, whatever their folder: kernels would mix the symbols of two


@functools.cache
def compiler() -> str | None:
    """Path of the C++ compiler, None where there is none."""
    return shutil.which("g++") or shutil.which("c++")


class Builder:
    """Builds into one folder. Methods return at once; the libraries are there when their futures are done."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.glob("*.so"):
            with contextlib.suppress(FileNotFoundError):  # another process was first
                if time.time() - file.stat().st_mtime > _KEPT_SECONDS:
                    file.unlink()
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._builds: dict[Path, Future[Path]] = {}
        self._header = (_HERE / "cuda.h").read_text()
        text = (_HERE / "scheduler.cpp").read_text()
        self._scheduler = self._submit("scheduler", text, [*_OPTIONS, "-O2", f"-I{_HERE}"])

    @functools.cached_property
    def scheduler(self) -> ctypes.CDLL:
        """The library that launches kernels; the libraries of the kernels take symbols from it."""
        path = self._scheduler.result()
        if path.name not in _SCHEDULERS:
            _SCHEDULERS[path.name] = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        library = _SCHEDULERS[path.name]
        library.emulator_launch.restype = ctypes.c_char_p
        library.emulator_launch.argtypes = [*[ctypes.c_void_p] * 4, *[ctypes.c_size_t] * 2]
        return library

    def kernel(
        self, source_name: str, macros: Mapping[str, str | int], read: Read, explains: bool = False
    ) -> Future[Path]:
        """The library of a source, specialised by macros; one that explains says which check fails, and where."""
        defines = "".join(f"#define {name} {value}\n" for name, value in sorted(macros.items()))
        text = f"{defines}{translate(source_name, read)}"
        options = [*_OPTIONS, *_KERNEL_OPTIONS, *([] if explains else [_TRAPS]), f"-I{_HERE}", "-includecuda.h"]
        return self._submit(Path(source_name).stem, text, options)

    def close(self) -> None:
        """Give up what is not built yet."""
        self._pool.shutdown(cancel_futures=True)

    def _submit(self, name: str, text: str, options: list[str]) -> Future[Path]:
        parts = str(compiler()), *options, self._header, text
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
        library = self._folder / f"{name}-{digest}.so"
        if library not in self._builds:
            self._builds[library] = self._pool.submit(self._build, library, text, options)
        return self._builds[library]

    def _build(self, library: Path, text: str, options: list[str]) -> Path:
        if library.exists():
            library.touch()
            return library
        part = library.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        command = [*_AFTER_OTHERS, str(compiler()), *options, "-xc++", "-", "-o", str(part)]
        result = _run(command, text)
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{result.stderr}")
        part.replace(library)
        return library


def _run(command: list[str], text: str) -> subprocess.CompletedProcess[str]:
    """Run a compiler; again, after a while, where something kept it from its work.

    The compiler was found, so whatever keeps it from starting may be gone in a moment. If it stays, that costs the
    pauses once: the scheduler, which everything needs, is built first.
    """
    for pause in (*_PAUSES, None):
        try:
            result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        except OSError:
            if pause is None:
                raise
        else:
            hindered = result.returncode < 0 or any(sign in result.stderr for sign in _HINDRANCES)
            if result.returncode == 0 or not hindered or pause is None:
                return result
        time.sleep(pause)
    raise AssertionError("the last try returns or raises")
