"""Compare Scorer with lm-eval's HFLM on one model and the same requests: time, forwarded tokens and peak memory.

    python benchmarks/scorer.py [--tasks arc_easy … passkey] [--docs N] [--threads 1 2] [--repeats 1] [--data FOLDER]

Each run is a separate process, and the engines take turns. The least time of the repeats counts: CPU time with one
thread, on which other load has little effect; wall time with more threads. HFLM gets the best of several batch sizes.
The model has the 340M shape and random weights. The texts are in lm-eval's prompts; by default they are made up, with
the lengths of real ones. sciq is imitated with them: four short choices after a paragraph. The largest gap is the
largest difference between the two engines' log-likelihoods (relative for wikitext). For passkey, with prompts of 512
tokens, it is the number of different answers.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cpu_attention import cpu_name

DOCUMENTS = {"arc_easy": 96, "sciq": 32, "lambada": 48, "wikitext": 3, "passkey": 8}
KINDS = {"wikitext": "loglikelihood_rolling", "passkey": "generate_until"}  # the others: loglikelihood
PASSKEY_LENGTH = 512
SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16}
VOCABULARY, MAX_LENGTH = 32000, 2048
ROOT = Path(__file__).resolve().parents[1]
DATA_HELP = "folder with arc_easy.jsonl, lambada_openai.jsonl and wikitext_valid.jsonl; default: made-up texts"


def data_folder(given: Path | None, temporary: Path) -> Path:
    """The folder with the texts: the given one, or made-up texts in the temporary one."""
    if given is None:
        sys.path.append(str(ROOT))
        from tests.made_up_texts import write_texts

        write_texts(temporary)["wikitext"].rename(temporary / "wikitext_valid.jsonl")
        return temporary
    if not given.is_dir():
        raise SystemExit(f"--data {given} is not a folder; it must be a {DATA_HELP.partition(';')[0]}.")
    return given


def read(data: Path, name: str, count: int) -> list[dict[str, Any]]:
    """The first documents of a JSON lines file."""
    with (data / name).open() as lines:
        return [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]


def make_requests(task: str, data: Path, docs: int, tokenizer: Any) -> list[tuple[Any, ...]]:
    """The requests that tasks make: (context, continuation), (document,) for wikitext, or (prompt, settings)."""
    if task == "passkey":
        from qbench.evaluate.passkey import PasskeySettings, passkey_documents, passkey_tasks

        settings = PasskeySettings((PASSKEY_LENGTH,), docs)
        count = lambda text: len(tokenizer.encode(text))  # noqa: E731
        (own,) = passkey_tasks(settings, count).values()
        found = passkey_documents(settings, PASSKEY_LENGTH, count, docs)
        return [(document["prompt"], own.config.generation_kwargs) for document in found]
    if task == "wikitext":
        return [(page["page"],) for page in read(data, "wikitext_valid.jsonl", docs)]
    if task == "lambada":
        texts = [doc["text"].rsplit(" ", 1) for doc in read(data, "lambada_openai.jsonl", docs)]
        return [(context, f" {word}") for context, word in texts]
    questions = read(data, "arc_easy.jsonl", 3 * docs)
    if task == "arc_easy":
        return [
            (f"Question: {doc['question']}\nAnswer:", f" {choice}")
            for doc in questions[:docs]
            for choice in doc["choices"]["text"]
        ]
    rng = random.Random(0)
    short = [choice for doc in questions for choice in doc["choices"]["text"] if len(choice.split()) <= 2]
    paragraphs = [doc["text"].replace("\n", " ") for doc in read(data, "lambada_openai.jsonl", docs)]
    return [
        (f"{paragraph}\nQuestion: {doc['question']}\nAnswer:", f" {choice}")
        for paragraph, doc in zip(paragraphs, questions, strict=False)
        for choice in rng.sample(short, 4)
    ]


def make_tokenizer(data: Path, vocabulary: int = VOCABULARY) -> Any:
    """Byte-level BPE trained on the data: about as many tokens per word as a real tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=["<s>", "</s>"], show_progress=False)
    texts = [doc["page"] for doc in read(data, "wikitext_valid.jsonl", 60)]
    texts += [doc["text"] for doc in read(data, "lambada_openai.jsonl", 5153)]
    texts += [doc["question"] for doc in read(data, "arc_easy.jsonl", 2376)]
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")


def make_model(attention: str) -> Any:
    """Random weights in the 340M shape."""
    import torch
    from transformers import LlamaConfig

    from qbench.attention.kinds import attentions
    from qbench.attention.register import build_model, set_attention

    config = LlamaConfig(**SHAPE, vocab_size=VOCABULARY, max_position_embeddings=MAX_LENGTH)
    set_attention(config, attentions()[attention])
    torch.manual_seed(0)
    return build_model(config).eval()


