"""The `qbench` command: every command with its arguments, and what it calls.

Exit codes: 0 success, 1 a check or a cell failed, 2 a wrong call, recipe or file, 3 a bug in qbench, 130 Ctrl-C.
Each command imports what it needs when it runs: a table must not wait for torch.
"""

import argparse
import errno
import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import qbench
from qbench.arguments import Parser
from qbench.errors import InputError
from qbench.files import write_atomically
from qbench.numbers import byte_size, counted
from qbench.output import print_styled, runner_command, safe_output

if TYPE_CHECKING:
    from qbench.gate.verdict import GateReport
    from qbench.recipe.schema import Recipe

DONE, FAILED, WRONG, CRASHED, INTERRUPTED = 0, 1, 2, 3, 130
MIN_INCHES, MAX_INCHES = 2.0, 40.0  # of a figure
STEP_SUMMARY = "GITHUB_STEP_SUMMARY"  # on GitHub's runners, it holds the path of a file
RECORDS = "a folder of records, as written by `qbench run`"
RESULTS = f"{RECORDS}, or published numbers: a CSV file or a folder of CSV files"
ON_SCREEN = "default: tables for the screen on a terminal, md if piped or written to a file"

Commands = Any  # argparse's subparsers; their type is private


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command."""
    with safe_output() as (out, _):
        code = _main(arguments)
        out.flush()
        if out.lost and code == DONE:
            print(f"qbench: the output could not be written ({out.lost.strerror}).", file=sys.stderr)
            return WRONG
        return code


def _main(arguments: Sequence[str] | None) -> int:
    if not sys.stderr.isatty():
        for library in ("DATASETS", "HUB"):  # in a log, each step of their progress bars would be a line
            os.environ.setdefault(f"HF_{library}_DISABLE_PROGRESS_BARS", "1")
    try:
        options = _parser().parse_args(arguments)
        return options.run(options)
    except KeyboardInterrupt:
        print("\nqbench: stopped.", file=sys.stderr)
        return INTERRUPTED
    except InputError as error:
        print(f"qbench: {error}", file=sys.stderr)
        return WRONG
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            print(f"qbench: {str(error.filename)[:60]}… is too long for a path; use a shorter one.", file=sys.stderr)
            return WRONG
        print(f"qbench: this is a bug in qbench. Please report it with {_crash_log()}.", file=sys.stderr)
        return CRASHED


def _crash_log() -> str:
    """Where the traceback of the current exception was written, or the traceback itself if that failed."""
    trace = traceback.format_exc()
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="qbench-crash-", suffix=".log", encoding="utf-8", delete=False
        ) as log:
            log.write(f"{shlex.join(sys.argv)}\n\n{trace}")
    except OSError:
        return f"these lines:\n{trace}"
    return f"the traceback in {log.name}"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="qbench", description="Measure what quantization costs a model, and prove that it was quantized."
    )
    parser.add_argument("--version", action="version", version=f"qbench {qbench.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in (
        _add_init,
        _add_plan,
        _add_run,
        _add_analyze,
        _add_fetch,
        _add_table,
        _add_compare,
        _add_audit,
        _add_check,
        _add_import,
        _add_accept,
        _add_power,
        _add_runs,
        _add_doctor,
    ):
        add(commands)
    return parser


def _add(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], purpose: str, example: str
) -> argparse.ArgumentParser:
    """Add a command; its help shows its purpose and an example."""
    parser = commands.add_parser(
        name,
        help=purpose,
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


# --- init, plan, run, analyze, fetch


def _add_init(commands: Commands) -> None:
    purpose = "write a first recipe with two small models and five tasks, which need no GPU and no network"
    example = "qbench init && qbench run recipes/mine.yaml --limit 20"
    parser = _add(commands, "init", _init, purpose, example)
    parser.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        nargs="?",
        default=Path("recipes"),
        help="where to write mine.yaml, mini.yaml and mini/; default: recipes",
    )


def _add_plan(commands: Commands) -> None:
    purpose = "list the cells with their state (done, failed, to do, …) and estimated time, without loading a model"
    _add_recipe(_add(commands, "plan", _plan, purpose, "qbench plan recipes/mini.yaml"))


def _add_run(commands: Commands) -> None:
    purpose = "run every cell of a recipe that has no finished record"
    parser = _add(commands, "run", _run, purpose, "qbench run recipes/mini.yaml --only '*softpick*hqq*'")
    _add_recipe(parser)
    _add_running(parser, "'*softpick*hqq-3*'")
    parser.add_argument(
        "--preflight",
        action=argparse.BooleanOptionalAction,
        help="first try each checkpoint on a few documents, and each method on one layer; default: only for long runs",
    )


def _add_analyze(commands: Commands) -> None:
    purpose = (
        "measure what may explain the damage to each checkpoint of a recipe: attention sinks, massive activations, "
        "sparsity, dead heads, attention maps, and the sensitivity of each layer"
    )
    example = "qbench analyze recipes/mini.yaml && qbench table results/runs/mini --kind analysis --plots figures"
    parser = _add(commands, "analyze", _analyze, purpose, example)
    _add_recipe(parser, limited="texts")
    _add_running(parser, "'*softpick*analysis'")


def _add_running(parser: argparse.ArgumentParser, pattern: str) -> None:
    parser.add_argument("--only", metavar="PATTERN", help=f"only cells whose name matches, such as {pattern}")
    parser.add_argument(
        "--executor",
        choices=["local", "ray"],
        default="local",
        help="local: processes on this machine; ray: a Ray cluster whose nodes have the same installation and paths",
    )
    parser.add_argument(
        "--reuse-stale",
        action="store_true",
        help="keep records made by older code or packages instead of rerunning their cells",
    )
    parser.add_argument("--json", action="store_true", help="print progress as JSON lines")


def _add_fetch(commands: Commands) -> None:
    purpose = (
        "download a recipe's checkpoints and datasets into the Hugging Face cache, so that the run needs no network"
    )
    example = "qbench fetch recipes/mini.yaml && HF_HUB_OFFLINE=1 qbench run recipes/mini.yaml"
    parser = _add(commands, "fetch", _fetch, purpose, example)
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="a recipe (YAML)")
    _add_trust(parser)


def _add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust-task-code",
        action="store_true",
        default=None,
        help="run the Python functions that the recipe's own task files name (`!function`)",
    )


def _add_recipe(parser: argparse.ArgumentParser, limited: str = "documents of each task") -> None:
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="a recipe (YAML)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for the records; default: results/runs/<recipe>"
    )
    parser.add_argument("--limit", type=_count, metavar="N", help=f"use only the first N {limited}, for a trial")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], help="override the recipe's device")
    _add_trust(parser)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _load(options: argparse.Namespace) -> "tuple[Recipe, Path]":
    from qbench.recipe.cells import load_recipe

    recipe = load_recipe(
        options.recipe, limit=options.limit, device=options.device, trust_task_code=options.trust_task_code
    )
    return recipe, options.out or recipe.out()


def _init(options: argparse.Namespace) -> int:
    from qbench.recipe.starter import write_starter

    mine, mini = write_starter(options.folder)
    print(f"{mine}: to start from; try it: qbench run {shlex.quote(str(mine))} --limit 20")
    print(f"{mini}: softpick against softmax with three quantizers; about two minutes on 2 cores")
    return DONE


def _plan(options: argparse.Namespace) -> int:
    from qbench.runner.hub import OFFLINE_VARIABLES
    from qbench.runner.plan import make_plan
    from qbench.runner.plan_table import render_plan

    for name in OFFLINE_VARIABLES:  # a plan downloads nothing
        os.environ.setdefault(name, "1")
    from qbench.report.render import default_format

    recipe, out = _load(options)
    format = default_format()
    _write(render_plan(make_plan(recipe, out), format), None, format)
    return DONE


def _run(options: argparse.Namespace) -> int:
    return _execute(options, "run_matrix", preflight=options.preflight)


def _analyze(options: argparse.Namespace) -> int:
    return _execute(options, "analyze_matrix", preflight=False)


def _execute(options: argparse.Namespace, what: str, preflight: bool | None) -> int:
    from qbench.runner.hub import go_offline_if_unreachable

    recipe, out = _load(options)
    go_offline_if_unreachable(recipe)
    from qbench.runner import matrix  # after it, since this imports huggingface_hub

    how = matrix.RunOptions(options.only, options.reuse_stale, options.executor, preflight, options.json)
    try:
        return DONE if getattr(matrix, what)(recipe, out, how) else FAILED
    except KeyboardInterrupt:
        print(f"\nStopped. Finished cells are kept in {out}; run the same command to continue.", file=sys.stderr)
        return INTERRUPTED


def _fetch(options: argparse.Namespace) -> int:
    from qbench.recipe.cells import load_recipe
    from qbench.runner.hub import go_offline_if_unreachable

    recipe = load_recipe(options.recipe, trust_task_code=options.trust_task_code)
    go_offline_if_unreachable(recipe)
    from qbench.runner.fetch import fetch  # after it, since this imports huggingface_hub

    missing, seen = 0, set[str]()
    found = [fetch(recipe), *([fetch(recipe, to_analyze=True)] if "analysis" in recipe.model_fields_set else [])]
    for here, line in chain(*found):  # each as soon as it is fetched
        if line not in seen:
            missing += not here
            print(line if here else f"MISSING {line}", flush=True)
            seen.add(line)
    if missing:
        print(f"qbench: {missing} of the files and datasets that {options.recipe} needs are missing.", file=sys.stderr)
    return FAILED if missing else DONE


# --- table, compare, audit


def _add_table(commands: Commands) -> None:
    from qbench.report.render import DEFAULT_KIND, FORMATS, KINDS

    purpose = "show results as tables (Markdown, LaTeX, CSV, JSON), as an HTML report, or as plots"
    example = (
        "qbench table results/runs/mini --format latex --kind damage --out damage.tex\n"
        "  qbench table results/runs/mini --plots figures"
    )
    parser = _add(commands, "table", _table, purpose, example)
    parser.add_argument("source", type=Path, metavar="DIR", help=RESULTS)
    parser.add_argument("--format", choices=FORMATS, help=f"{ON_SCREEN}; csv and json contain all metrics")
    kinds = "; ".join(f"{kind.name}: {kind.help}" for kind in KINDS.values())
    parser.add_argument("--kind", choices=KINDS, help=f"{kinds}. Default: {DEFAULT_KIND}; with html, all kinds")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write to this file instead of the screen")
    parser.add_argument("--standalone", action="store_true", help="with latex: write a complete document")
    columns = "with latex: how many columns of a page a table spans (table or table*); default: 2"
    parser.add_argument("--columns", type=int, choices=(1, 2), help=columns)
    plots = "write plots to this folder, as PNG, SVG and PDF; tables too if --format, --kind or --out is given"
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help=plots)
    widths = "with --plots: column (of a paper), page, or a number of inches; default: page"
    parser.add_argument("--figure-width", type=_width, metavar="WIDTH", help=widths)


def _width(text: str) -> float:
    from qbench.report.looks import COLUMN, PAGE

    named = {"column": COLUMN, "page": PAGE}
    try:
        inches = named[text] if text in named else float(text)
    except ValueError:
        inches = 0.0
    if not MIN_INCHES <= inches <= MAX_INCHES:
        allowed = f"column, page, or {MIN_INCHES:g} to {MAX_INCHES:g} inches"
        raise argparse.ArgumentTypeError(f"{text!r} is not a width: use {allowed}")
    return inches


def _add_compare(commands: Commands) -> None:
    from qbench.report.render import COMPARISON_FORMATS

    purpose = "check whether results agree with published numbers, and whether the published models were quantized"
    example = (
        "qbench compare results/runs/mini --with published.csv\n\n"
        "published.csv has the columns of `qbench table DIR --format csv`"
    )
    parser = _add(commands, "compare", _compare, purpose, example)
    parser.add_argument("source", type=Path, metavar="DIR", help=RESULTS)
    parser.add_argument(
        "--with",
        dest="published",
        type=Path,
        metavar="DIR",
        required=True,
        help="published numbers: a CSV file or folder",
    )
    parser.add_argument("--format", choices=COMPARISON_FORMATS, help=ON_SCREEN)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write to this file instead of the screen")


def _add_audit(commands: Commands) -> None:
    purpose = (
        "show the audits of results, and list scores that look unquantized or impossible; exit code 1 if there are any"
    )
    parser = _add(commands, "audit", _audit, purpose, "qbench audit results/runs/mini")
    parser.add_argument("source", type=Path, metavar="DIR|CSV", help=RESULTS)


def _table(options: argparse.Namespace) -> int:
    from qbench.report.delta import read_report
    from qbench.report.render import render

    if options.figure_width and not options.plots:
        raise InputError("--figure-width needs --plots FOLDER.")
    report, format = read_report(options.source), _format(options)
    given = (options.format, options.kind, options.out, options.standalone, options.columns)
    wanted = not options.plots or any(given)
    how = {"standalone": options.standalone, "columns": options.columns}
    text = render(report, format, options.kind, **how) if wanted else ""
    if options.plots:
        from qbench.report.looks import PAGE
        from qbench.report.plots import write_plots

        files = write_plots(report, options.plots, options.figure_width or PAGE)
        print(f"{len(files)} plots in {options.plots}", file=sys.stderr)
    if wanted:
        _write(text, options.out, format)
    return DONE


def _format(options: argparse.Namespace) -> str:
    """The format that was asked for; on a terminal, tables for the screen."""
    from qbench.report.render import default_format

    return options.format or ("md" if options.out else default_format())


def _compare(options: argparse.Namespace) -> int:
    from qbench.report.render import comparison

    format = _format(options)
    _write(comparison(options.source, options.published, format), options.out, format)
    return DONE


def _audit(options: argparse.Namespace) -> int:
    from qbench.report.render import audit, default_format

    format = default_format()
    text, found = audit(options.source, format)
    _write(text, None, format)
    return FAILED if found else DONE


def _write(text: str, file: Path | None, format: str) -> None:
    if file is None:
        print_styled(text) if format == "terminal" else sys.stdout.write(text)
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text)
    except OSError as error:
        raise InputError(f"{file} cannot be written ({error.strerror or error}).") from None


# --- check, accept, power


def _add_check(commands: Commands) -> None:
    purpose = (
        "compare a run with its baseline: exit code 1 if a score got worse, an audit changed, or a cell failed or is "
        "missing; tolerances come from the recipe's `gate` field"
    )
    example = (
        "qbench check results/runs/mini --baseline results/mini --junit gate.xml\n"
        "  qbench check out/quantized out/original   # two folders of lm-eval's"
    )
    parser = _add(commands, "check", _check, purpose, example)
    lm_eval = ", or lm-eval's --output_path (written with --log_samples)"
    parser.add_argument("folder", type=Path, metavar="RUN", help=RECORDS + lm_eval)
    baseline = parser.add_mutually_exclusive_group(required=True)
    baseline.add_argument("given", type=Path, metavar="BASELINE", nargs="?", help="the baseline to compare with")
    baseline.add_argument("--baseline", type=Path, metavar="DIR", help="the same")
    parser.add_argument("--scores-only", action="store_true", help="do not compare the audits")
    alpha = "how often a check may fail although nothing got worse; default: the recipe's, or 0.01"
    parser.add_argument("--alpha", type=float, metavar="SHARE", help=alpha)
    parser.add_argument(
        "--tolerances",
        metavar="KIND=LOSS,…",
        help="losses that may pass, such as accuracy=0.5,perplexity=1 (points and percent); default: the recipe's",
    )
    for name, title in {"junit": "JUnit XML", "markdown": "Markdown", "json": "JSON"}.items():
        parser.add_argument(
            f"--{name}", type=Path, metavar="FILE", help=f"also write the report to this file, as {title}"
        )


def _add_import(commands: Commands) -> None:
    purpose = "store another program's results as records, for all other commands"
    example = "qbench import lm-eval out --cell family=8B,attention=softmax,method=awq,bits=4 --out results/runs/8b"
    parser = _add(commands, "import", _import, purpose, example)
    parser.add_argument("program", choices=["lm-eval"], help="what wrote the results")
    output = "a folder that was --output_path of lm-eval with --log_samples, or one of its results files"
    parser.add_argument("outputs", type=Path, nargs="+", metavar="OUTPUT", help=output)
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="folder for the records")
    cell = "what a model is: family=8B,attention=softmax,method=awq,bits=4; once for each model"
    parser.add_argument("--cell", action="append", default=[], metavar="NAME=VALUE,…", help=cell)
    cells = "the same for many models: a YAML file that maps their names to cells; default: named after the models"
    parser.add_argument("--cells", type=Path, metavar="FILE", help=cells)


def _add_accept(commands: Commands) -> None:
    purpose = "replace a baseline with a run, without asking: print what changes, log the reason in CHANGES.jsonl"
    example = (
        'qbench accept results/runs/mini --baseline results/mini --reason "transformers 5.23 uses a different kernel"'
    )
    parser = _add(commands, "accept", _accept, purpose, example)
    _add_folders(parser, baseline="the baseline to replace, or a new folder")
    parser.add_argument("--reason", required=True, metavar="TEXT", help="why the baseline changes")


def _add_power(commands: Commands) -> None:
    purpose = "estimate how many documents the gate needs to detect a given loss, from the noise of recorded results"
    parser = _add(commands, "power", _power, purpose, "qbench power results/runs/mini")
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder of records")
    against = (
        "measure the noise between DIR and RUN, with the same cells; default: between quantized and unquantized cells"
    )
    parser.add_argument("--against", type=Path, metavar="RUN", help=against)
    cells = "how many of these cells change: those that do not cannot fail, and do not count; default: all"
    parser.add_argument("--cells", type=int, metavar="N", help=cells)
    parser.add_argument("--format", choices=("text", "markdown"), default="text", help="default: text")


def _add_folders(
    parser: argparse.ArgumentParser, baseline: str = "the baseline to compare with, a folder of records"
) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help=RECORDS)
    parser.add_argument("--baseline", type=Path, metavar="DIR", required=True, help=baseline)


def _check(options: argparse.Namespace) -> int:
    from qbench.gate.render import annotations, error_annotation, to_text
    from qbench.gate.verdict import check

    try:
        override = _gate_settings(options)
        report = check(options.folder, options.given or options.baseline, None, options.scores_only, override)
    except InputError as error:  # on GitHub, people see it without opening the log
        _annotate([error_annotation(str(error))])
        _write_summary(f"### qbench check: not compared\n\n{error}\n")
        raise
    sys.stdout.write(to_text(report))
    _write_reports(options, report)
    _annotate(annotations(report))
    return DONE if report.passed else FAILED


def _annotate(lines: Iterable[str]) -> None:
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in lines:
            runner_command(line)


def _gate_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of the gate that the command line gives."""
    found: dict[str, Any] = {} if options.alpha is None else {"alpha": options.alpha}
    if options.tolerances:
        pairs = [part.partition("=") for part in options.tolerances.split(",")]
        if bad := [name for name, equals, _ in pairs if not equals]:
            raise InputError(f"--tolerances has {bad[0]!r}; it must be like accuracy=0.5,perplexity=1.")
        found["tolerances"] = {name.strip(): _number_or_text(loss.strip()) for name, _, loss in pairs}
    return found


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
        named = " (taken as unquantized; --cell says otherwise)" if own.record.cell.unnamed else ""
        print(f"{own.record.cell.name}: {counted(len(own.record.metrics), 'score')}, not audited{named}")
    print(f"{counted(len(stored), 'record')} in {options.out}")
    return DONE


