"""Caches of values computed from immutable objects: their properties, and their hash; and copies without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class cached_property(Generic[T]):  # named after functools.cached_property
    """functools.cached_property without its lock, which before Python 3.12 takes longer than most values take."""

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function, self._name, self.__doc__ = function, function.__name__, function.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        if instance is None:
            return self  # type: ignore[return-value]
        value = instance.__dict__[self._name] = self._function(instance)  # where Python looks first from now on
        return value


def hashed_once(cls: type[T]) -> type[T]:
    """Make a frozen dataclass cache its hash. It is not pickled: strings have another hash in another process."""
    of_fields: Any = cls.__hash__

    def __hash__(self: Any) -> int:
        cached: int | None = self.__dict__.get("_hash")
        if cached is None:
            cached = self.__dict__["_hash"] = of_fields(self)
        return cached

    def __getstate__(self: Any) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    changed: Any = cls
    changed.__hash__, changed.__getstate__ = __hash__, __getstate__
    return cls


def changed(record: T, **changes: Any) -> T:
    """``dataclasses.replace`` without ``__post_init__``, several times as fast; may set cached properties, too."""
    of_class: Any = type(record)
    copy: T = object.__new__(of_class)
    own = record.__dict__
    copy.__dict__.update({name: own[name] for name in of_class.__match_args__}, **changes)  # as __init__ names them
    return copy
