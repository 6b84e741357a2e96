"""The cache of prepared calls, and of answers about calls: a dictionary by signature that drops its oldest entry."""

from __future__ import annotations

import marshal
import threading
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from gemmconv import tuned

entries: dict[Hashable, Any] = {}  # emptied, never replaced: csrc/signature.c holds this object
_lock = threading.Lock()  # held while entries are added or cleared
_MOST_ENTRIES = 4096
_times_cleared = 0


def find_or_make(key: Hashable, make: Callable[[], Any]) -> Any:
    """Return the entry of a key; where there is none, make it and add it, unless it is None.

    An entry is not added if tuned choices changed while it was made, by which it may not be chosen. A key that is None
    stands for a call that is not cached.
    """
    if key is None:
        return make()
    entry = entries.get(key)
    if entry is None:
        before = _times_cleared
        entry = make()
        with _lock:
            if entry is not None and before == _times_cleared:
                if len(entries) >= _MOST_ENTRIES:
                    del entries[next(iter(entries))]
                entries[key] = entry
    return entry


def _clear() -> None:
    global _times_cleared
    with _lock:
        entries.clear()
        _times_cleared += 1


tuned.on_change.append(_clear)  # calls that were prepared before are then prepared and chosen anew


def tensor_signature(tensor: Tensor | None) -> Hashable:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def arguments_key(arguments: Any) -> bytes | None:
    """Bytes that tell 1, 1.0 and True apart, which are equal but not all allowed; None for other types.

    Lists are hashed this way several times as fast as after a conversion to tuples.
    """
    try:
        return marshal.dumps(arguments, 2)
    except ValueError:
        return None
