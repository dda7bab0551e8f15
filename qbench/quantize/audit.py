"""The audit: what is measured on a quantized model, and what of it is no proof. Numbers only; measure.py takes them."""

import math

from pydantic import BaseModel, ConfigDict, computed_field

# A weight on its grid's nearest level is a quarter of a step off at the median. GPTQ moves weights further on purpose,
# but not so that the typical one is nearer to another level than to its own; one step too far puts the median at 1.
MAX_MEDIAN_STEPS = 0.75
MAX_MEDIAN_BIAS = 0.5
# Of a method that rounds to the nearest level, how many weights may be nearer to another one: rounding at ties.
MAX_MISPLACED = 1e-3
# How far packed and dense logits may be apart, relative to their norm: the rounding of the dtype's matrix products,
# summed in another order. float16 and bfloat16 round at 5e-4 and 4e-3 in each of the layers.
LOGITS_TOLERANCE = {"float64": 1e-8, "float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2}


class AuditError(RuntimeError):
    """A quantized model that is not what was asked for; no number of it may reach a table."""

    def __init__(self, label: str, reasons: list[str], what_now: str) -> None:
        shown = reasons[:8] + ([f"and {len(reasons) - 8} more"] if len(reasons) > 8 else [])
        super().__init__(f"The audit of {label} failed. {what_now}\n- " + "\n- ".join(shown))
        self.reasons = reasons


class _Stored(BaseModel):
    """Bytes and energies, and the figures that follow from them."""

    model_config = ConfigDict(frozen=True)

    weights: int
    code_bytes: int
    metadata_bytes: int
    source_energy: float  # Σ w²
    error_energy: float  # Σ (ŵ - w)²

    @computed_field
    def code_bits(self) -> float:
        """Storage bits a weight, codes alone: HQQ's 3 bits take 3.2."""
        return 8 * self.code_bytes / self.weights if self.weights else math.nan

    @computed_field
    def storage_bits(self) -> float:
        """Storage bits a weight with scales, zeros and the rest."""
        return 8 * (self.code_bytes + self.metadata_bytes) / self.weights if self.weights else math.nan

    @computed_field
    def relative_error(self) -> float:
        """‖ŵ - w‖ / ‖w‖ (Frobenius)."""
        return math.sqrt(self.error_energy / self.source_energy) if self.source_energy else math.nan

    @computed_field
    def snr_db(self) -> float | None:
        """Signal to noise in decibels; None where there is no noise."""
        if not self.error_energy or not self.source_energy:
            return None
        return 10 * math.log10(self.source_energy / self.error_energy)


class LayerAudit(_Stored):
    """One quantized layer: the width of its codes, its storage, and how far its weights are from the source's."""

    name: str
    bits: int  # what the layer says of itself
    group_size: int
    levels: int  # the most distinct levels in any one group
    codes_used: int  # distinct codes in the whole layer
    max_code: int
    one_value_a_code: bool  # in each group, equal codes stand for equal weights
    median_steps: float  # median of |ŵ - w| in quantization steps
    median_bias: float  # median of ŵ - w in quantization steps
    misplaced: float  # share of weights with a neighbouring level nearer by more than half a step
    nearest: bool  # the method promises the nearest level
    finite: bool


class Audit(_Stored):
    """Proof of what was done to a model, layer by layer and in total."""

    label: str
    method: str
    bits: int
    activation_bits: int | None  # 8 for LLM.int8; None: activations are not quantized
    execution: str  # dense: weights dequantized once; packed: the library's kernels; none: unquantized
    dtype: str
    linear_weights: int  # weights of all linear layers, lm_head's too
    target_weights: int  # of those that were to be quantized
    layers: tuple[LayerAudit, ...] = ()
    untouched: tuple[str, ...] = ()
    on_meta: tuple[str, ...] = ()
    in_train_mode: tuple[str, ...] = ()
    not_finite: tuple[str, ...] = ()  # parameters and buffers of the whole model
    probe_tokens: int = 0
    kl: float | None = None  # mean KL(unquantized ‖ quantized) of the next token, in nats, on the probe
    top1_agreement: float | None = None
    packed_dense_gap: float | None = None  # ‖packed - dense‖ / ‖dense‖ of the logits; None where only one of them runs

    @computed_field
    def quantized_share(self) -> float:
        """Share of all linear weights that are quantized; lm_head's are usually not."""
        return self.weights / self.linear_weights if self.linear_weights else math.nan

    @computed_field
    def target_share(self) -> float:
        """Share of the weights that were to be quantized that are; 1 in an audit that passed."""
        return self.weights / self.target_weights if self.target_weights else 1.0


def failures(audit: Audit) -> list[str]:
    """Why an audit does not prove what its label says, a sentence a reason; empty when it does."""
    reasons = [f"{name} was left on the meta device: it has no values." for name in audit.on_meta]
    reasons += [f"{name} was not quantized." for name in audit.untouched]
    reasons += [f"{name} holds NaN or infinite values." for name in audit.not_finite]
    reasons += [
        f"{name} is in train mode, where bitsandbytes silently does not quantize activations; it must be in eval mode."
        for name in audit.in_train_mode
    ]
    for layer in audit.layers:
        reasons += [f"{layer.name}: {reason}" for reason in _layer_failures(layer, audit.bits)]
    if not reasons and audit.weights != audit.target_weights:
        reasons.append(f"Only {audit.weights:,} of the {audit.target_weights:,} weights to quantize could be measured.")
    return reasons + _logits_failures(audit)


def _layer_failures(layer: LayerAudit, bits: int) -> list[str]:
    if not layer.finite:
        return ["its dequantized weights hold NaN or infinite values."]
    reasons = []
    if layer.bits != bits or layer.max_code >= 2**bits or layer.levels > 2**bits:
        reasons.append(
            f"it holds {layer.bits}-bit codes up to {layer.max_code} with {layer.levels} levels in a group; "
            f"{bits} bits allow codes up to {2**bits - 1} and {2**bits} levels."
        )
    # A group of 64 cannot show more than 128 levels; the layer as a whole can.
    elif layer.codes_used <= 2 ** (bits - 1) or layer.levels <= min(2 ** (bits - 1), layer.group_size // 4):
        reasons.append(
            f"only {layer.codes_used} codes are in use, {layer.levels} in one group at most: {bits - 1} bits hold them."
        )
    # Padding: a packed row of a group's width may be filled up to 32-bit words.
    most = (bits + 1) / 8 * layer.weights + 4 * layer.group_size
    if not bits / 8 * layer.weights <= layer.code_bytes < most:
        reasons.append(f"its codes take {layer.code_bits:.2f} bits a weight in storage; {bits} were asked for.")
    if not layer.one_value_a_code:
        reasons.append(
            "one code stands for different weights within a group: codes and weights do not belong together."
        )
    if layer.error_energy == 0:
        reasons.append("its weights are equal to the source's: nothing was quantized.")
    if layer.median_steps > MAX_MEDIAN_STEPS or abs(layer.median_bias) > MAX_MEDIAN_BIAS:
        reasons.append(
            f"its weights are off the source's by {layer.median_steps:.2f} quantization steps at the median "
            f"(bias {layer.median_bias:+.2f}); at most {MAX_MEDIAN_STEPS} (bias {MAX_MEDIAN_BIAS}) is plausible."
        )
    elif layer.nearest and layer.misplaced > MAX_MISPLACED:
        reasons.append(
            f"{layer.misplaced:.2%} of its weights are not on the level of their grid that is nearest to them."
        )
    return reasons


def _logits_failures(audit: Audit) -> list[str]:
    reasons = []
    if audit.kl is not None and not math.isfinite(audit.kl):
        reasons.append("The logits on the probe are NaN or infinite.")
    elif audit.kl == 0 and audit.layers:
        reasons.append("The logits on the probe are equal to the unquantized model's: nothing was quantized.")
    if audit.packed_dense_gap is not None:
        allowed = LOGITS_TOLERANCE[audit.dtype]
        if not audit.packed_dense_gap <= allowed:  # NaN fails
            reasons.append(
                f"Packed and dense logits differ by {audit.packed_dense_gap:.1e} of their norm; "
                f"{allowed:.0e} is what {audit.dtype} explains."
            )
    return reasons
