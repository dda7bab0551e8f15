"""Ours next to published numbers: the difference, whether it is within repeat noise, and whether the published number
is nearer to our quantized score or to our unquantized one."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from qbench.numbers import fixed, score, signed
from qbench.report.attentions import kind_name, kind_title
from qbench.report.delta import DeltaRow, Difference, ReportData
from qbench.report.metrics import Measure, metric_name, task_name
from qbench.report.repeats import ONE_DRAW, Nearer, RepeatNoise, nearer, repeat_noise
from qbench.report.results import NOTHING, FamilyQuantization, Gap, ReportError, Score
from qbench.report.tables import Column, Field, Table, quantization_name, score_field
from qbench.report.tidy import DataRow

DELTA = "delta"


@dataclass(frozen=True)
class Comparison:
    """One of our numbers and the published one."""

    quantization: FamilyQuantization  # ours
    measure: Measure
    number: str  # a kind of attention, or delta; with several kinds besides the reference, delta and the kind
    ours: Score | Gap
    published: float
    noise: RepeatNoise | str  # of ours; or why it is not known
    nearer: Nearer | None = None  # None for unquantized models, for Δ, and if the noise is unknown

    @property
    def is_delta(self) -> bool:
        """Whether it is a difference from the reference."""
        return self.number.split(" ")[0] == DELTA

    @property
    def difference(self) -> float | None:
        """Ours − published."""
        return None if isinstance(self.ours, Gap) else self.ours.value - self.published

    @property
    def agrees(self) -> bool | None:
        """Whether repeats of one measurement differ by that much; None if unknown."""
        if self.difference is None or isinstance(self.noise, str):
            return None
        return self.noise.agrees(self.difference)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on ours, and why it is not judged."""
        if isinstance(self.ours, Gap):
            return (self.ours.reason,)
        if isinstance(self.noise, str):
            return (*self.ours.notes, self.noise)
        return (*self.ours.notes, ONE_DRAW) if self.noise.one_draw else self.ours.notes


def compare(ours: ReportData, published: ReportData) -> list[Comparison]:
    """Each published number of the families we have, next to each of our quantizations with its method and bits."""
    mine = ours.results.quantizations()
    families = list(dict.fromkeys(q.family for q in mine))
    rows = [row for row in published.deltas if row.quantization.family in families]
    if not rows:
        theirs = ", ".join(dict.fromkeys(row.quantization.family for row in published.deltas))
        raise ReportError(
            f"{ours.results.source} and {published.results.source} have no family in common: the first has "
            f"{', '.join(families)}, the second has {theirs}."
        )
    # Our Δ uses the published reference, which may differ from our recipe's.
    against = replace(ours, results=replace(ours.results, said_reference=published.results.reference))
    deltas = {(row.quantization, row.measure.task, row.measure.metric): row.deltas for row in against.deltas}
    found: list[Comparison] = []
    for row in rows:
        same = [q for q in mine if _key(q) == _key(row.quantization)]
        for quantization in same or [row.quantization]:
            own = deltas.get((quantization, row.measure.task, row.measure.metric), {})
            found += _scores(ours, quantization, row)
            found += _deltas(ours, quantization, row, own, published.results.reference)
    return found


def _scores(ours: ReportData, quantization: FamilyQuantization, row: DeltaRow) -> list[Comparison]:
    """The published scores of a row next to those of one of our quantizations."""
    found = []
    for attention, published in row.scores.items():
        if not isinstance(published, Score):
            continue
        result = ours.results.twin(quantization, attention)
        own, noise = result.score(row.measure), repeat_noise(row.measure, [result], published.documents)
        before = ours.results.unquantized(result).score(row.measure)
        side = _side(row.measure, published.value, before, own, noise) if not quantization.is_unquantized else None
        found.append(Comparison(quantization, row.measure, attention, own, published.value, noise, side))
    return found


def _side(
    measure: Measure, published: float, before: Score | Gap, after: Score | Gap, noise: RepeatNoise | str
) -> Nearer | None:
    if isinstance(before, Gap) or isinstance(after, Gap) or isinstance(noise, str) or noise.one_draw:
        return None
    return nearer(measure, published, before.value, after.value, noise)


def _deltas(
    ours: ReportData,
    quantization: FamilyQuantization,
    row: DeltaRow,
    own: Mapping[str, Difference | None],
    reference: str,
) -> list[Comparison]:
    """The same for the published differences from the reference."""
    found = []
    for attention, delta in row.deltas.items():
        if delta is None:
            continue
        number = DELTA if len(row.deltas) == 1 else f"{DELTA} {attention}"
        mine = own.get(attention)
        results = [ours.results.twin(quantization, kind) for kind in (attention, reference)]
        noise = repeat_noise(row.measure, results, _documents(row))
        lacking = Gap(NOTHING, f"Δ needs the scores of both {kind_name(attention)} and {kind_name(reference)}.")
        value = Score(mine.value, notes=mine.notes) if mine else lacking
        found.append(Comparison(quantization, row.measure, number, value, delta.value, noise))
    return found


