"""Few cases instead of a product of parameters."""

from collections.abc import Collection
from itertools import combinations, product
from typing import Any

import pytest


def every_pair(**choices: Collection[Any]) -> pytest.MarkDecorator:
    """Parametrise a test so that every two values of two parameters meet in a case, chosen greedily and always the same way."""
    cases = [tuple(enumerate(case)) for case in product(*(range(len(values)) for values in choices.values()))]
    left = {pair for case in cases for pair in combinations(case, 2)}
    chosen = []
    while left:
        best = max(cases, key=lambda case: len(left & set(combinations(case, 2))))
        left -= set(combinations(best, 2))
        chosen.append([list(values)[index] for values, (_, index) in zip(choices.values(), best, strict=True)])
    return pytest.mark.parametrize(tuple(choices), chosen)
