"""Compare a whole cell of a small model with one lm_eval command: load, tokenize, score, bootstrap.

    python benchmarks/cell.py [--docs 1000] [--pages 12] [--data FOLDER]

Both use the same checkpoint, tasks and documents and one thread, and run one after the other. The table has CPU and
wall time. The five tasks are lm-eval's, on local files; sciq and piqa are built from the other tasks' documents.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import scorer as engines
import yaml

OFFICIAL = {
    "arc_easy": "arc/arc_easy.yaml",
    "lambada_openai": "lambada/lambada_openai.yaml",
    "piqa": "piqa/piqa.yaml",
    "sciq": "sciq/sciq.yaml",
    "wikitext": "wikitext/wikitext.yaml",
}
SHAPE = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}


def write_data(folder: Path, data: Path, docs: int, pages: int) -> dict[str, str]:
    """Write one JSON lines file per task, in the format of the Hub's datasets."""
    rng = random.Random(0)
    arc = engines.read(data, "arc_easy.jsonl", docs)
    texts = [doc["text"] for doc in engines.read(data, "lambada_openai.jsonl", docs)]
    answers = ("distractor1", "distractor2", "distractor3", "correct_answer")
    short = [choice for doc in arc for choice in doc["choices"]["text"] if len(choice.split()) <= 3]
    documents = {
        "arc_easy": arc,
        "lambada_openai": [{"text": text} for text in texts],
        "piqa": [
            {"goal": doc["question"], "sol1": a, "sol2": b, "label": rng.randrange(2)}
            for doc in arc
            for a, b in [doc["choices"]["text"][:2]]
        ],
        "sciq": [
            {"support": text, "question": doc["question"], **dict(zip(answers, rng.sample(short, 4), strict=True))}
            for text, doc in zip(texts, arc, strict=False)
        ],
        "wikitext": engines.read(data, "wikitext_valid.jsonl", pages),
    }
    files = {}
    for task, rows in documents.items():
        file = folder / f"{task}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files[task] = str(file)
    return files


def write_tasks(folder: Path, files: dict[str, str]) -> None:
    """Write lm-eval's task files under other names and with local data."""
    import lm_eval.tasks

    for task, path in OFFICIAL.items():
        local: dict[str, Any] = {"task": f"local_{task}", "tag": [], "dataset_path": "json", "dataset_name": None}
        local |= {"include": str(Path(lm_eval.tasks.__file__).parent / path), "test_split": "test"}
        local |= {"training_split": None, "validation_split": None, "fewshot_split": "test"}
        local["dataset_kwargs"] = {"data_files": {"test": files[task]}}
        (folder / f"{task}.yaml").write_text(yaml.safe_dump(local))


def write_checkpoint(folder: Path, data: Path) -> None:
    """Write a small softmax model with random weights, and its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from qbench import save_checkpoint

    tokenizer = engines.make_tokenizer(data, vocabulary=8000)
    config = LlamaConfig(**SHAPE, vocab_size=8000, max_position_embeddings=2048)
    save_checkpoint(LlamaForCausalLM(config), folder, tokenizer)


def run_cell(checkpoint: str, files: dict[str, str], out: Path) -> None:
    """Our side: do what a worker does for an unquantized cell."""
    from qbench import Scorer, load_checkpoint
    from qbench.evaluate.evaluation import evaluate
    from qbench.evaluate.tasks import load_tasks
    from qbench.tokenizer import load_tokenizer

    lm = Scorer(load_checkpoint(checkpoint), load_tokenizer(checkpoint))
    metrics = evaluate(lm, load_tasks(list(OFFICIAL), data=files)).metrics
    out.write_text(json.dumps({f"{metric.task} {metric.name}": metric.value for metric in metrics}))


def measure(command: list[str], folder: Path) -> tuple[float, float, float]:
    """CPU seconds, wall seconds and peak MiB of a command."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder)}
    environment |= {"TOKENIZERS_PARALLELISM": "false"}
    start = time.perf_counter()
    log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    actions = [(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
    child = os.posix_spawn(command[0], command, environment, file_actions=actions)
    _, status, usage = os.wait4(child, 0)
    os.close(log)
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{(folder / 'log').read_text()[-3000:]}")
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - start, usage.ru_maxrss / 1024


def compare(folder: Path, args: argparse.Namespace) -> None:
    """Run both and print a table."""
    checkpoint, tasks, data = folder / "checkpoint", folder / "tasks", folder / "data"
    tasks.mkdir()
    data.mkdir()
    write_checkpoint(checkpoint, args.data)
    files = write_data(data, args.data, args.docs, args.pages)
    write_tasks(tasks, files)
    theirs = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu"]
    theirs += ["--model_args", f"pretrained={checkpoint},dtype=float32,softmax_dtype=float32"]
    theirs += ["--tasks", ",".join(f"local_{task}" for task in OFFICIAL), "--include_path", str(tasks)]
    commands = {f"lm_eval --batch_size {size}": [*theirs, "--batch_size", str(size)] for size in args.batch_sizes}
    theirs = commands[f"lm_eval --batch_size {args.batch_sizes[0]}"]
    theirs += ["--output_path", str(folder / "theirs")]
    ours = [sys.executable, __file__, "--child", str(checkpoint), json.dumps(files), str(folder / "ours.json")]
    cpu, wall, peak = measure(ours, folder)
    print("| | CPU s | wall s | peak MiB | qbench is faster by (CPU) |\n|--|--:|--:|--:|--:|")
    print(f"| qbench | {cpu:.1f} | {wall:.1f} | {peak:.0f} | |", flush=True)
    for name, command in commands.items():
        seconds, wall, peak = measure(command, folder)
        print(f"| {name} | {seconds:.1f} | {wall:.1f} | {peak:.0f} | **{seconds / cpu:.2f}×** |", flush=True)
    (file,) = (folder / "theirs").rglob("results_*.json")
    expected = json.loads(file.read_text())["results"]
    found = json.loads((folder / "ours.json").read_text())
    pairs = {key: expected[f"local_{key.split()[0]}"].get(f"{key.split()[1]},none") for key in found}
    gap = max(abs(found[key] / value - 1) for key, value in pairs.items() if value)
    print(f"\nlargest relative gap of {len(pairs)} metrics: {gap:.0e}")


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        checkpoint, files, out = sys.argv[2:]
        run_cell(checkpoint, json.loads(files), Path(out))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=int, default=1000, help="documents per task, except wikitext")
    parser.add_argument("--pages", type=int, default=12, help="documents of wikitext")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16], help="lm_eval's; 1 is its default")
    parser.add_argument("--data", type=Path, help=engines.DATA_HELP)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as texts:
        args.data = engines.data_folder(args.data, Path(texts))
        compare(Path(folder), args)


if __name__ == "__main__":
    main()
