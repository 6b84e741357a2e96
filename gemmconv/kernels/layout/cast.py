"""Casts of weights and biases under autocast, and of their gradients: host side of csrc/layout/cast.cu."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch

from gemmconv.kernels.macros import ELEMENT_TYPES, Macros
from gemmconv.kernels.program import Launch, Long, Params

ALIGNMENT = 16  # bytes, of sources and targets
_THREADS, _UNIT = 256, 8  # threads of a block, elements of a thread

Tensor = tuple[str, str, int]  # names of the source and of the target, and elements


def casts(tensors: Iterable[Tensor], source: torch.dtype, target: torch.dtype) -> Iterator[Launch]:
    """The launches that round tensors to a 16-bit dtype, or widen them to float32, up to two tensors in each.

    >>> [launch.grid for launch in casts([("weight", "cast", 4096), ("bias", "too", 3)], torch.float, torch.half)]
    [(3, 1, 1)]
    """
    macros: Macros = {"SOURCE_T": ELEMENT_TYPES[source], "TARGET_T": ELEMENT_TYPES[target]}
    left = iter(tensors)
    while pair := list(itertools.islice(left, 2)):
        (first, first_cast, elements), *more = pair
        second, second_cast, others = more[0] if more else (None, None, 0)
        blocks, of_second = (-(-count // (_THREADS * _UNIT)) for count in (elements, others))
        params: Params = {
            "first_source, first_target": (first, first_cast),
            "second_source, second_target": (second, second_cast),
            "first_elements, second_elements": (Long(elements), Long(others)),
            "first_blocks": blocks,
        }
        yield Launch("layout/cast.cu", macros, (max(1, blocks + of_second), 1, 1), (_THREADS, 1, 1), params)