def comparison_tables(found: Sequence[Comparison]) -> list[Table]:
    """One table per family and method."""
    groups = groupby(found, lambda c: (c.quantization.family, c.quantization.method))
    return [_table(list(group)) for _, group in groups]


def comparison_remarks(found: Sequence[Comparison], published: ReportData) -> list[str]:
    """How much was compared, how much of it agrees, and which of our scores the quantized ones are nearer to."""
    rows = {(*_key(row.quantization), row.measure) for row in published.deltas}
    compared = {(*_key(c.quantization), c.measure) for c in found if c.difference is not None}
    remarks = [f"{len(compared)} of {len(rows)} published rows have a counterpart here."]
    if judged := [c.agrees for c in found if c.agrees is not None]:
        remarks.append(f"Of {len(judged)} numbers that can be judged, {sum(judged)} agree within repeat noise.")
    if sides := Counter(c.nearer for c in found if c.nearer):
        remarks.append(
            f"Of {sides.total()} published scores of quantized models, {sides['quantized']} are nearer to our "
            f"quantized score, {sides['unquantized']} to our unquantized one, and {sides['undecided']} are undecided."
        )
    return remarks


def comparison_rows(found: Sequence[Comparison]) -> list[DataRow]:
    """The comparison for programs."""
    return [
        {
            **c.quantization.key,
            "task": c.measure.task,
            "metric": c.measure.metric,
            "better": c.measure.better,
            "number": c.number,
            "ours": None if isinstance(c.ours, Gap) else c.ours.value,
            "published": c.published,
            "difference": c.difference,
            "repeat_noise": c.noise.half_width if isinstance(c.noise, RepeatNoise) else None,
            "agrees": c.agrees,
            "nearer_to": c.nearer,
            "note": " ".join(c.notes),
        }
        for c in found
    ]


def _table(group: Sequence[Comparison]) -> Table:
    about = group[0].quantization
    texts = ("Task", "Metric", "Quantization", "Number")
    numbers = ("Ours", "Published", "Difference", "Repeat noise", "Agrees", "Nearer to")
    table = Table(
        name=f"compare-{about.family}-{about.method}",
        title=f"{about.family}, {about.method_title}: ours and published",
        caption=f"Our numbers for {about.family}, {about.method_title}, next to the published ones.",
        reading=[
            "Difference: ours − published. Repeat noise (95%): how much a rerun on the same documents may differ "
            "because of rounding, dtype, batches and calibration draws. Nearer to: our quantized or our unquantized "
            "score, whichever is closer to the published one; undecided if the noise could change that."
        ],
        columns=[*(Column(title, "l") for title in texts), *map(Column, numbers)],
        heads=3,
    )
    measures = dict.fromkeys(comparison.measure for comparison in group)
    table.rows += [_fields(table, c) for measure in measures for c in group if c.measure == measure]
    return table


def _fields(table: Table, c: Comparison) -> list[Field]:
    show = signed if c.is_delta else score
    if isinstance(c.ours, Gap):
        ours = score_field(table, c.ours)
    else:
        ours = Field(show(c.ours.value), c.ours.value, marks=table.mark(c.notes))
    noise = c.noise.half_width if isinstance(c.noise, RepeatNoise) else None
    return [
        Field(task_name(c.measure.task)),
        Field(metric_name(c.measure)),
        Field(quantization_name(c.quantization), c.quantization.bits),
        Field(" ".join(["Δ", *map(kind_name, c.number.split(" ")[1:])]) if c.is_delta else kind_title(c.number)),
        ours,
        Field(show(c.published), c.published),
        Field(NOTHING) if c.difference is None else Field(signed(c.difference), c.difference),
        Field(NOTHING) if noise is None else Field(f"±{fixed(noise)}", noise),
        Field({True: "yes", False: "no", None: NOTHING}[c.agrees]),
        Field(c.nearer or NOTHING),
    ]


def _documents(row: DeltaRow) -> int | None:
    """The number of documents of a published row, if the row has it."""
    return next((s.documents for s in row.scores.values() if isinstance(s, Score) and s.documents), None)


def _key(quantization: FamilyQuantization) -> tuple[str, str, int]:
    return quantization.family, quantization.method, quantization.bits
