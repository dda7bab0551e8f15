"""The HTML report: one file with tables, plots, audits, costs, provenance and the recipe. It needs no network."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench.numbers import count, counted, fixed
from qbench.records.schema import Cost, Record
from qbench.report.audits import audit_table
from qbench.report.delta import ReportData
from qbench.report.fitting import block_height, starts_block
from qbench.report.kinds import KINDS, TableKind, table_kind
from qbench.report.looks import COLUMN
from qbench.report.metrics import metric_name
from qbench.report.remarks import remarks
from qbench.report.results import NOTHING, CellResult
from qbench.report.tables import Column, Field, Table, number_field, shared_reading

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURED_ON = ("device", "dtype")  # of a record's identity
# A plot of many quantizations has 200 kB and takes a second; a folder of 500 cells would have 30 of them.
MAX_PLOT_CHARACTERS = 1_000_000
PLOT_WIDTH = 11.0  # inches: on a screen, its letters are as large as the page's
MAX_OPEN_ROWS = 20  # longer tables are collapsed
MAX_OPEN_BULLETS = 5
MORE_PLOTS = "Only the first plots are drawn here; `qbench table {source} --plots FOLDER` draws all of them."


@dataclass(frozen=True)
class PagePlot:
    """A picture in the page."""

    name: str
    caption: str
    svg: str


@dataclass(frozen=True)
class PageSection:
    """A part of the page."""

    anchor: str
    title: str
    texts: Sequence[str] = ()
    bullets: Sequence[str] = ()
    lists: Sequence[tuple[str, Sequence[str]]] = ()  # collapsed, each with its title
    tables: Sequence[Table] = ()
    plots: Sequence["PagePlot"] = ()
    listings: Sequence[tuple[str, str]] = ()


def page(report: ReportData, kind: str | None = None) -> str:
    """The report as one HTML file, with the tables of one kind or of all."""
    import jinja2

    folder = Path(__file__).parent
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"typeset": _typeset, "spans": _spans}
    template = environment.from_string((folder / "page.html").read_text(encoding="utf-8"))
    kinds = [table_kind(kind)] if kind else [own for own in KINDS.values() if own.on_page(report)]
    css, script = ((folder / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return template.render(
        title=f"Quantization results: {report.results.source.resolve().name}",
        sections=_sections(report, kinds),
        summary=_summary(report),
        example=_example(report),
        max_open_rows=MAX_OPEN_ROWS,
        # Our own files, without user input: they must reach the browser unescaped.
        css=jinja2.utils.markupsafe.Markup(css),
        script=jinja2.utils.markupsafe.Markup(script),
    )


def _sections(report: ReportData, kinds: Sequence[TableKind]) -> list[PageSection]:
    """What is wrong, the answer, the plots, and then the rows behind them."""
    first, *others = kinds
    sections = [_findings(report), _tables(report, first), _plots(report)]
    sections += [_tables(report, kind) for kind in others]
    records = [result.stored.record for result in report.results.parts if result.stored]
    if records:
        sections += [_audits(report), _costs(records), _provenance(records), _recipe(report)]
    return [section for section in sections if section]


def _summary(report: ReportData) -> str:
    cells = report.results.parts
    done = [result for result in cells if result.scores]
    state = f"{len(done)} of {len(cells)} cells have scores"
    return " ".join([f"{', '.join([state, *_setting(done)])}.", *remarks(report)])


def _setting(done: Sequence[CellResult]) -> list[str]:
    """How much was measured, on what and when, as far as known."""
    found = []
    if counts := sorted({score.documents for result in done for score in result.scores.values() if score.documents}):
        found.append(f"{_span([count(number) for number in counts])} documents per task")
    records = [result.stored.record for result in done if result.stored]
    for name in MEASURED_ON:
        if values := {str(getattr(record.identity.what, name)) for record in records}:
            found.append(" and ".join(sorted(values)))
    if days := sorted({record.provenance.finished[:10] for record in records}):
        found.append(_span(days))
    return found


def _span(ordered: Sequence[str]) -> str:
    return " to ".join(dict.fromkeys([*ordered[:1], *ordered[-1:]]))


def _example(report: ReportData) -> str:
    """Example words to filter rows by, taken from this report."""
    if not report.deltas:
        return ""
    last = report.deltas[-1].quantization
    measure = next(row.measure for row in report.deltas if row.quantization == last)
    return f"{last.family} {last.method_title.lower()} {metric_name(measure).split()[0].lower()}"


def _findings(report: ReportData) -> PageSection | None:
    bullets = list(map(str, report.findings))
    if not bullets:
        return None
    if len(bullets) <= MAX_OPEN_BULLETS:
        return PageSection("suspicious", "Suspicious", bullets=bullets)
    return PageSection("suspicious", "Suspicious", lists=[(counted(len(bullets), "suspicious result"), bullets)])


def _tables(report: ReportData, kind: TableKind) -> PageSection | None:
    tables = kind.tables(report)
    if not tables:
        return None
    drawn, why = _drawn(report, _figures(report, kind))
    texts = [" ".join(shared_reading(tables)), *why, *kind.remarks(report)]
    return PageSection(kind.name, kind.title_for(report), texts, kind.lead(report), tables=tables, plots=drawn)


def _figures(report: ReportData, kind: TableKind) -> "Iterator[tuple[str, Figure]]":
    """A kind's figures: several stand side by side; a single one fills the page."""
    figures = kind.figures(report, COLUMN)
    first = list(islice(figures, 2))
    yield from kind.figures(report, PLOT_WIDTH) if len(first) == 1 else chain(first, figures)


