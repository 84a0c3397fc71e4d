"""Arrays by recipe: random values with special ones in chosen places, the same for every reader."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import numeric
from .arrays import numpy_dtype, random_array

FINITE = ("zero", "subnormal", "smallest normal", "largest")
SPECIAL = (*FINITE, "infinity", "nan")


def special_value(name: str, dtype: str) -> float:
    """The positive special value of a dtype."""
    return {
        "zero": 0.0,
        "subnormal": float(numeric.spacing(0.0, dtype)),
        "smallest normal": 2.0 ** numeric.smallest_exponent(dtype),
        "largest": numeric.largest_value(dtype),
        "infinity": np.inf,
        "nan": np.nan,
    }[name]


@dataclass(frozen=True)
class Values:
    """How the arrays of a call are filled.

    Attributes:
        seed: of the random values.
        scale: their size.
        specials: (number of the array, place in it from 0 to below 1, name of a special value,
            negative); places of arrays that a call does not have are ignored.
        constant: all rows (entries of the first axis) are the first one, as an expanded view needs.
    """

    seed: int = 0
    scale: float = 1.0
    specials: tuple = ()
    constant: bool = False

    def only(self, *names, arrays=range(99)) -> Values:
        """The recipe with no other special values than those in the given arrays."""
        kept = tuple(s for s in self.specials if s[2] in names or s[0] not in arrays)
        return Values(self.seed, self.scale, kept, self.constant)

    def array(self, number: int, shape, dtype: str) -> np.ndarray:
        """The array of that number in a call."""
        rng = np.random.default_rng((self.seed, number))
        scale = min(self.scale, 1e3) if dtype == "float16" else self.scale
        array = random_array(rng, shape, dtype, scale)
        flat = array.reshape(-1)
        for which, place, name, negative in self.specials:
            if which == number and flat.size:
                value = special_value(name, dtype)
                flat[int(place * flat.size)] = np.array(-value if negative else value).astype(
                    numpy_dtype(dtype)
                )
        if self.constant and array.ndim and len(array):
            array[:] = array[:1]
        return array
