"""The kinds of tables. Adding one is one entry in KINDS: the command line and its help, every format, the HTML page
and docs/mini.md read it from there."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from qbench.errors import did_you_mean
from qbench.report.answer import answer, caveats, headline_rows, headline_tables
from qbench.report.attentions import comparison
from qbench.report.damage_tables import damage_tables, summary_tables
from qbench.report.delta import ReportData
from qbench.report.divergence import has_kl, kl_rows, kl_tables, why_no_kl
from qbench.report.passkey import has_passkey, passkey_rows, passkey_tables
from qbench.report.remarks import remarks_on_delta, settings_used
from qbench.report.results import ReportError
from qbench.report.score_tables import baseline_tables, delta_tables
from qbench.report.tables import Table
from qbench.report.tidy import DataRow, baseline_rows, damage_rows, delta_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT_KIND = "delta"
LONE_KIND = "damage"  # the default for people, if no family has two models to compare


@dataclass(frozen=True)
class NoRows:
    """Why a kind has no rows for programs, in a sentence."""

    reason: str


def _always(report: ReportData) -> bool:
    return True


def _several_families(report: ReportData) -> bool:
    """With a single family, the first Δ table already shows the unquantized models."""
    return len({row.quantization.family for row in report.deltas}) > 1


def _has_headline(report: ReportData) -> bool:
    return bool(report.headlines)


def _has_analyses(report: ReportData) -> bool:
    return bool(report.analyses.models)


def _has_causes(report: ReportData) -> bool:
    return bool(report.analyses.models) and bool(_of("causes", "model_causes")(report))


def _has_sensitivities(report: ReportData) -> bool:
    return bool(report.analyses.sensitivities)


def _no_reason(report: ReportData) -> str:
    return ""


def _not_analyzed(report: ReportData) -> str:
    return "`qbench analyze RECIPE` measures it."


def _no_remarks(report: ReportData) -> list[str]:
    return []


def _no_figures(report: ReportData, width: float) -> "Iterator[tuple[str, Figure]]":
    return iter(())


def _of(module: str, function: str) -> Callable[..., Any]:
    """A function whose module is imported when it is called: analyses need numpy, pictures matplotlib."""
    return lambda *given: getattr(import_module(f"qbench.report.{module}"), function)(*given)


@dataclass(frozen=True)
class TableKind:
    """A kind of table: what it is, and the functions that make it."""

    name: str  # as --kind takes it
    help: str  # as --help explains it
    title: str  # over it on the HTML page; {comparison} is what the report compares: softpick against softmax
    tables: Callable[[ReportData], list[Table]]  # for people
    rows: Callable[[ReportData], list[DataRow]] | NoRows  # for programs
    on_page: Callable[[ReportData], bool] = _always  # whether the HTML page of all kinds has it
    why_none: Callable[[ReportData], str] = _no_reason  # if there are no tables, a sentence
    lead: Callable[[ReportData], list[str]] = _no_remarks  # sentences above the tables
    remarks: Callable[[ReportData], list[str]] = _no_remarks  # below the tables
    figures: "Callable[[ReportData, float], Iterator[tuple[str, Figure]]]" = _no_figures  # (name, picture), of a width
    lone_title: str = ""  # instead of title, if no family has two models to compare

    def title_for(self, report: ReportData) -> str:
        """The title over the tables of these results."""
        results = report.results
        if self.lone_title and not results.has_pairs:
            return self.lone_title
        kinds = results.all_kinds
        return self.title.format(comparison=comparison(kinds) if kinds else "")


# In the order of the page: the answer first, then the rows behind it.
KINDS = {
    kind.name: kind
    for kind in (
        TableKind(
            name="summary",
            help="the damage to one metric per task, in one table",
            title="Summary",
            tables=summary_tables,
            rows=NoRows("The kinds headline, damage and delta have all of its numbers."),
            lead=answer,
            remarks=lambda report: [*caveats(report), *settings_used(report)],
        ),
        TableKind(
            name="headline",
            help="how much less each attention lost than the reference, over all tasks and methods",
            title="Headline: who lost less",
            tables=headline_tables,
            rows=headline_rows,
            on_page=_has_headline,
        ),
        TableKind(
            name="damage",
            help="quantized − unquantized for each model, and flipped answers",
            title="Damage: what quantization costs",
            tables=damage_tables,
            rows=damage_rows,
        ),
        TableKind(
            name="delta",
            help="softpick − softmax, or each attention − the recipe's reference",
            title="Δ: {comparison}",
            lone_title="Scores",
            tables=delta_tables,
            rows=delta_rows,
            remarks=remarks_on_delta,
        ),
        TableKind(
            name="baseline",
            help="the unquantized models, all families side by side",
            title="Unquantized models",
            tables=baseline_tables,
            rows=baseline_rows,
            on_page=_several_families,
        ),
        TableKind(
            name="passkey",
            help="passkey accuracy by length, if the recipe has that task",
            title="Passkey accuracy by length",
            tables=passkey_tables,
            rows=passkey_rows,
            on_page=has_passkey,
        ),
        TableKind(
            name="kl",
            help="KL per token from the unquantized model: mean, percentiles, top-1 agreement, perplexity ratio",
            title="KL from the unquantized model",
            tables=kl_tables,
            rows=kl_rows,
            on_page=has_kl,
            why_none=why_no_kl,
            figures=_of("divergence_plots", "kl_figures"),
        ),
        TableKind(
            name="analysis",
            help="sinks, activations, sparsity and dead heads, as `qbench analyze` measured them",
            title="Analysis: why quantization hurts",
            tables=_of("analysis_tables", "analysis_tables"),
            rows=_of("analysis_tables", "analysis_rows"),
            on_page=_has_analyses,
            why_none=_not_analyzed,
            remarks=_of("analysis_tables", "analysis_remarks"),
            figures=_of("analysis_plots", "analysis_figures"),
        ),
        TableKind(
            name="causes",
            help="what quantization cost each model, next to its sink rate, and its activations' kurtosis and maximum",
            title="Damage and possible causes",
            tables=_of("causes", "cause_tables"),
            rows=_of("causes", "cause_rows"),
            on_page=_has_causes,
            why_none=_not_analyzed,
            figures=_of("cause_plots", "cause_figures"),
        ),
        TableKind(
            name="lowbit",
            help="what low-bit activations and KV cache cost, next to the activations' maximum and kurtosis",
            title="Low-bit activations and KV cache",
            tables=_of("lowbit", "low_bit_tables"),
            rows=_of("lowbit", "low_bit_rows"),
            on_page=_of("lowbit", "has_low_bit"),
            why_none=_of("lowbit", "why_no_low_bit"),
            remarks=_of("lowbit", "low_bit_remarks"),
            figures=_of("lowbit_plots", "low_bit_figures"),
        ),
        TableKind(
            name="sensitivity",
            help="what quantizing each linear layer alone costs",
            title="Where it hurts",
            tables=_of("sensitivity", "sensitivity_tables"),
            rows=_of("sensitivity", "sensitivity_rows"),
            on_page=_has_sensitivities,
            figures=_of("heat_maps", "sensitivity_figures"),
        ),
    )
}


def table_kind(name: str) -> TableKind:
    """The kind of this name."""
    if name not in KINDS:
        raise ReportError(f"kind is {name!r}; it must be one of {', '.join(KINDS)}.{did_you_mean(name, KINDS)}")
    return KINDS[name]
