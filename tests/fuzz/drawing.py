"""What the searches draw: sizes, dtypes, values, layouts; and how they count."""

from __future__ import annotations

import collections
import functools

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.arrays import DTYPES, to_paddle
from helpers.layouts import LAYOUTS, expanded
from helpers.values import FINITE, SPECIAL, Values

# Examples per test, for the report of a long run.
EXAMPLES: collections.Counter = collections.Counter()

dtypes = st.sampled_from(DTYPES)

# Around the vector widths of all dtypes; primes; the block of a sum.
SMALL = (0, 1, 2, 3, 5, 7, 8, 13, 15, 16, 17, 31, 32, 33, 47, 64, 65, 97, 127, 131)
LARGE = (251, 256, 257, 509, 521, 1000, 1023, 1024, 1025, 1031, 2053)


def fuzz(share: float = 1.0, **strategies):
    """A search over the strategies; share of the profile's number of examples."""

    def decorate(test):
        @functools.wraps(test)
        def counted(**arguments):
            EXAMPLES[test.__name__] += 1
            test(**arguments)

        wanted = max(1, int(settings.default.max_examples * share))
        return settings(max_examples=wanted)(given(**strategies)(counted))

    return decorate


@st.composite
def sizes(draw, smallest: int = 0) -> tuple[int, int]:
    """(rows, width): small, wide, or very many rows of next to nothing."""
    kind = draw(st.sampled_from(["small", "small", "small", "wide", "tall"]))
    if kind == "tall":
        return draw(st.integers(3000, 30000)), draw(st.integers(max(smallest, 1), smallest + 3))
    rows = draw(st.one_of(st.sampled_from(SMALL), st.integers(0, 80)))
    if kind == "wide":
        widths = st.one_of(st.sampled_from(LARGE), st.integers(200, 9000))
        return min(rows, 4), draw(widths)
    widths = st.one_of(st.sampled_from(SMALL), st.integers(0, 300))
    return rows, draw(widths.filter(lambda width: width >= smallest))


@st.composite
def leads(draw, rows: int) -> tuple[int, ...]:
    """Leading axes with so many rows in all."""
    divisors = [d for d in (1, 2, 3, 7) if rows % d == 0]
    first = draw(st.sampled_from(divisors))
    shapes = [(rows,), (first, rows // first), (1, rows, 1)]
    return draw(st.sampled_from(shapes))


@st.composite
def values(draw, arrays: int, names=FINITE, scales=(1.0, 1.0, 1.0, 1e-6, 1e-3, 30.0, 1e4)):
    """Recipes for a call of so many arrays; names of the special values that may come."""
    special = st.tuples(
        st.integers(0, arrays - 1),
        st.floats(0, 1, exclude_max=True),
        st.sampled_from(names),
        st.booleans(),
    )
    return Values(
        seed=draw(st.integers(0, 2**32 - 1)),
        scale=draw(st.sampled_from(scales)),
        specials=tuple(draw(st.lists(special, max_size=4))) if names else (),
    )


any_values = functools.partial(values, names=SPECIAL)


def _expanded(array):
    """Positions differ from row to row: they stay as they are."""
    return to_paddle(array) if array.dtype.kind in "iu" else expanded(array)


VIEWS = {"contiguous": to_paddle, **LAYOUTS, "expanded": _expanded}
views = st.sampled_from(list(VIEWS))


def placed(recipe: Values, view: str):
    """(the recipe that this view can show, the function that makes its tensors)."""
    if view == "expanded":
        recipe = Values(recipe.seed, recipe.scale, recipe.specials, constant=True)
    return recipe, VIEWS[view]
