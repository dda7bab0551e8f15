"""The HTML report: one file with tables, plots, audits, costs, provenance and the recipe; it needs no network."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from qbench.records.schema import Cost, Record
from qbench.report.audits import audit_table
from qbench.report.delta import Report
from qbench.report.metrics import method_name, metric_name
from qbench.report.outcomes import Outcome
from qbench.report.suspicious import suspicious
from qbench.report.tables import Column, Field, Kind, Table, formatted, remarks, tables

KINDS: Mapping[Kind, str] = {
    "summary": "Summary",
    "damage": "Damage: what quantization costs",
    "delta": "Δ: softpick against softmax",
    "baseline": "Unquantized models",
}
MEASURED_ON = ("device", "dtype")
SIGNS = "▲ for the better, ▼ for the worse, whichever way the metric points."


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    anchor: str
    title: str
    texts: Sequence[str] = ()
    bullets: Sequence[str] = ()
    tables: Sequence["Shown"] = ()
    plots: Sequence[tuple[str, str]] = ()
    listings: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Shown:
    """A table as the page needs it."""

    title: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Field]]
    footnotes: Mapping[str, str] = field(default_factory=dict)

    @property
    def groups(self) -> list[tuple[str, int]]:
        """The line above the header: titles and how many columns each is over."""
        if not any(column.group for column in self.columns):
            return []
        return [(group, len(list(own))) for group, own in groupby(self.columns, lambda column: column.group)]


def page(report: Report, kind: Kind | None = None) -> str:
    """The report as one HTML file, with the tables of one kind or of all."""
    import jinja2

    folder = Path(__file__).parent
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["typeset"] = _typeset
    template = environment.from_string((folder / "page.html").read_text(encoding="utf-8"))
    sections = [section for section in _sections(report, [kind] if kind else _kinds(report)) if section is not None]
    css, script = ((folder / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    title = f"Quantization results: {report.outcomes.source.resolve().name}"
    # Ours, and free of markup: they must reach the browser as they are.
    own = {"css": jinja2.utils.markupsafe.Markup(css), "script": jinja2.utils.markupsafe.Markup(script)}
    words = {"summary": _summary(report), "example": _example(report)}
    return template.render(title=title, sections=sections, **words, **own)


def _kinds(report: Report) -> list[Kind]:
    """All kinds; of a single family the first table of Δ is that of the unquantized."""
    families = {row.quantized.family for row in report.deltas}
    return [kind for kind in KINDS if kind != "baseline" or len(families) > 1]


def _sections(report: Report, kinds: Sequence[Kind]) -> list[Section | None]:
    """What is wrong, the answer, how it looks, and then the rows behind it."""
    records = [outcome for outcome in report.outcomes.cells if outcome.stored]
    first, *others = kinds
    return [
        *(_findings(report), _results(report, first), _plots(report)),
        *(_results(report, kind) for kind in others),
        *((_audits(report), _costs(records), _provenance(records), _recipe(report)) if records else ()),
    ]


def _summary(report: Report) -> str:
    cells = report.outcomes.cells
    done = sum(bool(outcome.scores) for outcome in cells)
    state = f"{done} of {len(cells)} cells have scores"
    return " ".join([f"{', '.join([state, *_setting(report)])}.", *remarks(report)])


def _setting(report: Report) -> list[str]:
    """How much was measured, on what and when, as far as it is known."""
    done = [outcome for outcome in report.outcomes.cells if outcome.scores]
    counts = sorted({score.documents for outcome in done for score in outcome.scores.values() if score.documents})
    records = [record for _, record in _stored(done)]
    where = [sorted({str(getattr(r.identity.what, name)) for r in records}) for name in MEASURED_ON]
    days = sorted({record.provenance.finished[:10] for record in records})
    return [
        *[f"{_span([f'{count:,}' for count in counts])} documents a task"] * bool(counts),
        *(" and ".join(names) for names in where if names),
        *[_span(days)] * bool(days),
    ]


def _span(ordered: Sequence[str]) -> str:
    return " to ".join(dict.fromkeys([*ordered[:1], *ordered[-1:]]))


def _example(report: Report) -> str:
    """Words to filter rows by, of this report's own."""
    last = report.deltas[-1].quantized
    measure = next(row.measure for row in report.deltas if row.quantized == last)
    return f"{last.family} {method_name(last.method).lower()} {metric_name(measure).split()[0].lower()}"


