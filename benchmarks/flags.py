"""Values of command-line flags, given with commas between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def separated(text: str) -> tuple[str, ...]:
    """The parts between commas.

    >>> separated("auto, native,")
    ('auto', 'native')
    """
    return tuple(name for name in (part.strip() for part in text.split(",")) if name)


def chosen(flag: str, given: Sequence[str] | None, known: Iterable[str], default: Sequence[str]) -> tuple[str, ...]:
    """The values of a flag, in the order of ``known``.

    Raises:
        ValueError: an unknown one.
    """
    known = list(known)
    if given is None:
        return tuple(default)
    for name in given:
        if name not in known:
            raise ValueError(f"argument {flag}: must be of {', '.join(known)}, got {name!r}")
    return tuple(name for name in known if name in given)
