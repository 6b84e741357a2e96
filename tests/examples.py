"""Tests that share the examples of hypothesis strategies, where to draw them takes longer than to look at them."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

Test = Callable[[Any], None]


def any_of(draw: Callable[..., Any], found: Iterable[Any]) -> Any:
    """Any of what was found for an example, which does not count where that is nothing."""
    assume(found := [*found])
    return found[draw(st.integers(0, 10_000)) % len(found)]


def each_of(*strategies: st.SearchStrategy[Any]) -> Callable[[Test], Callable[[], None]]:
    """Run tests on examples of each strategy, as many as hypothesis would draw for a test; all on the same ones."""

    @functools.cache
    def examples() -> list[Any]:
        found = []

        @settings(phases=[Phase.generate], database=None, suppress_health_check=[*HealthCheck])
        def draw(example: Any) -> None:
            found.append(example)

        for strategy in strategies:
            given(strategy)(draw)()
        return found

    def decorate(test: Test) -> Callable[[], None]:
        def on_each() -> None:
            for example in examples():
                try:
                    test(example)
                except BaseException:
                    print(f"of {example}")
                    raise

        on_each.__name__, on_each.__doc__, on_each.__module__ = test.__name__, test.__doc__, test.__module__
        return on_each

    return decorate
