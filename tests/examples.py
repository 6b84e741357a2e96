"""Tests that share the examples of a hypothesis strategy, where to draw them takes longer than to look at them."""

import functools
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

Test = Callable[[Any], None]


def each_of(strategy: SearchStrategy[Any]) -> Callable[[Test], Callable[[], None]]:
    """Run tests on examples of a strategy, as many as hypothesis would draw for each of them; all on the same ones."""

    @functools.cache
    def examples() -> list[Any]:
        found = []

        @settings(phases=[Phase.generate], database=None, suppress_health_check=[*HealthCheck])
        @given(strategy)
        def draw(example: Any) -> None:
            found.append(example)

        draw()
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