def _findings(report: Report) -> Section | None:
    found = suspicious(report)
    if not found:
        return None
    return Section("suspicious", "Suspicious", bullets=[str(finding) for finding in found])


def _results(report: Report, kind: Kind) -> Section | None:
    made = tables(report, kind)
    if not made:
        return None
    reading = [*dict.fromkeys(text for table in made for text in table.reading), SIGNS]
    return Section(kind, KINDS[kind], [" ".join(reading)], tables=[_shown(table) for table in made])


def _shown(table: Table) -> Shown:
    return Shown(table.title, table.caption, table.columns, table.rows, table.footnotes)


def _plots(report: Report) -> Section:
    from qbench.report.plots import PlotError, figures, inline_svg

    try:
        drawn = [(name, inline_svg(figure)) for name, figure in figures(report)]
    except PlotError as error:
        return Section("plots", "Plots", [str(error)])
    return Section("plots", "Plots", [] if drawn else ["There is nothing to draw."], plots=drawn)


def _audits(report: Report) -> Section | None:
    table = audit_table(report.outcomes)
    return Section("audits", "Audits", [" ".join(table.reading)], tables=[_shown(table)]) if table else None


def _costs(records: Sequence[Outcome]) -> Section | None:
    costs = [(record.cell.name, record.cost) for _, record in _stored(records) if record.cost]
    phases = list(dict.fromkeys(phase for _, cost in costs for phase in cost.seconds))
    columns = [
        *(Column("Cell", "l"), *(Column(f"{phase.capitalize()} (s)") for phase in phases), Column("Tokens a second")),
        *(Column("Host memory (MB)"), Column("Device memory (MB)"), Column("Weights (MB)")),
    ]
    rows = [_cost_fields(name, cost, phases) for name, cost in costs]
    return Section("costs", "Costs", tables=[Shown("Costs", "What each cell took.", columns, rows)]) if rows else None


def _cost_fields(name: str, cost: Cost, phases: Sequence[str]) -> list[Field]:
    sizes = (cost.peak_host_bytes, cost.peak_device_bytes, cost.weight_bytes)
    return [
        *(Field(name), *(formatted(cost.seconds.get(phase), "{:.1f}") for phase in phases)),
        formatted(cost.tokens_per_second, "{:.0f}"),
        *(formatted(None if size is None else size / 1e6, "{:.1f}") for size in sizes),
    ]


def _provenance(records: Sequence[Outcome]) -> Section:
    titles = ("Cell", "State", "Checkpoint", "Key", "Commit", "Started (UTC)", "Finished (UTC)")
    columns = [Column(title, "l") for title in titles]
    rows, machines = [], dict[str, list[str]]()
    for outcome, record in _stored(records):
        own = record.provenance
        texts = (record.cell.name, record.state, record.cell.checkpoint, record.key[:10], (own.git_commit or "–")[:10])
        rows.append([Field(text) for text in (*texts, _minute(own.started), _minute(own.finished))])
        setting = json.dumps({"machine": own.machine, "packages": own.packages}, indent=1, ensure_ascii=False)
        machines.setdefault(setting, []).append(outcome.cell.name)
    listings = [(f"Machine and packages of {len(names)} cells", text) for text, names in machines.items()]
    table = Shown("Provenance", "Where each number comes from.", columns, rows)
    return Section("provenance", "Provenance", tables=[table], listings=listings)


def _recipe(report: Report) -> Section:
    recipes = report.outcomes.recipes()
    return Section("recipe", "Recipe", listings=[(name, _yaml(content)) for name, content in recipes.items()])


def _stored(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, Record]]:
    return [(outcome, outcome.stored.record) for outcome in outcomes if outcome.stored]


def _yaml(content: Mapping[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True)


def _minute(time: str) -> str:
    """A record's time, which is ISO 8601 in UTC, as people write it."""
    return time[:16].replace("T", " ")


def _typeset(text: str) -> str:
    """True minus signs, since a hyphen is too short to be seen; arrows stay in the line of their metric's name."""
    return re.sub(r"(?<![\w.])-(?=\d)", "−", re.sub(" (?=[↑↓])", "\u00a0", text))