def _plots(report: ReportData) -> PageSection:
    from qbench.report.plots import figures

    drawn, why = _drawn(report, figures(report, PLOT_WIDTH))
    return PageSection("plots", "Plots", why if drawn or why else ["There is nothing to draw."], plots=drawn)


def _drawn(report: ReportData, figures: "Iterator[tuple[str, Figure]]") -> tuple[list[PagePlot], list[str]]:
    """Pictures to put into the page, and a sentence that says why there are none, or not all."""
    from qbench.report.drawing import PlotError, inline_svg

    drawn: list[PagePlot] = []
    try:
        for name, figure in figures:
            if sum(len(plot.svg) for plot in drawn) > MAX_PLOT_CHARACTERS:
                return drawn, [MORE_PLOTS.format(source=shlex.quote(str(report.results.source)))]
            drawn.append(PagePlot(name, str(figure.get_label()), inline_svg(figure)))
    except PlotError as error:
        return [], [str(error)]
    return drawn, []


def _audits(report: ReportData) -> PageSection | None:
    table = audit_table(report.results)
    return PageSection("audits", "Audits", [" ".join(table.reading)], tables=[table]) if table else None


def _costs(records: Sequence[Record]) -> PageSection | None:
    costs = [(record.cell.name, record.cost) for record in records if record.cost]
    if not costs:
        return None
    phases = list(dict.fromkeys(phase for _, cost in costs for phase in cost.seconds))
    titles = [f"{phase.capitalize()} (s)" for phase in phases]
    titles += ["Tokens per second", "Host memory (MB)", "Device memory (MB)", "Weights (MB)"]
    table = Table("costs", "Costs", "What each cell took.", [], [Column("Cell", "l"), *map(Column, titles)])
    table.rows += [_cost_fields(name, cost, phases) for name, cost in costs]
    return PageSection("costs", "Costs", tables=[table])


def _cost_fields(name: str, cost: Cost, phases: Sequence[str]) -> list[Field]:
    seconds = [cost.seconds.get(phase) for phase in phases]
    sizes = [cost.peak_host_bytes, cost.peak_device_bytes, cost.weight_bytes]
    megabytes = [None if size is None else size / 1e6 for size in sizes]
    return [
        Field(name),
        *(number_field(value, _one_decimal) for value in seconds),
        number_field(cost.tokens_per_second, lambda rate: fixed(rate, 0)),
        *(number_field(value, _one_decimal) for value in megabytes),
    ]


def _one_decimal(value: float) -> str:
    return fixed(value, 1)


def _provenance(records: Sequence[Record]) -> PageSection:
    titles = ("Cell", "State", "Checkpoint", "Key", "Commit", "Started (UTC)", "Finished (UTC)")
    columns = [Column(title, "l") for title in titles]
    table = Table("provenance", "Provenance", "Where each number comes from.", [], columns)
    for record in records:
        own, commit = record.provenance, record.provenance.git_commit or NOTHING
        texts = [record.cell.name, record.state, record.cell.checkpoint, record.key[:10], commit[:10]]
        table.rows.append([Field(text) for text in (*texts, _minute(own.started), _minute(own.finished))])
    return PageSection("provenance", "Provenance", tables=[table], listings=_settings(records))


def _settings(records: Sequence[Record]) -> list[tuple[str, str]]:
    """The machine and packages that all cells share, then what only some have, each with their names."""
    having: dict[tuple[str, str, str], list[str]] = {}  # cells, by part, name and value
    for record in records:
        for part in ("machine", "packages"):
            for name, value in getattr(record.provenance, part).items():
                key = (part, name, json.dumps(value, ensure_ascii=False))
                having.setdefault(key, []).append(record.cell.name)
    shared: dict[str, dict[str, Any]] = {"machine": {}, "packages": {}}
    some_have: dict[tuple[str, ...], list[str]] = {}
    for (part, name, value), cells in having.items():
        if len(cells) == len(records):
            shared[part][name] = json.loads(value)
        else:
            own = json.loads(value)
            some_have.setdefault(tuple(cells), []).append(f"{name} {own if isinstance(own, str) else value}")
    title = f"Machine and packages {'shared by all' if some_have else 'of'} {counted(len(records), 'cell')}"
    return [
        (title, json.dumps(shared, indent=1, ensure_ascii=False)),
        *(
            (f"Only {counted(len(own), 'cell')}: {', '.join(facts)}", "\n".join(own))
            for own, facts in some_have.items()
        ),
    ]


def _recipe(report: ReportData) -> PageSection:
    recipes = report.results.recipes()
    return PageSection("recipe", "Recipe", listings=[(name, _yaml(content)) for name, content in recipes.items()])


def _yaml(content: Mapping[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True)


def _minute(time: str) -> str:
    """A record's time, which is ISO 8601 in UTC, as people write it."""
    return time[:16].replace("T", " ")


def _typeset(text: str) -> str:
    """True minus signs, since a hyphen is too short; arrows stay on the line of their metric's name."""
    return re.sub(r"(?<![\w.])-(?=\d)", "−", re.sub(" (?=[↑↓])", "\u00a0", text))


def _spans(table: Table) -> list[list[int]]:
    """For each row, how many rows each of its leading fields spans; 0 if the one above spans it."""
    rows = table.rows
    return [
        [block_height(rows, i, n) if starts_block(rows, i, n) else 0 for n in range(min(table.heads, len(row)))]
        for i, row in enumerate(rows)
    ]
