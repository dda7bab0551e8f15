"""What record.json says of an analysis: the parts that are no arrays. Imports neither torch nor numpy."""

from pydantic import BaseModel, ConfigDict


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Quartiles(_Part):
    """Of the values of one state over all texts; right to qbench.records.analysis.QUARTILE_ERROR of themselves."""

    state: int
    part: str  # all, first or others
    q1: float
    median: float
    q3: float
    median_abs: float  # of |x|


class AnalysisFacts(_Part):
    """What was measured, and what has no interval."""

    attention: str
    dtype: str  # of the model: attention weights are rounded to it before zeros are counted
    layers: int
    heads: int
    hidden_size: int
    length: int  # tokens at which texts were cut; the longest text's if they were not
    lengths: tuple[int, ...]  # of the sweep
    texts: int
    tokens: int
    notes: tuple[str, ...] = ()  # sentences: texts that were left out, lengths that could not be had
    quartiles: tuple[Quartiles, ...] = ()

    @property
    def states(self) -> int:
        """How many states there are, the raw output of the last layer among them."""
        return self.layers + 2


class LinearDamage(_Part):
    """What quantizing one linear layer alone costs on a text."""

    label: str  # the quantization
    layer: int  # from 0
    linear: str  # q_proj, …, down_proj
    nats_per_token: float  # log-likelihood lost, per token
    kl: float  # mean KL(unquantized ‖ quantized), in nats per token
    tokens: int


class MapsFacts(_Part):
    """What the attention maps beside a record are of."""

    tokens: tuple[str, ...]  # of the text, as the tokenizer writes them
    heads: tuple[tuple[int, int], ...]  # (layer, head), from 0
