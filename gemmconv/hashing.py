"""Values that are keys of caches again and again: their hash is worked out once."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


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
