"""The audit: what is measured on a quantized model, and when that does not prove anything. measure.py measures it."""

import math
from html import escape
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, computed_field, model_validator

from qbench.errors import first_of
from qbench.numbers import counted
from qbench.records.limits import Bits, Count

if TYPE_CHECKING:
    import pandas as pd

UNQUANTIZED = "none-16"  # the label of the baseline: nothing of the model is quantized

# Rounding to the nearest level leaves a median error of a quarter of a step. GPTQ moves weights further on purpose, but
# a typical weight is still nearer to its own level than to another; one step too far puts the median at 1.
MAX_MEDIAN_STEPS = 0.75
MAX_MEDIAN_BIAS = 0.5
# ŵ compared with w as a whole. Correct layers at 2 bits and more have a cosine of at least 0.8 and a slope of 0.96 to
# 1.02; scales with the wrong sign or size, rows out of order or another layer's codes do not. One bit clips most
# weights: its slopes (0.47 to 1.09) say nothing, and cosines go down to 0.45. Three levels clip or drop many weights:
# slopes of 0.38 to 1.02 (absmean, absmax, least squares; groups of 4 to 128; mini, Gaussian and Student's t weights).
MIN_COSINE, MIN_COSINE_1_BIT = 0.5, 0.25
SLOPES, SLOPES_TERNARY = (0.8, 1.25), (0.3, 1.25)
# Scales come from the largest weights of a group, so codes span the range; but a huge negative weight among tiny ones
# uses only half of nf4's codes.
MAX_NARROW = 0.02
# Share of weights that may be nearer to another level if the method rounds to the nearest one: rounding at ties.
MAX_MISPLACED = 1e-3
# Largest difference between packed and dense logits, relative to their norm: the dtype's matrix products are rounded
# and summed in another order. float16 and bfloat16 round at 5e-4 and 4e-3 in each layer.
LOGITS_TOLERANCE = {"float64": 1e-8, "float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2}


# Largest difference between the output of an LLM.int8 layer and its simulation, relative to its norm: bitsandbytes
# rounds inputs to float16, and sums and outliers to the dtype. MAX_SPARED: how much of the int8 noise may be missing.
MAX_SPARED = 0.5
INT8_TOLERANCE = {"float64": 2e-3, "float32": 2e-3, "float16": 4e-3, "bfloat16": 1e-2}

# The figures of the audit that are sums over its layers; the order of summation may change them by the tolerance.
TOTALS = ("weights", "code_bytes", "metadata_bytes", "source_energy", "error_energy")
TOTALS_TOLERANCE = 1e-6
NOT_THERE = "–"
MAX_REASONS = 8  # in the message of an error


def names_weights(label: str, method: str, bits: int) -> bool:
    """Whether a label is one of the method at that width."""
    return f"{label}-".startswith(f"{method}-{bits}-")


class AuditError(RuntimeError):
    """A quantized model that is not what was asked for; none of its numbers may reach a table."""

    def __init__(self, label: str, reasons: list[str], what_now: str) -> None:
        # The first line must say why: tables and progress show nothing else.
        first, *others = reasons
        more = f" (and {counted(len(others), 'more reason')})" if others else ""
        shown = [f"- {reason}" for reason in first_of(reasons, MAX_REASONS)] if others else []
        super().__init__("\n".join([f"The audit of {label} failed: {first}{more}", *shown, what_now]))
        self.reasons = reasons


def _not_negative(value: float) -> float:
    if value < 0:
        raise ValueError("it must not be negative")
    return value


Energy = Annotated[float, AfterValidator(_not_negative)]  # NaN if the weights are; the audit reports that


class _Stored(BaseModel):
    """Bytes and energies, and the figures that follow from them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weights: Count
    code_bytes: Count
    metadata_bytes: Count
    source_energy: Energy  # Σ w²
    error_energy: Energy  # Σ (ŵ - w)²

    @model_validator(mode="before")
    @classmethod
    def _without_computed_fields(cls, fields: Any) -> Any:
        """Records contain figures that follow from others: these are computed again, not read."""
        if not isinstance(fields, dict):
            return fields
        computed = cls.model_computed_fields
        return {name: value for name, value in fields.items() if name not in computed}

    @computed_field
    def code_bits(self) -> float | None:
        """Storage bits per weight, codes alone: HQQ's 3 bits take 3.2. None if nothing is quantized."""
        return 8 * self.code_bytes / self.weights if self.weights else None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def storage_bits(self) -> float | None:
        """Storage bits per weight with scales, zeros and the rest; None if nothing is quantized."""
        return 8 * (self.code_bytes + self.metadata_bytes) / self.weights if self.weights else None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def relative_error(self) -> float | None:
        """‖ŵ - w‖ / ‖w‖ (Frobenius); None if all weights are zero."""
        return math.sqrt(self.error_energy / self.source_energy) if self.source_energy else None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def snr_db(self) -> float | None:
        """Signal to noise in decibels; None if there is no noise."""
        if not self.error_energy or not self.source_energy:
            return None
        ratio = self.source_energy / self.error_energy
        return 10 * math.log10(ratio) if 0 < ratio < math.inf else None


class LayerAudit(_Stored):
    """One quantized layer: the width of its codes, its storage, and how far its weights are from the source's."""

    name: str
    bits: Bits  # what the layer says of itself
    group_size: int
    levels: int  # the most distinct levels in any one group
    codes_used: int  # distinct codes in the whole layer
    max_code: int
    one_value_a_code: bool  # in each group, equal codes mean equal weights
    median_steps: float  # median of |ŵ - w| in quantization steps
    median_bias: float  # median of ŵ - w in quantization steps
    cosine: float  # w·ŵ / (‖w‖ ‖ŵ‖)
    slope: float  # w·ŵ / ‖w‖²: the scale of the weight relative to its source
    misplaced: float  # share of weights with a neighbouring level nearer by more than half a step
    narrow: float  # share of groups whose codes span at most half of the levels in use, though they could span all
    codes_possible: int  # with the finest step of the method, in the widest group
    packed_bytes: int  # size of the codes as the method packs them
    nearest: bool  # the method promises the nearest level
    finite: bool
    other_options: tuple[str, ...] = ()  # options asked for that its tensors contradict
    int8_gap: float | None = None  # LLM.int8 on the probe: ‖output - simulated‖ / ‖simulated‖
    int8_spared: float | None = None  # 0: the output is that of int8 activations; 1: that of activations as they are


class Measured(BaseModel):
    """A figure that proves something if it is within its limits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    what: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    def failure(self) -> str | None:
        """What is wrong with it, in a sentence; None if nothing is."""
        low = -math.inf if self.at_least is None else self.at_least
        high = math.inf if self.at_most is None else self.at_most
        if low <= self.value <= high:  # NaN is not
            return None
        limits = [f"at least {self.at_least:g}"] if self.at_least is not None else []
        limits += [f"at most {self.at_most:g}"] if self.at_most is not None else []
        return f"{self.what} is {self.value:g}; it must be {' and '.join(limits)}."


class PartAudit(BaseModel):
    """Proof of one part besides the weights, such as masked heads: its piece of the label, and what was measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: str
    details: tuple[str, ...] = ()  # what was done, for readers
    measured: tuple[Measured, ...] = ()
    may_change_nothing: bool = False  # whether a model may give identical numbers with and without it
    # If keys are quantized: the share of pairs of a query and a key, in the texts that were scored, whose key was.
    quantized_pairs: float | None = None

    def failures(self) -> list[str]:
        """Why it proves nothing, one sentence per reason."""
        if not self.measured:
            return ["nothing was measured to prove it."]
        if self.quantized_pairs is not None and not self.quantized_pairs > 0:
            return ["no key that was scored with was quantized: the groups of tokens are longer than the texts."]
        return [reason for measured in self.measured if (reason := measured.failure())]


class Audit(_Stored):
    """Proof of what was done to a model, layer by layer and in total."""

    label: str
    method: str
    bits: Bits
    activation_bits: int | None  # 8 for LLM.int8; None: activations are not quantized
    execution: str  # dense: weights dequantized once; packed: the library's kernels; none: unquantized
    dtype: str
    linear_weights: Count  # weights of all linear layers, lm_head's too
    target_weights: Count  # of those that were to be quantized
    layers: tuple[LayerAudit, ...] = ()
    untouched: tuple[str, ...] = ()
    unasked: tuple[str, ...] = ()  # quantized, but not a target
    changed: tuple[str, ...] = ()  # parameters and buffers that should have stayed unchanged
    on_meta: tuple[str, ...] = ()
    in_train_mode: tuple[str, ...] = ()
    not_finite: tuple[str, ...] = ()  # parameters and buffers of the whole model
    probe_tokens: int = 0
    kl: float | None = None  # mean KL(unquantized ‖ quantized) of the next token, in nats, on the probe
    top1_agreement: float | None = None
    packed_dense_gap: float | None = None  # ‖packed - dense‖ / ‖dense‖ of the logits; None if only one of them runs

    parts: tuple[PartAudit, ...] = ()  # what was done besides the weights, in the order of the label

    def __repr__(self) -> str:
        """What it proves, in a line. The probe is a fixed batch of tokens, not a task."""
        facts = (f"{name} {value}" for name, value in self._in_short().items())
        return f"Audit({self.label}: {', '.join(facts)})"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        rows = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in self._in_short().items())
        return f"<table><caption>{escape(self.label)}</caption>{''.join(rows)}</table>"

    def _in_short(self) -> dict[str, str]:
        stored, snr, wrong = self.storage_bits, self.snr_db, failures(self)
        return {
            "verdict": f"failed: {wrong[0]}" if wrong else "passed",
            "layers": f"{len(self.layers)}",
            "bits per weight": NOT_THERE if stored is None else f"{stored:.2f}",
            "signal to noise": NOT_THERE if snr is None else f"{snr:.1f} dB",
            "probe KL": NOT_THERE if self.kl is None else f"{self.kl:.3g} nats",
            "probe top-1": NOT_THERE if self.top1_agreement is None else f"{self.top1_agreement:.1%}",
        }

    def to_frame(self) -> "pd.DataFrame":
        """One row per quantized layer."""
        import pandas as pd

        columns = [*LayerAudit.model_fields, *LayerAudit.model_computed_fields]
        return pd.DataFrame([layer.model_dump() for layer in self.layers], columns=columns)

    @property
    def part_labels(self) -> str:
        """The end of the label that names the parts: -mask1e-06."""
        return "".join(f"-{part.label}" for part in self.parts)

    @property
    def weight_label(self) -> str:
        """The label without its parts: hqq-4-g64 of hqq-4-g64-mask1e-06."""
        return self.label.removesuffix(self.part_labels)

    @computed_field
    def quantized_share(self) -> float:
        """Share of all linear weights that are quantized; lm_head's are usually not."""
        return self.weights / self.linear_weights if self.linear_weights else 0.0

    @computed_field
    def target_share(self) -> float:
        """Share of the target weights that are quantized; 1 in an audit that passed."""
        return self.weights / self.target_weights if self.target_weights else 1.0