def _accept(options: argparse.Namespace) -> int:
    from qbench.gate.accept import accept, check_reason, is_new
    from qbench.gate.pairing import NoBaselineError
    from qbench.gate.render import to_text
    from qbench.gate.verdict import check

    check_reason(options.reason)
    report, not_compared, new = None, "", is_new(options.baseline)
    try:
        report = check(options.folder, options.baseline)
        print(to_text(report))
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
    from qbench.gate.power import power, to_text

    print(to_text(power(options.folder, options.against, options.cells), options.format))
    return DONE


def _write_reports(options: argparse.Namespace, report: "GateReport") -> None:
    from qbench.gate.render import to_json, to_junit, to_markdown

    try:
        for file, render in ((options.junit, to_junit), (options.markdown, to_markdown), (options.json, to_json)):
            if file is not None:
                write_atomically(file, render(report))
        _write_summary(to_markdown(report))
    except OSError as error:
        raise InputError(f"{error.filename}: the report cannot be written ({error.strerror}).") from None


def _write_summary(markdown: str) -> None:
    if summary := os.environ.get(STEP_SUMMARY):
        with open(summary, "a", encoding="utf-8") as out:
            out.write(markdown)


# --- runs, doctor


def _add_runs(commands: Commands) -> None:
    purpose = "list the records of a folder with their age and size, and remove those that newer ones superseded"
    parser = _add(commands, "runs", _runs, purpose, "qbench runs results/runs/mini --prune")
    parser.add_argument("folder", type=Path, metavar="DIR", help=RECORDS)
    prune = "remove superseded records, without asking, and print which"
    parser.add_argument("--prune", action="store_true", help=prune)


