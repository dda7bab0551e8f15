"""The part of an analysis that is in record.json: everything except arrays. Imports neither torch nor numpy."""

from pydantic import BaseModel, ConfigDict

from qbench.records.limits import Count, Index


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Quartiles(_Part):
    """Quartiles of one state over all texts; their relative error is below qbench.records.analysis.QUARTILE_ERROR."""

    state: Index
    part: str  # all, first or others
    q1: float
    median: float
    q3: float
    median_abs: float  # of |x|


class AnalysisFacts(_Part):
    """What was measured, and what has no interval."""

    attention: str
    dtype: str  # of the model: attention weights are rounded to it before zeros are counted
    layers: Index
    heads: Index
    hidden_size: Index
    length: Index  # texts were truncated to this many tokens; the longest text's length if they were not
    lengths: tuple[Index, ...]  # of the sweep
    texts: Index
    tokens: Count
    notes: tuple[str, ...] = ()  # sentences: texts that were left out, lengths that no text has
    quartiles: tuple[Quartiles, ...] = ()

    @property
    def states(self) -> int:
        """The number of states, including the raw output of the last layer."""
        return self.layers + 2


class LinearDamage(_Part):
    """What quantizing one linear layer alone costs on a text."""

    label: str  # the quantization
    layer: Index  # from 0
    linear: str  # q_proj, …, down_proj
    nats_per_token: float  # log-likelihood lost, per token
    kl: float  # mean KL(unquantized ‖ quantized), in nats per token
    tokens: Count


class MapsFacts(_Part):
    """Which text and heads the attention maps of a record show."""

    tokens: tuple[str, ...]  # of the text, as the tokenizer writes them
    heads: tuple[tuple[Index, Index], ...]  # (layer, head), from 0