def failures(audit: Audit) -> list[str]:
    """Why an audit does not prove what its label says, one sentence per reason; empty if it does."""
    reasons = [f"{name} was left on the meta device: it has no values." for name in audit.on_meta]
    reasons += [f"{name} was not quantized." for name in audit.untouched]
    reasons += [f"{name} was quantized, but this was not asked for." for name in audit.unasked]
    reasons += [f"{name} changed; only the weights of the targets may change." for name in audit.changed]
    reasons += [f"{name} contains NaN or infinite values." for name in audit.not_finite]
    reasons += [
        f"{name} is in train mode, where bitsandbytes silently does not quantize activations; it must be in eval mode."
        for name in audit.in_train_mode
    ]
    for layer in audit.layers:
        reasons += [f"{layer.name}: {reason}" for reason in _layer_failures(layer, audit.bits)]
    reasons += [f"{part.label}: {reason}" for part in audit.parts for reason in part.failures()]
    reasons += _label_failures(audit)
    # Do not repeat what follows from a reason above.
    return (reasons or _total_failures(audit)) + _logits_failures(audit)


def _label_failures(audit: Audit) -> list[str]:
    """Why the label does not match the audit's method, bits and parts."""
    if not names_weights(audit.label, audit.method, audit.bits):
        return [f"The label is {audit.label}, but the audit is of {audit.method} at {audit.bits} bits."]
    if not audit.label.endswith(audit.part_labels):
        audited = [part.label for part in audit.parts]
        return [f"The label is {audit.label}, but the parts audited besides the weights are {audited}."]
    if audit.weight_label == UNQUANTIZED and audit.layers:
        return [f"The label is {audit.label}, but {len(audit.layers)} layers were quantized."]
    return []