def _runs(options: argparse.Namespace) -> int:
    from qbench.report.render import FOR_PEOPLE, default_format
    from qbench.runner.old_records import kept_records, prune, records_table

    if options.prune:
        for line in prune(options.folder):
            print(line)
        return DONE
    format = default_format()
    _write(FOR_PEOPLE[format]([records_table(options.folder, kept_records(options.folder))]), None, format)
    return DONE


def _add_doctor(commands: Commands) -> None:
    purpose = "show what this machine has, what it can run, and why it cannot run the rest"
    parser = _add(commands, "doctor", _doctor, purpose, "qbench doctor --checks\n  qbench doctor recipes/mini.yaml")
    parser.add_argument("recipe", type=Path, nargs="?", metavar="RECIPE", help="check only what this recipe uses")
    parser.add_argument(
        "--checks",
        action=argparse.BooleanOptionalAction,
        help="try each kernel and each quantizer on a small case; default: only if there is a GPU",
    )
    parser.add_argument("--packages", action="store_true", help="list all packages, not just mismatched ones")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--report",
        action="store_true",
        help="write checks, tracebacks and timings to qbench-doctor.md, to share",
    )


def _doctor(options: argparse.Namespace) -> int:
    from qbench.doctor.report import doctor
    from qbench.recipe.cells import load_recipe

    works = doctor(
        options.checks,
        load_recipe(options.recipe) if options.recipe else None,
        all_packages=options.packages,
        as_json=options.json,
        report_wanted=options.report,
    )
    return DONE if works else FAILED


if __name__ == "__main__":
    sys.exit(main())
