"""Regenerate the results shown in the documentation.

python docs/tables.py                   # `make docs`: the table in README.md, and docs/mini.md with its plots;
                                        # tests/test_readme.py fails if they are out of date
python docs/tables.py variants FOLDER   # docs/variants.md, from the records of recipes/variants.yaml
python docs/tables.py lowbit FOLDER     # the tables of docs/lowbit.md, from `run` and `analyze` of recipes/lowbit.yaml
python docs/tables.py analysis FOLDER TWINS
                                        # tables and plots of docs/analysis.md, from `run` and `analyze` of
                                        # recipes/variants.yaml and from `analyze` of recipes/mini.yaml
"""

import io
import re
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from qbench.cli import main as qbench
from qbench.report.delta import read_report
from qbench.report.kinds import KINDS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("results", "mini")
IN_README = "summary"
PLOTS = {"mini-damage": "mini-damage", "mini-bits-per-weight": "mini-bits-per-weight"}  # by their names in docs
TWINS_PLOTS = {"analysis-maps": "mini-maps", "analysis-boxes": "mini-boxes"}
ANALYSIS_PLOTS = {
    "analysis-sinks-by-length": "mini-sinks-by-length",
    "analysis-causes": "causes",
    "analysis-sensitivity": "mini-sensitivity-hqq-3-g64",
}
LOW_BIT_PLOTS = {"lowbit": "mini-lowbit"}
ANALYSIS_TABLES = ("Attention sinks", "Activations and sparsity", "Sink rate by length")
BETWEEN = re.compile(r"(?<=<!-- made by docs/tables.py -->\n).*?(?=<!-- end -->)", re.DOTALL)
VARIANTS = """# Nine attentions on mini

The mini twins and their seven siblings differ only in their attention: same world, initial weights, order
of text and schedule ([how](../recipes/mini/README.md#training)). `recipes/variants.yaml` runs all nine;
this page is generated from its records:

```
qbench run recipes/variants.yaml
python docs/tables.py variants results/runs/variants
```

**One seed of a model with 0.6M parameters, trained for 3,000 steps on an invented world, says nothing
about which attention is better.** A model that starts higher has more to lose. The page shows that every
kind can be loaded, trained, quantized, audited and compared.

![Training loss and gradient norm of the nine models](../recipes/mini/loss.svg)

## Unquantized

{baseline}

## Under quantization

{summary}
"""


def printed(*arguments: str) -> str:
    """What a qbench command prints. Run from the root, so it has no local paths."""
    out = io.StringIO()
    with redirect_stdout(out):
        code = qbench(arguments)
    if code:
        sys.exit(code)
    return out.getvalue()


def summary(results: Path = RESULTS) -> str:
    """The summary without its heading, because the README has its own."""
    printed_table = printed("table", str(results), "--kind", IN_README)
    return printed_table[printed_table.index("| ") :].strip() + "\n"


def page(results: Path = RESULTS) -> str:
    """All tables of the reference run, as `qbench table` prints them."""
    report = read_report(results)
    sections = []
    for kind in KINDS.values():
        if kind.name != IN_README and kind.on_page(report):
            sections.append(f"## {kind.title_for(report)}\n\n`qbench table results/mini --kind {kind.name}`\n")
            sections.append(printed("table", str(results), "--kind", kind.name))
    return "\n".join(
        [
            "# The reference run of the mini benchmark, in full\n",
            "Generated from [results/mini](../results/mini) by `make docs`; do not edit. How the models and tasks",
            "were made, and why the difference between the two attentions is not evidence about softmax and",
            "softpick: [recipes/mini/README.md](../recipes/mini/README.md). How to read the tables:",
            "[tables.md](tables.md).\n",
            "In short: 8 bits cost almost nothing. With GPTQ and HQQ perplexity rises with every step down from 8",
            "bits, and at 2 bits all tasks get worse. Not every step does harm: BNB's 4 bits slightly improve",
            "softmax's perplexity.\n",
            "![Damage against bits: one panel per metric](mini-damage.png)\n",
            *sections,
        ]
    )


def with_table(readme: str, table: str) -> str:
    """README.md with the table in its place, without its notes: docs/tables.md has them."""
    rows, _, _ = table.partition("\n\n")
    return filled(readme, f"{rows}\n")


def filled(page: str, content: str) -> str:
    """A page with the generated content in its place."""
    text, places = BETWEEN.subn(lambda _: f"\n{content}\n", page)
    if places != 1:
        sys.exit("The page must have one place between <!-- made by docs/tables.py --> and <!-- end -->.")
    return text


def draw(folder: Path, results: Path = RESULTS, plots: Mapping[str, str] = PLOTS, kind: str = IN_README) -> None:
    """Save these plots as PNG; the command's other plots are left out."""
    with TemporaryDirectory() as drawn:
        printed("table", str(results), "--kind", kind, "--plots", drawn)
        for name, plot in plots.items():
            picture = Image.open(Path(drawn, f"{plot}.png")).convert("RGB").quantize(128)  # a third of the bytes
            picture.save(folder / f"{name}.png", optimize=True)


def variants_page(results: Path) -> str:
    """The nine attentions of recipes/variants.yaml."""
    tables = {kind: printed("table", str(results), "--kind", kind).strip() for kind in ("baseline", "summary")}
    return VARIANTS.format(**tables).replace("### ", "#### ")


def analysis_tables(results: Path) -> str:
    """Sinks, activations, and damage with possible causes, for the nine attentions."""
    titles = re.split(r"^(?=### )", printed("table", str(results), "--kind", "analysis"), flags=re.M)
    chosen = [part.strip() for title in ANALYSIS_TABLES for part in titles if part.startswith(f"### {title}\n")]
    return "\n\n".join([*chosen, printed("table", str(results), "--kind", "causes").strip()]) + "\n"


def write_analysis(results: Path, twins: Path) -> None:
    """Write the tables and plots of docs/analysis.md."""
    page = ROOT / "docs" / "analysis.md"
    page.write_text(filled(page.read_text(encoding="utf-8"), analysis_tables(results)), encoding="utf-8")
    draw(page.parent, results, ANALYSIS_PLOTS, "analysis")
    draw(page.parent, twins, TWINS_PLOTS, "analysis")


def write_low_bit(results: Path) -> None:
    """Write the tables and the plot of docs/lowbit.md."""
    page = ROOT / "docs" / "lowbit.md"
    tables = printed("table", str(results), "--kind", "lowbit")
    page.write_text(filled(page.read_text(encoding="utf-8"), tables), encoding="utf-8")
    draw(page.parent, results, LOW_BIT_PLOTS, "lowbit")


def main() -> None:
    """Write everything."""
    if sys.argv[1:2] == ["lowbit"]:
        write_low_bit(Path(sys.argv[2]))
        return
    if sys.argv[1:2] == ["analysis"]:
        write_analysis(*map(Path, sys.argv[2:4]))
        return
    if sys.argv[1:2] == ["variants"]:
        (ROOT / "docs" / "variants.md").write_text(variants_page(Path(sys.argv[2])), encoding="utf-8")
        return
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text(encoding="utf-8"), summary()), encoding="utf-8")
    (ROOT / "docs" / "mini.md").write_text(page(), encoding="utf-8")
    draw(ROOT / "docs")


if __name__ == "__main__":
    main()
