"""Write what the documentation shows of results/mini anew: the table in README.md, docs/mini.md and its plots.

python docs/tables.py            # `make docs`; tests/test_readme.py fails where the files are not what this writes
"""

import csv
import io
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

from qbench.cli import main as qbench

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("results", "mini")
KINDS = ("delta", "damage")
PLOTS = ("damage", "bits-per-weight")
METHODS = {"none": "unquantized", "bnb": "BNB", "gptq": "GPTQ", "hqq": "HQQ"}
MEASURES = {
    ("mini_wikitext", "word_perplexity"): "Perplexity ↓",
    ("mini_arc_easy", "acc_norm"): "Arc Easy, % ↑",
}
BETWEEN = re.compile(r"(?<=<!-- made by docs/tables.py -->\n).*?(?=<!-- end -->)", re.DOTALL)


def printed(*arguments: str) -> str:
    """What a command of qbench prints, without the machine's own paths: it is called from the root."""
    out = io.StringIO()
    with redirect_stdout(out):
        code = qbench(arguments)
    if code:
        sys.exit(code)
    return out.getvalue()


def compact(results: Path = RESULTS) -> str:
    """Scores of the twins, and what they lost, of one perplexity and one accuracy: a line for each quantization."""
    rows = {kind: _by_cell(printed("table", str(results), "--format", "csv", "--kind", kind)) for kind in KINDS}
    labels = {label: (method, int(bits)) for label, method, bits, *_ in rows["delta"]}
    order = sorted(labels, key=lambda label: (list(METHODS).index(labels[label][0]), -labels[label][1]))
    heads = [f"{name}: {column}" for name in MEASURES.values() for column in ("softmax", "softpick", "difference")]
    lines = [_line(["Quantization", *heads]), _line([":--", *["--:"] * len(heads)])]
    for label in order:
        method, bits = labels[label]
        fields = [METHODS[method] if method == "none" else f"{METHODS[method]} {bits}-bit"]
        for task, metric in MEASURES:
            key = (label, method, str(bits), task, metric)
            fields += _fields(rows["delta"][key], rows["damage"].get(key))
        lines.append(_line(fields))
    return "\n".join(lines) + "\n"


def _by_cell(text: str) -> dict[tuple[str, ...], dict[str, str]]:
    rows = csv.DictReader(io.StringIO(text))
    return {(row["label"], row["method"], row["bits"], row["task"], row["metric"]): row for row in rows}


def _fields(delta: dict[str, str], damage: dict[str, str] | None) -> list[str]:
    """softmax, softpick and the difference: of the damages where it is quantized, else none."""
    scores = {twin: f"{float(delta[twin]):.2f}" for twin in ("softmax", "softpick")}
    if damage is None:
        return [*scores.values(), ""]
    lost = [
        f"{score} ({_signed(damage, f'{twin}_damage', f'{twin}_low', f'{twin}_high')})"
        for twin, score in scores.items()
    ]
    return [*lost, _signed(damage, "difference", "low", "high")]


def _signed(row: dict[str, str], value: str, low: str, high: str) -> str:
    """A change with its sign; a star where its interval excludes zero. What rounds to zero has no minus."""
    starred = float(row[low]) > 0 or float(row[high]) < 0
    return f"{round(float(row[value]), 2) + 0.0:+.2f}" + r"\*" * starred


def _line(fields: list[str]) -> str:
    return f"| {' | '.join(fields)} |"


def page(results: Path = RESULTS) -> str:
    """All tables of the reference run, as `qbench table` prints them."""
    tables = {kind: printed("table", str(results), "--kind", kind) for kind in ("damage", "delta")}
    return "\n".join(
        [
            "# The reference run of the mini benchmark, in full\n",
            "Made from [results/mini](../results/mini) by `make docs`; edit nothing here. How the models and",
            "tasks were made, and why the difference between the two attentions is no evidence about softmax and",
            "softpick: [recipes/mini/README.md](../recipes/mini/README.md). How to read the tables:",
            "[README](../README.md#reading-the-tables).\n",
            "![Damage against bits: a row a metric, a column a method](mini-damage.png)\n",
            "## Damage: `qbench table results/mini --kind damage`\n",
            tables["damage"],
            "## Softpick against softmax: `qbench table results/mini`\n",
            tables["delta"],
        ]
    )


def with_table(readme: str, table: str) -> str:
    """README.md with the table in its place."""
    text, places = BETWEEN.subn(lambda _: f"\n{table}\n", readme)
    if places != 1:
        sys.exit("README.md must have one place between <!-- made by docs/tables.py --> and <!-- end -->.")
    return text


def draw(folder: Path, results: Path = RESULTS) -> None:
    """The plots, as PNG; the rest that the command draws is left out."""
    printed("table", str(results), "--plots", str(folder / "plots"))
    for plot in PLOTS:
        (folder / "plots" / f"mini-{plot}.png").replace(folder / f"mini-{plot}.png")
    for file in (folder / "plots").iterdir():
        file.unlink()
    (folder / "plots").rmdir()


def main() -> None:
    """Write all of it."""
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text(encoding="utf-8"), compact()), encoding="utf-8")
    (ROOT / "docs" / "mini.md").write_text(page(), encoding="utf-8")
    draw(ROOT / "docs")


if __name__ == "__main__":
    main()
