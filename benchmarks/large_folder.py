"""Measure the commands that read records on a large folder: 500 cells with 2,000 documents of each of 5 tasks.

    python benchmarks/large_folder.py [FOLDER] [--cells N] [--documents N]

Makes FOLDER/run and FOLDER/baseline unless they are there, and prints for each command its peak memory, CPU time, exit
code and the size and hash of its output. The numbers are invented, the format is not; every cell passes its audit.
"""

import argparse
import hashlib
import io
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from example_records import audit_of, cell_ref, identity_of, make_record, make_samples, of_model  # noqa: E402

from qbench.records.schema import CellRef, PlannedCell, RunPlan  # noqa: E402
from qbench.records.store import cell_folder, write_plan, write_record  # noqa: E402

CELLS, DOCUMENTS = 500, 2000
LAYERS = 28  # as the mini models have
METHODS, WIDTHS, GROUPS = ("hqq", "gptq"), (2, 3, 4, 8), (32, 64, 128)
LOSSES = {16: 0.0, 8: 0.005, 4: 0.04, 3: 0.15, 2: 0.6}  # by bits
FAMILIES = 10
ATTENTIONS = ("softmax", "softpick")
COMMANDS = {
    "check": ("check", "{run}", "--baseline", "{baseline}"),
    "table --kind summary": ("table", "{run}", "--kind", "summary"),
    "audit": ("audit", "{run}"),
    "table --format csv": ("table", "{run}", "--format", "csv"),
    "table --kind damage --format csv": ("table", "{run}", "--kind", "damage", "--format", "csv"),
    "table --format html": ("table", "{run}", "--format", "html"),
}


@dataclass(frozen=True)
class Usage:
    """What one command took."""

    code: int
    cpu_seconds: float
    peak_mb: float
    output: bytes

    @property
    def digest(self) -> str:
        """A short hash of the output: equal if not a single digit changed."""
        return hashlib.sha256(self.output).hexdigest()[:12]


def cells(count: int) -> list[CellRef]:
    """Families of two attentions, each unquantized and with 24 quantizations."""
    settings = [("none", 16, "none-16")]
    settings += [(m, bits, f"{m}-{bits}-g{size}") for m in METHODS for bits in WIDTHS for size in GROUPS]
    every = (
        cell_ref(attention, method, bits, label, f"{family + 1}M")
        for family in range(FAMILIES)
        for attention in ATTENTIONS
        for method, bits, label in settings
    )
    return list(islice(every, count))


def make_folder(folder: Path, count: int = CELLS, documents: int = DOCUMENTS) -> Path:
    """A folder of records."""
    frames: dict[tuple[str, int], pd.DataFrame] = {}
    planned = []
    for cell in cells(count):
        key = (cell.attention, cell.bits)
        if key not in frames:
            share = 0.8 if cell.attention == "softpick" else 1.0
            frames[key] = make_samples(documents, share * LOSSES[cell.bits])
            frames[key]["doc_hash"] = [hashlib.sha256(h.encode()).hexdigest()[:16] for h in frames[key]["doc_hash"]]
        samples = of_model(frames[key], cell)
        changes = {} if cell.method == "none" else {"audit": audit_of(cell, **layers(cell))}
        record = make_record(cell, samples, identity=identity_of(cell), **changes)
        write_record(cell_folder(folder, cell, record.key), record, parquet(samples))
        planned.append(PlannedCell(cell=cell, key=record.key))
    write_plan(folder, RunPlan(recipe="large.yaml", resolved_recipe={}, cells=tuple(planned)))
    return folder


def layers(cell: CellRef) -> dict[str, object]:
    """An audit's fields for many layers."""
    one = audit_of(cell)
    every = [one.layers[0].model_copy(update={"name": f"model.layers.{n}.mlp.down_proj"}) for n in range(LAYERS)]
    totals = ("weights", "code_bytes", "metadata_bytes", "source_energy", "error_energy", "target_weights")
    return {"layers": tuple(every), **{name: LAYERS * getattr(one, name) for name in (*totals, "linear_weights")}}


def parquet(samples: pd.DataFrame) -> bytes:
    """The file of the samples, compressed less than ours: writing 500 takes a minute instead of ten."""
    content = io.BytesIO()
    table = pa.Table.from_pandas(samples, schema=_schema(samples), preserve_index=False)
    pq.write_table(table.replace_schema_metadata(None), content, compression="zstd", compression_level=1)
    return content.getvalue()


def _schema(samples: pd.DataFrame) -> pa.Schema:
    from qbench.records.samples import FIELDS

    return pa.schema([*FIELDS, *((name, pa.float64()) for name in samples.columns if name not in FIELDS.names)])


IN_A_CHILD = """
import os, sys
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, used = os.wait4(pid, 0)
print(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss, file=sys.stderr)
"""


def measure(command: Sequence[str]) -> Usage:
    """Run a qbench command in a child process of a small one: a process starts with the peak memory of its parent."""
    called = [sys.executable, "-c", IN_A_CHILD, sys.executable, "-m", "qbench.cli", *command]
    done = subprocess.run(called, capture_output=True, env=_environment(), check=True)
    code, seconds, peak = done.stderr.split()[-3:]
    return Usage(int(code), float(seconds), float(peak) / 1024, done.stdout)


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": path}


def make_folders(folder: Path, count: int, documents: int) -> dict[str, str]:
    """The run and its baseline, made if they are not there."""
    run, baseline = folder / "run", folder / "baseline"
    if not run.exists():
        make_folder(run, count, documents)
        shutil.copytree(run, baseline)
    return {"run": str(run), "baseline": str(baseline)}


def main() -> int:
    """Print one line per command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="default: a temporary one")
    parser.add_argument("--cells", type=int, default=CELLS)
    parser.add_argument("--documents", type=int, default=DOCUMENTS, help="of each task")
    parser.add_argument("--only", default="", help="commands whose name contains this")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folders = make_folders(options.folder or Path(temporary), options.cells, options.documents)
        print(f"made in {sum(resource.getrusage(resource.RUSAGE_SELF)[:2]):.0f} s of CPU", file=sys.stderr)
        for name, command in COMMANDS.items():
            if options.only in name:
                used = measure([part.format(**folders) for part in command])
                size = f"{len(used.output) / 1e6:.2f} MB, {used.digest}"
                print(f"{name:34} exit {used.code}  {used.cpu_seconds:6.1f} s  {used.peak_mb:6.0f} MB  output {size}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
