"""How much a score changes in a repeat with different numerics: bfloat16 instead of float32, other batch sizes.

    python benchmarks/repeats.py recipes/mini/softmax recipes/mini/softpick
    python benchmarks/repeats.py SMOLLM2 --tasks arc_easy lambada_openai --data FOLDER --limit 200

`qbench compare` allows for such repeats: these are the figures behind NUMERICS in qbench/report/repeats.py. For each
task and metric it prints how much the score changed and how much moved. For accuracies, the latter is the share of
changed answers. For perplexities, it is the spread of the documents' changes over the root of their number, which is
the expected change of the perplexity's logarithm.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from tabulate import tabulate

from qbench import Scorer, load_checkpoint, quantize
from qbench.evaluate.evaluation import Evaluation, evaluate
from qbench.evaluate.tasks import load_tasks
from qbench.records.metrics import facts_of
from qbench.tokenizer import load_tokenizer

MINI = Path(__file__).parents[1] / "recipes" / "mini" / "tasks"
REPEATS = {"bfloat16": (torch.bfloat16, 4096), "bfloat16, other batches": (torch.bfloat16, 512)}


def main() -> None:
    """One row per checkpoint, quantization, repeat, task and metric."""
    options = _options()
    torch.set_num_threads(1)
    data = {name: options.data / f"{name}.jsonl" for name in options.tasks}
    tasks = load_tasks(options.tasks, folders=[MINI] if options.data == MINI else [], data=data)
    rows = []
    for folder in options.checkpoints:
        for bits in options.bits:
            first = _measure(folder, bits, torch.float32, 4096, tasks, options.limit)
            for name, (dtype, tokens) in REPEATS.items():
                second = _measure(folder, bits, dtype, tokens, tasks, options.limit)
                about = {"model": Path(folder).name, "bits": bits or "–", "repeat": name}
                rows += [about | row for row in _changes(first, second)]
    print(tabulate(rows, "keys", tablefmt="github", disable_numparse=True))


def _measure(folder: str, bits: int, dtype: torch.dtype, tokens: int, tasks: object, limit: int | None) -> Evaluation:
    model = load_checkpoint(folder, dtype=dtype)
    if bits:
        model, _ = quantize(model, method="hqq", bits=bits)
    lm = Scorer(model, load_tokenizer(folder), batch_tokens=tokens)
    return evaluate(lm, tasks, limit=limit)


def _changes(first: Evaluation, second: Evaluation) -> list[dict[str, str]]:
    rows = []
    for one, other in zip(first.metrics, second.metrics, strict=True):
        facts = facts_of(one.name)
        if facts is None or facts.unit == "bits":
            continue
        own = [found.samples[found.samples["task"] == one.task][one.name] for found in (first, second)]
        moved = (own[1] - own[0]).to_numpy()
        row = {"task": one.task, "metric": one.name, "documents": str(len(moved))}
        if facts.unit == "share":
            rows.append(row | {"change": f"{100 * (other.value - one.value):+.2f} points", "moved": _flips(moved)})
        else:
            weights = second.samples[second.samples["task"] == one.task].get(f"{one.name}.weight", 1.0)
            spread = moved.std() / np.mean(weights) / len(moved) ** 0.5
            change = f"{100 * np.log(other.value / one.value):+.3f}%"
            rows.append(row | {"change": change, "moved": f"{100 * spread:.3f}%"})
    return rows


def _flips(moved: np.ndarray) -> str:
    return f"{(moved != 0).mean():.2%} of answers"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", metavar="CHECKPOINT", nargs="+")
    parser.add_argument("--tasks", nargs="+", default=sorted(file.stem for file in MINI.glob("*.jsonl")))
    parser.add_argument("--data", type=Path, default=MINI, help="folder with one file of documents per task")
    parser.add_argument("--bits", type=int, nargs="+", default=[0], help="HQQ bits; 0: unquantized")
    parser.add_argument("--limit", type=int)
    return parser.parse_args()


if __name__ == "__main__":
    main()
