"""`qbench check`, `import`, `accept` and `power`."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench.arguments import named_values
from qbench.commands.common import DONE, FAILED, RECORDS, Commands, add, count
from qbench.errors import InputError
from qbench.files import write_atomically
from qbench.gate.settings import EVERY
from qbench.github import add_to_summary, annotate
from qbench.numbers import byte_size, counted
from qbench.output import print_styled

if TYPE_CHECKING:
    from qbench.gate.verdict import GateReport
    from qbench.records.store import StoredRecord

ON_SCREEN = "default: a formatted table on a terminal, text in a pipe"


def add_check(commands: Commands) -> None:
    purpose = (
        "compare a run with its baseline: exit code 1 if a score got worse, an audit changed, or a cell failed or is "
        "missing; tolerances come from the recipe's `gate` field"
    )
    example = (
        "qbench check results/runs/mini --baseline results/mini --junit gate.xml\n"
        "  qbench check out/quantized out/original   # two output folders of lm-eval"
    )
    parser = add(commands, "check", _check, purpose, example)
    lm_eval = ", or lm-eval's --output_path (written with --log_samples)"
    parser.add_argument("folder", type=Path, metavar="RUN", help=RECORDS + lm_eval)
    baseline = parser.add_mutually_exclusive_group(required=True)
    baseline.add_argument("given", type=Path, metavar="BASELINE", nargs="?", help="the baseline to compare with")
    baseline.add_argument("--baseline", type=Path, metavar="DIR", help="the same as BASELINE")
    parser.add_argument("--scores-only", action="store_true", help="do not compare the audits")
    alpha = "how often a check may fail although nothing got worse; default: the recipe's, or 0.01"
    parser.add_argument("--alpha", type=float, metavar="SHARE", help=alpha)
    parser.add_argument(
        "--tolerances",
        metavar="KIND=LOSS,…",
        help="the largest losses that pass, such as accuracy=0.5,perplexity=1 (points and percent); default: the "
        "recipe's",
    )
    parser.add_argument(
        "--noninferiority",
        metavar="KIND=LOSS,…",
        help="the losses that the run must exclude at 95%%, such as accuracy=1,perplexity=2%%: too few documents fail, "
        "too; default: the recipe's",
    )
    parser.add_argument(
        "--max-damage",
        action="append",
        default=[],
        metavar="[LABEL:]KIND=LOSS,…",
        help="the largest damage that quantization may cause, such as hqq-4-g64:accuracy=1,perplexity=2%%; without "
        "LABEL, for every quantization; for lm-eval's output, BASELINE is the unquantized model; default: the recipe's",
    )
    parser.add_argument(
        "--min-documents",
        type=count,
        metavar="N",
        help="fail if a task has fewer documents; default: the recipe's, or 0",
    )
    for name, title in {"junit": "JUnit XML", "markdown": "Markdown", "json": "JSON"}.items():
        parser.add_argument(
            f"--{name}", type=Path, metavar="FILE", help=f"also write the report to this file, as {title}"
        )


def add_import(commands: Commands) -> None:
    purpose = "store another program's results as records that all other commands can read"
    example = "qbench import lm-eval out --cell family=8B,attention=softmax,method=awq,bits=4 --out results/runs/8b"
    parser = add(commands, "import", _import, purpose, example)
    parser.add_argument("program", choices=["lm-eval"], help="the program that wrote the results")
    output = "lm-eval's --output_path (written with --log_samples), or one of its results files"
    parser.add_argument("outputs", type=Path, nargs="+", metavar="OUTPUT", help=output)
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="folder for the records")
    cell = (
        "describe a model, such as family=8B,attention=softmax,method=awq,bits=4; give one --cell per model, in the "
        "order of their folders"
    )
    parser.add_argument("--cell", action="append", default=[], metavar="NAME=VALUE,…", help=cell)
    cells = (
        "the same for many models: a YAML file that maps the names of models to cells; default: each model is shown "
        "under its own name, as unquantized"
    )
    parser.add_argument("--cells", type=Path, metavar="FILE", help=cells)


def add_accept(commands: Commands) -> None:
    purpose = "replace a baseline with a run, without confirmation; print what changes, and log why in CHANGES.jsonl"
    example = (
        'qbench accept results/runs/mini --baseline results/mini --reason "transformers 5.23 uses a different kernel"'
    )
    parser = add(commands, "accept", _accept, purpose, example)
    _add_folders(parser, baseline="the baseline to replace, or a new folder")
    parser.add_argument("--reason", required=True, metavar="TEXT", help="why the baseline changes")


def add_power(commands: Commands) -> None:
    purpose = "estimate how many documents the gate needs to detect a given loss, from the noise of recorded results"
    parser = add(commands, "power", _power, purpose, "qbench power results/runs/mini")
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder of records")
    against = (
        "another run of the same cells: measure the noise between DIR and RUN; default: between quantized and "
        "unquantized cells of DIR"
    )
    parser.add_argument("--against", type=Path, metavar="RUN", help=against)
    cells = (
        "how many of these cells you expect to change; the others cannot fail, so the tests are not adjusted for them; "
        "default: all"
    )
    parser.add_argument("--cells", type=int, metavar="N", help=cells)
    parser.add_argument("--format", choices=("text", "markdown"), help=ON_SCREEN)


def _add_folders(
    parser: argparse.ArgumentParser, baseline: str = "the baseline to compare with, a folder of records"
) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help=RECORDS)
    parser.add_argument("--baseline", type=Path, metavar="DIR", required=True, help=baseline)


def _check(options: argparse.Namespace) -> int:
    from qbench.gate.render import annotations, error_junit
    from qbench.gate.verdict import check

    try:
        override = _gate_settings(options)
        report = check(options.folder, options.given or options.baseline, None, options.scores_only, override)
    except InputError as error:  # what reads the file must not find an older one
        if options.junit:
            _write_report(options.junit, error_junit(str(error)))
        raise
    _show(report)
    _write_reports(options, report)
    annotate(annotations(report))
    return DONE if report.passed else FAILED


def _gate_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of the gate that the command line gives, as a recipe has them."""
    found = {name: getattr(options, name) for name in ("alpha", "min_documents")}
    found = {name: value for name, value in found.items() if value is not None}
    for name in ("tolerances", "noninferiority"):
        if (text := getattr(options, name)) is not None:
            found[name] = _losses(text, f"--{name}")
    for text in options.max_damage:
        label, _, losses = text.rpartition(":")
        limits = found.setdefault("max_damage", {}).setdefault(label.strip() or EVERY, {})
        limits.update(_losses(losses, "--max-damage"))
    return found