def _total_failures(audit: Audit) -> list[str]:
    """Why the totals do not match the layers, or the layers are not all of the targets."""
    if not audit.layers and audit.weight_label != UNQUANTIZED:
        return ["No layer was quantized."]
    reasons = []
    for name in TOTALS:
        total, summed = getattr(audit, name), math.fsum(getattr(layer, name) for layer in audit.layers)
        if not math.isclose(total, summed, rel_tol=TOTALS_TOLERANCE):
            reasons.append(f"The audit's {name} is {total:,.10g}; its layers add up to {summed:,.10g}.")
    if audit.weights != audit.target_weights:
        reasons.append(f"Only {audit.weights:,} of the {audit.target_weights:,} weights to quantize could be measured.")
    return reasons


def _layer_failures(layer: LayerAudit, bits: int) -> list[str]:
    if not layer.finite:
        return ["its dequantized weights contain NaN or infinite values."]
    reasons = [f"it was quantized with {other}." for other in layer.other_options]
    if layer.bits != bits or layer.max_code >= 2**bits or layer.levels > 2**bits:
        reasons.append(
            f"it has {layer.bits}-bit codes up to {layer.max_code} with {layer.levels} levels in a group; "
            f"{bits} bits allow codes up to {2**bits - 1} and {2**bits} levels."
        )
    # A group of 64 cannot show more than 128 levels; the layer as a whole can.
    # Nor can a layer of tiny weights, if the method's finest step is too coarse for them.
    elif layer.codes_used <= (half := layer.codes_possible / 2) or layer.levels <= min(half, layer.group_size // 4):
        reasons.append(
            f"only {layer.codes_used} codes are in use, at most {layer.levels} per group: {bits - 1} bits would do."
        )
    elif layer.nearest and bits > 1 and layer.narrow > MAX_NARROW:
        reasons.append(f"in {layer.narrow:.1%} of its groups the codes span only the range of {bits - 1} bits.")
    if layer.code_bytes != layer.packed_bytes:
        reasons.append(f"its codes take {layer.code_bits:.2f} bits per weight in storage; {bits} were asked for.")
    if not layer.one_value_a_code:
        reasons.append("one code stands for different weights within a group: codes and weights do not match.")
    if layer.error_energy == 0:
        reasons.append("its weights are equal to the source's: nothing was quantized.")
    if layer.median_steps > MAX_MEDIAN_STEPS or abs(layer.median_bias) > MAX_MEDIAN_BIAS:
        reasons.append(
            f"its weights differ from the source's by a median of {layer.median_steps:.2f} quantization steps "
            f"(bias {layer.median_bias:+.2f}); at most {MAX_MEDIAN_STEPS} (bias {MAX_MEDIAN_BIAS}) is plausible."
        )
    elif layer.nearest and layer.misplaced > MAX_MISPLACED:
        reasons.append(f"{layer.misplaced:.2%} of its weights are not on the grid level nearest to them.")
    if bits == 1:
        alike = layer.cosine >= MIN_COSINE_1_BIT
    else:
        least, most = SLOPES_TERNARY if layer.codes_used == 3 else SLOPES
        alike = layer.cosine >= MIN_COSINE and least <= layer.slope <= most
    if not alike and layer.error_energy:  # NaN is not alike
        reasons.append(
            f"its weights do not match the source's: the cosine is {layer.cosine:.2f}, the slope {layer.slope:.2f}."
        )
    return reasons


def _logits_failures(audit: Audit) -> list[str]:
    reasons = []
    if audit.kl is not None and not math.isfinite(audit.kl):
        reasons.append("The logits on the probe are NaN or infinite.")
    elif audit.kl == 0 and audit.layers:
        reasons.append("The logits on the probe are equal to the unquantized model's: nothing was quantized.")
    for layer in audit.layers if audit.execution == "packed" and audit.activation_bits else ():
        if layer.int8_gap is None or layer.int8_spared is None:
            reasons.append(f"{layer.name} did not run on the probe, so nothing proves its int8 activations.")
            continue
        allowed = INT8_TOLERANCE[audit.dtype]
        if not (layer.int8_gap <= allowed and abs(layer.int8_spared) <= MAX_SPARED):  # NaN fails
            reasons.append(
                f"{layer.name}: its output on the probe is not that of int8 weights and activations: it differs by "
                f"{layer.int8_gap:.1e} of its norm ({allowed:.0e} is what {audit.dtype} explains), and lacks "
                f"{layer.int8_spared:.0%} of the noise of int8 activations."
            )
    if audit.packed_dense_gap is not None:
        allowed = LOGITS_TOLERANCE[audit.dtype]
        if not audit.packed_dense_gap <= allowed:  # NaN fails
            reasons.append(
                f"Packed and dense logits differ by {audit.packed_dense_gap:.1e} of their norm; "
                f"{allowed:.0e} is what {audit.dtype} explains."
            )
    return reasons
