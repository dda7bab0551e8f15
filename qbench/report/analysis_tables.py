"""Analyses laid out as tables, in the form of the paper's two, and as rows for programs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from qbench.errors import some
from qbench.numbers import count, fixed, score, signed, signed_interval, significant
from qbench.records.analysis import DEAD_EPSILONS, MASSIVE, NEAR_ZERO, PARTS, SINK_EPSILONS
from qbench.records.analysis_metrics import Figure, difference, same_texts
from qbench.records.audit import UNQUANTIZED
from qbench.report.analyses import AnalyzedModel
from qbench.report.attentions import kind_name, kind_title
from qbench.report.delta import ReportData
from qbench.report.results import NOTHING
from qbench.report.tables import Column, Field, Table
from qbench.report.tidy import DataRow

READ_RATES = "Rates and shares are in percent."
READ_SINKS = (
    "Sink rate: the share of (text, layer, head) whose mean weight on the first token is above ε; normalized: after "
    "dividing each row of weights by its sum. Row sum: the mean sum of a row of weights."
)
READ_ACTIVATIONS = (
    "Kurtosis (not excess kurtosis), minimum and maximum of the hidden states after the embedding, after each layer "
    "except the last, and after the final norm."
)
READ_SPARSITY = (
    "Sparsity: exact zeros in the causal triangle, in the model's dtype. Dead heads: output below ε at more than 95% "
    "of tokens."
)
READ_DIFFERENCES = (
    "Difference: the attention − {reference}, on the same texts; *: the 95% interval (paired bootstrap over texts) "
    "excludes zero."
)
READ_LENGTHS = (
    "Sink rates at ε, for texts with at least that many tokens, truncated to that length. At the full length of the "
    "analysis, shorter texts are included too."
)
READ_LAYERS = (
    "The largest |x| of any text, its token (from 0) and channel, and the number of massive values: > 100 and "
    "> 1,000 times the median |x| of their text and layer (Sun et al.)."
)
ROUNDING = 1e-5  # relative: equal figures may differ by this much in float32


@dataclass(frozen=True)
class FigureColumn:
    """A figure as a column."""

    metric: str
    setting: str
    title: str
    group: str = ""
    show: Callable[[float], str] = score


def _large(value: float) -> str:
    return fixed(value) if abs(value) < 1e5 else significant(value, 4)


SINKS = (
    *(FigureColumn("sink_rate", f"{e:g}", f"ε={e:g}", "Sink rate") for e in SINK_EPSILONS),
    *(FigureColumn("sink_rate_normalized", f"{e:g}", f"ε={e:g}", "Normalized") for e in SINK_EPSILONS),
    FigureColumn("row_sum", "", "Row sum"),
)
ACTIVATIONS = (
    FigureColumn("kurtosis", "", "Kurt.", show=_large),
    FigureColumn("min", "", "Min."),
    FigureColumn("max", "", "Max."),
    FigureColumn("sparsity", "", "Spars. %"),
    FigureColumn("sparsity", f"{NEAR_ZERO:g}", "≤ 1e-5 %"),
    FigureColumn("empty_tiles", "", "Empty tiles %"),
    *(FigureColumn("dead_heads", f"{e:g}", f"ε={e:g}", "Dead heads %") for e in DEAD_EPSILONS),
)
IN_DIFFERENCES = (*SINKS, *(c for c in ACTIVATIONS if c.metric not in ("min", "max")))


def analysis_tables(report: ReportData) -> list[Table]:
    """Sinks, activations, differences between models of a family; then by part of the tokens, by length, by layer."""
    models = report.analyses.models
    found = [
        _figure_table(models, "analysis-sinks", "Attention sinks", SINKS, READ_SINKS),
        _figure_table(
            models,
            "analysis-activations",
            "Activations and sparsity",
            ACTIVATIONS,
            READ_ACTIVATIONS,
            READ_SPARSITY,
        ),
        *(_difference_table(group) for group in _groups(models)),
        _part_table(models),
        *(_length_table(models, metric) for metric in ("sink_rate", "sink_rate_normalized")),
        *(_layer_table(report.analyses.of(family)) for family in report.analyses.families),
        _score_table(report),
    ]
    return [table for table in found if table and table.rows]


def analysis_remarks(report: ReportData) -> list[str]:
    """Which models have no analysis, and notes on the texts."""
    analyses = report.analyses
    notes = [f"{some(names)}: {note}" for note, names in analyses.notes.items()]
    about = []
    for facts in dict.fromkeys(model.analysis.facts for model in analyses.models[:1] if model.analysis):
        texts = f"{count(facts.texts)} texts of up to {facts.length} tokens"
        about.append(f"{texts}, {count(facts.tokens)} in all; {facts.dtype}.")
    return [*about, *notes, *analyses.failures]


def analysis_rows(report: ReportData) -> list[DataRow]:
    """Every figure: those at the length of the analysis and of all tokens first."""
    models = [*report.analyses.models, *report.analyses.steps]
    with_steps = bool(report.analyses.steps)
    pairs = [(model, figure) for model in models for figure in model.figures]

    def place(pair: tuple[AnalyzedModel, Figure]) -> tuple[bool, bool]:
        model, figure = pair
        return figure.length != model.length, figure.part != "all"

    return [_row(model, figure, with_steps) for model, figure in sorted(pairs, key=place)]


def _row(model: AnalyzedModel, figure: Figure, with_steps: bool) -> DataRow:
    low, high = figure.interval or (None, None)
    return {
        "family": model.cell.family,
        "attention": model.cell.attention,
        "label": model.cell.label,
        "metric": figure.metric,
        "setting": figure.setting,
        "value": figure.value,
        "low": low,
        "high": high,
        "length": figure.length or None,
        "tokens": figure.tokens or None,
        "dtype": model.dtype if model.analysis or figure.length else None,
        "part": figure.part,
        **({"step": model.cell.step} if with_steps else {}),
    }


def _heads(models: Sequence[AnalyzedModel]) -> tuple[list[Column], Callable[[AnalyzedModel], list[Field]]]:
    """The columns that name a model, and its fields there: the quantization only if a model has one."""
    quantized = any(model.cell.label != UNQUANTIZED for model in models)
    titles = ["Size", *(["Quantization"] if quantized else []), "Model"]

    def fields(model: AnalyzedModel) -> list[Field]:
        label = [Field(NOTHING if model.cell.label == UNQUANTIZED else model.cell.label)] if quantized else []
        return [Field(model.cell.family), *label, Field(kind_title(model.cell.attention))]

    return [Column(title, "l") for title in titles], fields


def _figure_table(
    models: Sequence[AnalyzedModel], name: str, title: str, columns: Sequence[FigureColumn], *reading: str
) -> Table | None:
    """One line per model; columns of figures that no model has are left out."""
    there = [c for c in columns if any(model.find(c.metric, c.setting) for model in models)]
    if not there:
        return None
    heads, fields = _heads(models)
    table = Table(
        name=name,
        title=title,
        caption=f"{title} of the {' and '.join(dict.fromkeys(model.cell.family for model in models))} models.",
        reading=[*reading, READ_RATES],
        columns=[*heads, *(Column(c.title, group=c.group) for c in there)],
        heads=len(heads) - 1,
    )
    for model in models:
        found = [model.find(c.metric, c.setting) for c in there]
        if any(found):
            table.rows.append([*fields(model), *(_field(own, c.show) for own, c in zip(found, there, strict=True))])
    return table


def _field(figure: Figure | None, show: Callable[[float], str]) -> Field:
    return Field(NOTHING) if figure is None else Field(show(figure.value), figure.value)


def _groups(models: Sequence[AnalyzedModel]) -> list[list[AnalyzedModel]]:
    """Models of one family and quantization that have the same texts, the reference first."""
    groups = [list(own) for _, own in groupby(models, lambda model: (model.cell.family, model.cell.label))]
    found = []
    for first, *others in groups:
        paired = [own for own in others if _are_paired(first, own)]
        found += [[first, *paired]] if paired else []
    return found


def _are_paired(one: AnalyzedModel, other: AnalyzedModel) -> bool:
    return bool(one.analysis and other.analysis and same_texts(one.analysis, other.analysis))


def _difference_table(models: Sequence[AnalyzedModel]) -> Table:
    reference, *others = models
    cell, whose = reference.cell, kind_name(reference.cell.attention)
    of = cell.family if cell.label == UNQUANTIZED else f"{cell.family}, {cell.label}"
    table = Table(
        name=f"analysis-differences-{cell.family}-{cell.label}",
        title=f"{of}: differences",
        caption=f"How the attentions of {of} differ from {whose}.",
        reading=[READ_DIFFERENCES.format(reference=whose), READ_RATES],
        columns=[
            Column("Figure", "l"),
            Column("Model", "l"),
            *map(Column, (kind_title(cell.attention), "Own", "Difference", "95% interval")),
        ],
        heads=1,
    )
    for column in IN_DIFFERENCES:
        first = reference.find(column.metric, column.setting)
        found = [(other, own) for other in others if (own := other.find(column.metric, column.setting))]
        if first and any(_differ(first, own) for _, own in found):
            table.rows += [_difference_fields(column, other, first, own) for other, own in found]
    return table


def _differ(first: Figure, second: Figure) -> bool:
    """Whether two figures differ, or could with other texts."""
    value, interval = difference(second, first)
    return value != 0 or any(interval or ())


def _difference_fields(column: FigureColumn, other: AnalyzedModel, first: Figure, second: Figure) -> list[Field]:
    value, interval = difference(second, first)
    excludes_zero = interval is not None and (interval[0] > 0 or interval[1] < 0)
    is_rounding = abs(value) < ROUNDING * max(1.0, abs(first.value))  # sums of float32 weights are not exactly 1
    return [
        Field(figure_name(column.metric, column.setting)),
        Field(kind_title(other.cell.attention)),
        _field(first, column.show),
        _field(second, column.show),
        Field(signed(value), value, starred=excludes_zero and not is_rounding),
        Field(signed_interval(*interval) if interval else NOTHING),
    ]


def figure_name(metric: str, setting: str = "") -> str:
    """A figure as tables call it: Sink rate, ε=0.3."""
    name = metric.replace("_", " ").capitalize()
    names = {"Sink rate normalized": "Sink rate, normalized", "Min": "Minimum", "Max": "Maximum"}
    limit = f"≤ {setting}" if metric == "sparsity" else f"ε={setting}"
    return f"{names.get(name, name)}{f', {limit}' if setting else ''}"


def _part_table(models: Sequence[AnalyzedModel]) -> Table | None:
    """The first token separately from the others."""
    own = [model for model in models if model.find("kurtosis", part=PARTS[0])]
    if not own:
        return None
    heads, fields = _heads(own)
    shown = [c for c in ACTIVATIONS if c.metric in ("kurtosis", "min", "max")]
    table = Table(
        name="analysis-parts",
        title="The first token and the others",
        caption="Activations of the first token of each text, and of all others.",
        reading=[READ_ACTIVATIONS],
        columns=[
            *heads,
            *(Column(c.title, group=group) for group in ("First token", "Other tokens") for c in shown),
        ],
        heads=len(heads) - 1,
    )
    for model in own:
        found = [_field(model.find(c.metric, c.setting, part), c.show) for part in PARTS for c in shown]
        table.rows.append([*fields(model), *found])
    return table


def _length_table(models: Sequence[AnalyzedModel], metric: str) -> Table | None:
    lengths = sorted({f.length for model in models for f in model.figures if f.metric == metric and f.length})
    if len(lengths) < 2:
        return None
    own = [m for m in models if len([f for f in m.figures if f.metric == metric and f.length]) > len(SINK_EPSILONS)]
    heads, fields = _heads(own)
    name = figure_name(metric)
    table = Table(
        name=f"analysis-lengths-{metric}",
        title=f"{name} by length",
        caption=f"{name} by the length of texts in tokens.",
        reading=[READ_LENGTHS, READ_RATES],
        columns=[*heads, Column("ε", "l"), *(Column(count(length), group="Tokens") for length in lengths)],
        heads=len(heads),
    )
    for model in own:
        for setting in (f"{e:g}" for e in SINK_EPSILONS):
            found = [_field(model.find(metric, setting, length=length), score) for length in lengths]
            table.rows.append([*fields(model), Field(setting, float(setting)), *found])
    return table


def _layer_table(models: Sequence[AnalyzedModel]) -> Table | None:
    own = [model for model in models if model.analysis]
    if not own:
        return None
    family = own[0].cell.family
    alone = len(own) <= 2  # with more models there is only room for the value
    titles = ("Largest |x|", "Token", "Channel", "Massive") if alone else ("Largest |x|",)
    table = Table(
        name=f"analysis-layers-{family}",
        title=f"{family}: largest |x| by layer",
        caption=f"The largest |x| of hidden states of {family}, by layer.",
        reading=[READ_LAYERS] if alone else [],
        columns=[
            Column("After", "l"),
            *(
                Column(
                    t if alone else kind_title(m.cell.attention), group=kind_title(m.cell.attention) if alone else ""
                )
                for m in own
                for t in titles
            ),
        ],
        heads=0,
    )
    frames = [model.analysis.layers_frame().query("part == 'all'") for model in own if model.analysis]
    for state in sorted({state for frame in frames for state in frame["state"]}):
        rows = [frame[frame["state"] == state].iloc[0] if state in set(frame["state"]) else None for frame in frames]
        line = [Field(next(row["where"] for row in rows if row is not None))]
        for row in rows:
            if row is None:
                line += [Field(NOTHING)] * len(titles)
                continue
            line.append(Field(fixed(abs(row["largest"])), abs(row["largest"])))
            if alone:
                whole = ("largest_token", "largest_channel", f"massive_{MASSIVE[-1]}")
                line += [Field(count(int(row[name])), float(row[name])) for name in whole]
        table.rows.append(line)
    return table


def _score_table(report: ReportData) -> Table | None:
    """Scores published with analyses."""
    table = Table(
        name="analysis-scores",
        title="Further scores",
        caption="Published scores of experiments that the other tables do not have.",
        reading=[],
        columns=[
            *(Column(t, "l") for t in ("Source", "Size", "Model", "Quantization", "Task", "Metric")),
            Column("Score"),
        ],
        heads=4,
    )
    for own in report.analyses.scores:
        label = NOTHING if own.cell.label == UNQUANTIZED else own.cell.label
        texts = (own.source, own.cell.family, kind_title(own.cell.attention), label, own.task, own.metric)
        table.rows.append([*map(Field, texts), Field(score(own.value), own.value)])
    return table if table.rows else None