def run_child(args: argparse.Namespace) -> None:
    """Run one engine on one task in this process; print the figures as JSON on the last line."""
    import torch
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from qbench.evaluate.scorer import Scorer
    from qbench.tokenizer import load_tokenizer

    torch.set_num_threads(args.threads[0])
    model, tokenizer = make_model(args.attention), load_tokenizer(args.tokenizer)
    tokens = []
    model.model.register_forward_pre_hook(
        lambda _, __, kwargs: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    if args.child == "scorer":
        lm = Scorer(model, tokenizer, batch_tokens=args.batch_tokens)
    else:
        lm = HFLM(pretrained=model, tokenizer=tokenizer, softmax_dtype=torch.float32, batch_size=args.batch_size)
    task = args.tasks[0]
    kind = KINDS.get(task, "loglikelihood")
    pairs = make_requests(task, args.data, args.docs or DOCUMENTS[task], tokenizer)
    requests = [Instance(kind, {}, pair, 0, (task, index, 1)) for index, pair in enumerate(pairs)]
    model(input_ids=torch.zeros(1, 64, dtype=torch.long))  # starts the thread pools
    tokens.clear()
    start, cpu = time.perf_counter(), time.process_time()
    results = getattr(lm, kind)(requests, disable_tqdm=True)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM:"))
    values = [result[0] if kind == "loglikelihood" else result for result in results]
    print(json.dumps({"wall": wall, "cpu": cpu, "tokens": sum(tokens), "peak": peak, "values": values}))


def child(engine: str, task: str, threads: int, args: argparse.Namespace, batch_size: int = 1) -> dict[str, Any]:
    """Run this file for one engine and one task in a new process."""
    command = [sys.executable, __file__, "--child", engine, "--tasks", task]
    command += ["--threads", str(threads), "--data", str(args.data), "--tokenizer", str(args.tokenizer)]
    command += ["--attention", args.attention, "--batch-size", str(batch_size)]
    command += ["--batch-tokens", str(args.batch_tokens)] if args.batch_tokens else []
    command += ["--docs", str(args.docs)] if args.docs else []
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr[-2000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def compare(task: str, threads: int, args: argparse.Namespace) -> None:
    """Print one row of the table: both engines in turns, least time of the repeats."""
    clock = "cpu" if threads == 1 else "wall"
    ours, theirs = [], []
    for _ in range(args.repeats):
        theirs += [child("hflm", task, threads, args, size) | {"size": size} for size in args.batch_sizes]
        ours.append(child("scorer", task, threads, args))
    best, hflm = (min(runs, key=lambda run: run[clock]) for runs in (ours, theirs))
    pairs = list(zip(best["values"], hflm["values"], strict=True))
    if task == "passkey":
        gap = sum(a != b for a, b in pairs)
    else:
        gap = max(abs(a - b) / (abs(b) if task == "wikitext" else 1) for a, b in pairs)
    cells = [task, threads, f"{hflm[clock]:.1f}", f"{best[clock]:.1f}", f"**{hflm[clock] / best[clock]:.2f}×**"]
    cells += [hflm["tokens"], best["tokens"], f"{hflm['peak']:.0f}", f"{best['peak']:.0f}", hflm["size"], f"{gap:.0e}"]
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


HEADER = (
    "| task | threads | HFLM s | Scorer s | ratio | HFLM tokens | Scorer tokens | HFLM MiB | Scorer MiB "
    "| HFLM's batch | largest gap |\n|--|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(DOCUMENTS), default=list(DOCUMENTS))
    parser.add_argument("--docs", type=int, help=f"documents per task; default: {DOCUMENTS}")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--attention", choices=["softmax", "softpick"], default="softmax")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[4, 8], help="HFLM's; the best one counts")
    parser.add_argument("--batch-tokens", type=int, help="Scorer's token budget; default: its own choice")
    parser.add_argument("--data", type=Path, help=DATA_HELP)
    for hidden in ("--child", "--tokenizer"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--batch-size", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_child(args)
        return
    print(f"{cpu_name()}, {os.cpu_count()} cores; 340M shape, {args.attention}, float32\n\n{HEADER}", flush=True)
    with tempfile.TemporaryDirectory() as texts, tempfile.TemporaryDirectory() as args.tokenizer:
        args.data = data_folder(args.data, Path(texts))
        make_tokenizer(args.data).save_pretrained(args.tokenizer)
        for threads in args.threads:
            for task in args.tasks:
                compare(task, threads, args)


if __name__ == "__main__":
    main()
