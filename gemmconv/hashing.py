"""What follows from values that do not change, their hash as keys of caches and more, is worked out once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class cached_property(Generic[T]):  # named as what it stands for
    """functools.cached_property without its lock, which before Python 3.12 takes longer than most values do."""

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function, self._name, self.__doc__ = function, function.__name__, function.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        if instance is None:
            return self  # type: ignore[return-value]
        value = instance.__dict__[self._name] = self._function(instance)
        return value


def hashed_once(cls: type[T]) -> type[T]:
    """Make a frozen dataclass keep its hash. It is not pickled: that of a string is another one in another process."""
    of_fields: Any = cls.__hash__

    def __hash__(self: Any) -> int:
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            known = self.__dict__["_hash"] = of_fields(self)
        return known

    def __getstate__(self: Any) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    kept: Any = cls
    kept.__hash__, kept.__getstate__ = __hash__, __getstate__
    return cls
