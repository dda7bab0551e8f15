"""What low-bit activations and a low-bit KV cache cost a real model: word perplexity, and time.

    python benchmarks/lowbit.py MODEL PAGES [--words 3000] [--timed 2] [--only a8,kv4]

MODEL: a folder, such as benchmarks/smollm2.py makes. PAGES: a .jsonl file of wikitext with the field `page`. One
thread. Time is CPU time of scoring the first 600 words, next to the unquantized model's in turn; the smallest of
`--timed` rounds each. The quantization is simulated, so times say nothing about real low-bit kernels.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance

from qbench import Scorer, load_checkpoint, quantize
from qbench.tokenizer import load_tokenizer

CELLS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "a8": ("none", 16, {"activations": {"bits": 8}}),
    "a8-tensor": ("none", 16, {"activations": {"bits": 8, "per_tensor": True}}),
    "a8-tensor-p99.99": ("none", 16, {"activations": {"bits": 8, "per_tensor": True, "percentile": 99.99}}),
    "a8-fp8": ("none", 16, {"activations": {"format": "fp8"}}),
    "w8": ("rtn", 8, {}),
    "w8a8": ("rtn", 8, {"activations": {"bits": 8}}),
    "w8a8-tensor": ("rtn", 8, {"activations": {"bits": 8, "per_tensor": True}}),
    "w4": ("rtn", 4, {}),
    "w4a4": ("rtn", 4, {"activations": {"bits": 4}}),
    "mxfp4": ("rtn", 4, {"format": "mxfp4", "activations": {"format": "mxfp4"}}),
    "nvfp4": ("rtn", 4, {"format": "nvfp4", "activations": {"format": "nvfp4"}}),
    "kv8": ("none", 16, {"kv_cache": {"bits": 8}}),
    "kv4": ("none", 16, {"kv_cache": {"bits": 4}}),
    "kv2": ("none", 16, {"kv_cache": {"bits": 2}}),
    "kv2-keep4": ("none", 16, {"kv_cache": {"bits": 2, "keep_first": 4}}),
    "kv2-token": ("none", 16, {"kv_cache": {"bits": 2, "keys": "token"}}),
    "w8a8-kv4": ("rtn", 8, {"activations": {"bits": 8}, "kv_cache": {"bits": 4}}),
}


def main() -> None:
    """Print one line per quantization."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("pages", type=Path)
    parser.add_argument("--words", type=int, default=3000)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--timed", type=int, default=2)
    parser.add_argument("--only", default=",".join(CELLS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pages = _pages(arguments.pages, arguments.words)
    tokenizer = load_tokenizer(arguments.model)
    plain = Scorer(load_checkpoint(arguments.model), tokenizer, max_length=arguments.length)
    calibration = _calibration(arguments.pages, tokenizer, len(pages))
    words = sum(len(page.split()) for page in pages)
    print(f"{words:,} words, windows of {arguments.length} tokens, unquantized: {_perplexity(plain, pages):.2f}")
    for name in arguments.only.split(","):
        method, bits, options = CELLS[name]
        model, audit = quantize(load_checkpoint(arguments.model), method, bits, calibration=calibration, **options)
        lm = Scorer(model, tokenizer, max_length=arguments.length)
        text = " ".join(pages[0].split(" ")[:600])
        pairs = [(_seconds(plain, text), _seconds(lm, text)) for _ in range(arguments.timed)]
        ratio = min(own for _, own in pairs) / min(own for own, _ in pairs) if pairs else math.nan
        print(f"{audit.label:32} {_perplexity(lm, pages):12.2f}   time × {ratio:.2f}", flush=True)


def _pages(file: Path, words: int) -> list[str]:
    """The first pages, this many words in all; the last page is cut."""
    found: list[str] = []
    for line in file.read_text().splitlines():
        page = json.loads(line)["page"]
        found.append(" ".join(page.split(" ")[: words + 1]))
        words -= len(found[-1].split())
        if words <= 0:
            break
    return found


def _calibration(file: Path, tokenizer: Any, skipped: int) -> list[torch.Tensor]:
    """Eight windows of 512 tokens from the pages that are not scored."""
    text = "\n\n".join(json.loads(line)["page"] for line in file.read_text().splitlines()[skipped : skipped + 12])
    return list(tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, : 8 * 512].split(512, dim=1))


def _perplexity(lm: Scorer, pages: list[str]) -> float:
    requests = [Instance("loglikelihood_rolling", {}, (page,), i) for i, page in enumerate(pages)]
    total = sum(lm.loglikelihood_rolling(requests, disable_tqdm=True))
    return math.exp(-total / sum(len(page.split()) for page in pages))


def _seconds(lm: Scorer, page: str) -> float:
    start = time.process_time()
    _perplexity(lm, [page])
    return time.process_time() - start


if __name__ == "__main__":
    main()