def _losses(text: str, option: str) -> dict[str, float | str]:
    given = named_values(text, option, "accuracy=1,perplexity=2%")
    return {kind: _number_or_text(loss) for kind, loss in given.items()}


def _number_or_text(text: str) -> float | str:
    """A number, or the text, which may have a unit: 1%."""
    try:
        return float(text)
    except ValueError:
        return text


def _import(options: argparse.Namespace) -> int:
    from qbench.records.lm_eval_import.cells import parse_cell, read_cells
    from qbench.records.lm_eval_import.store import import_lm_eval

    if options.cell and options.cells:
        raise InputError("--cell and --cells are both given; give one of them.")
    cells = [parse_cell(text) for text in options.cell]
    by_model = read_cells(options.cells) if options.cells else None
    stored, notes = import_lm_eval(options.outputs, options.out, cells, by_model)
    for note in notes:
        print(note)
    for own in stored:
        named = (
            " (shown as unquantized; if it is quantized, describe it with --cell)" if own.record.cell.unnamed else ""
        )
        print(f"{own.record.cell.name}: {counted(len(own.record.metrics), 'score')}{_source(own)}{named}")
    audited = "not audited: lm-eval's output does not show what was quantized"
    print(f"{counted(len(stored), 'record')} in {options.out} ({audited})")
    return DONE


def _source(stored: "StoredRecord") -> str:
    """The folder that an imported record comes from: it shows whether the cells were given in the right order."""
    imported = stored.record.imported
    return f" from {Path(imported.files[0]).parent}" if imported else ""


def _accept(options: argparse.Namespace) -> int:
    from qbench.gate.accept import accept, check_reason, is_new
    from qbench.gate.pairing import NoBaselineError
    from qbench.gate.verdict import check

    check_reason(options.reason)
    report, not_compared, new = None, "", is_new(options.baseline)
    try:
        report = check(options.folder, options.baseline)
        _show(report)
        print()
    except NoBaselineError:
        not_compared = f"{options.baseline} is new."
    except InputError as error:  # for instance different documents: accept is there to replace it
        not_compared = str(error)
    size = accept(options.folder, options.baseline, options.reason, report, not_compared)
    if not_compared:  # only now: if accept fails, its error is enough
        print(f"Not compared: {not_compared}\n")
    has = "is a new baseline with" if new else "now has"
    print(f"{options.baseline} {has} the records of {options.folder} ({byte_size(size)}).")
    return DONE


def _power(options: argparse.Namespace) -> int:
    from qbench.commands.gate_screen import powers_on_screen
    from qbench.gate.power import power, to_text
    from qbench.report.terminal import draws_tables

    found = power(options.folder, options.against, options.cells)
    if options.format is None and draws_tables():
        print_styled(powers_on_screen(found))
    else:
        print(to_text(found, options.format or "text"))
    return DONE


def _show(report: "GateReport") -> None:
    """Print a report: tables for the screen on a terminal, plain text elsewhere."""
    from qbench.commands.gate_screen import report_on_screen
    from qbench.gate.render import to_text
    from qbench.report.terminal import draws_tables

    if draws_tables():
        print_styled(report_on_screen(report))
    else:
        sys.stdout.write(to_text(report))


def _write_reports(options: argparse.Namespace, report: "GateReport") -> None:
    from qbench.gate.render import to_json, to_junit, to_markdown

    for file, render in ((options.junit, to_junit), (options.markdown, to_markdown), (options.json, to_json)):
        if file is not None:
            _write_report(file, render(report))
    add_to_summary(to_markdown(report))


def _write_report(file: Path, text: str) -> None:
    try:
        write_atomically(file, text)
    except OSError as error:
        raise InputError(f"{file}: the report cannot be written ({error.strerror}).") from None
    print(f"{file} written", file=sys.stderr)
