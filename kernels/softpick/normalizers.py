"""The normalizers of attention scores as one family: weight = numerator / (denominator + constant).

For a row's scores x, over the keys that its query sees, with m = max(0, max x):

    normalizer      numerator        denominator      constant
    softmax         e^x              Σ numerator      0
    sink_softmax    e^x              Σ numerator      e^s, one s per head (softmax + 1 is s = 0)
    rectified       e^x where x ≥ 0  Σ numerator      0
    softpick        ReLU(e^x - 1)    Σ |e^x - 1|      eps · e^m
    relu_softmax    ReLU(e^x - 1)    Σ numerator      eps · e^m

A row with nothing to attend to gives zeros. The gradient treats m as a constant: it only scales eps.
"""

from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True)
class Normalizer:
    """One row of the table above; kernels take these fields as compile-time choices."""

    minus_one: bool = False  # numerator ReLU(e^x - 1), not e^x; constant eps · e^m
    absolute: bool = False  # denominator Σ |e^x - 1|
    rectified: bool = False  # keys with x < 0 are not seen
    sinks: bool = False  # constant e^s


NORMALIZERS = {
    "softmax": Normalizer(),
    "sink_softmax": Normalizer(sinks=True),
    "rectified": Normalizer(rectified=True),
    "softpick": Normalizer(minus_one=True, absolute=True),
    "relu_softmax": Normalizer(minus_one=True),
}


def check_normalizer(name: str) -> None:
    """Raise a ValueError for a name that is not in NORMALIZERS, with the closest one that is."""
    if name in NORMALIZERS:
        return
    near = get_close_matches(str(name), NORMALIZERS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"normalizer is {name!r}; it must be one of {', '.join(NORMALIZERS)}.{hint}")
