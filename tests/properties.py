"""Properties that the default suite shows on few examples, and a campaign on many."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings


def few_and_many(few: int, many: int, *strategies: Any) -> Callable[[Callable], Callable]:
    """Run a property on `few` examples; the second case, which is `campaign`, takes `many`."""

    def decorate(holds: Callable) -> Callable:
        @pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.campaign)])
        def test(examples: int) -> None:
            settings(max_examples=examples)(given(*strategies)(holds))()

        test.__name__, test.__doc__ = holds.__name__, holds.__doc__
        test.__module__, test.__qualname__ = holds.__module__, holds.__qualname__
        return test

    return decorate
