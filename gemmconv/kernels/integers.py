"""Integer arithmetic for choosing tiles."""

from __future__ import annotations

INT32_MAX = 2**31 - 1


def power_of_two(value: int) -> int:
    """The least power of two that is not less than a value.

    >>> power_of_two(0), power_of_two(5), power_of_two(8)
    (1, 8, 8)
    """
    return 1 << max(0, value - 1).bit_length()


def even_share(total: int, most: int) -> int:
    """The size of the parts when ``total`` is cut into as few even parts as ``most`` allows.

    As well the number of parts that are not empty when it is cut into ``most`` parts of one size.

    >>> even_share(9, 8), even_share(16, 8)
    (5, 8)
    """
    return -(-total // -(-total // most))


def up_to_multiple(value: int, multiple: int) -> int:
    """The least multiple that is not less than a value."""
    return -(-value // multiple) * multiple


def covering(extent: tuple[int, int], size: tuple[int, int]) -> tuple[int, int]:
    """Tiles of a size that cover an extent, down and across."""
    return -(-extent[0] // size[0]), -(-extent[1] // size[1])


def power_of_two_within(wanted: int, most: int) -> int:
    """The least power of two that is at least ``wanted``, limited to the greatest power of two up to ``most``."""
    return min(power_of_two(wanted), 1 << (max(1, most).bit_length() - 1))
