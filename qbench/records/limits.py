"""The largest numbers that a record may have: with larger ones, sums overflow and powers of two fill the memory."""

from typing import Annotated

from pydantic import Field

MAX_NUMBER = 1.02e304  # the perplexity of a model that fell apart is limited to e**700, which is 1.014e304
MAX_LOGLIKELIHOOD = 1e12  # of one document, which would have a trillion tokens
MAX_COUNT = 2**53  # float64 has all integers up to here

Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Bits = Annotated[int, Field(ge=1, le=64)]
Finite = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER, allow_inf_nan=False)]
Index = Annotated[int, Field(ge=0, le=2**20)]  # of a layer, head, token or text
