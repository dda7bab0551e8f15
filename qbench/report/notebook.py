"""What notebooks get: tables that are text and can be shown, read as frames and drawn."""

import base64
import io
from fnmatch import fnmatch
from html import escape
from typing import TYPE_CHECKING

from qbench.report.delta import ReportData
from qbench.report.kinds import KINDS, NoRows, table_kind
from qbench.report.looks import PAGE, figure_width
from qbench.report.results import ReportError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class Pictures(dict[str, "Figure"]):
    """Figures by name; a notebook shows all of them, each with its caption."""

    def __repr__(self) -> str:
        """Their names."""
        return f"Pictures({', '.join(self)})"

    def only(self, pattern: str) -> "Pictures":
        """Those whose names match, such as *-score."""
        found = Pictures({name: figure for name, figure in self.items() if fnmatch(name, pattern)})
        if not found:
            raise ReportError(f"No figure is called {pattern}; there are {', '.join(self) or 'none'}.")
        return found

    def _repr_html_(self) -> str:
        return "\n".join(map(_picture, self.values()))


class Tables(str):
    """The text of tables in the format that was asked for, with what it was made from."""

    report: ReportData
    written_as: str  # md, latex, …
    kind: str | None

    @classmethod
    def of(cls, text: str, report: ReportData, format: str, kind: str | None) -> "Tables":
        """The text with its report."""
        tables = cls(text)
        tables.report, tables.written_as, tables.kind = report, format, kind
        return tables

    def __repr__(self) -> str:
        """The text as it is."""
        return str(self)

    def to_frame(self, kind: str | None = None) -> "pd.DataFrame":
        """The numbers of a kind of table, unrounded; kind: by default that of the text, or delta."""
        return frame_of(self.report, kind or self.kind)

    def figures(self, width: float | str = PAGE) -> Pictures:
        """All plots of these results. width: inches, "column" or "page" (of a paper)."""
        return pictures_of(self.report, width)

    def _repr_markdown_(self) -> str | None:
        return str(self) if self.written_as == "md" else None

    def _repr_html_(self) -> str | None:
        if self.written_as != "html":
            return None
        return f'<iframe srcdoc="{escape(self)}" style="width: 100%; height: 40em; border: 0"></iframe>'


def frame_of(report: ReportData, kind: str | None = None) -> "pd.DataFrame":
    """The rows of a kind of table, by default delta."""
    import pandas as pd

    rows = table_kind(kind).rows if kind else KINDS["delta"].rows
    if isinstance(rows, NoRows):
        raise ReportError(f"The kind {kind} has no rows. {rows.reason}")
    return pd.DataFrame(rows(report))


def pictures_of(report: ReportData, width: float | str = PAGE) -> Pictures:
    """All plots of results, by name. width: inches, "column" or "page"."""
    from qbench.report.plots import all_figures

    return Pictures(all_figures(report, figure_width(width)))


def _picture(figure: "Figure") -> str:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=150)
    data = base64.b64encode(out.getvalue()).decode()
    caption = escape(str(figure.get_label()))
    width = round(96 * figure.get_size_inches()[0])
    return f'<figure><img width="{width}" alt="{caption}" src="data:image/png;base64,{data}"><br>{caption}</figure>'
