"""Compare `qbench.analyze` with plain `output_attentions=True`: CPU time, peak extra memory, and both sets of figures.

    OMP_NUM_THREADS=1 python benchmarks/analysis.py [--length 2048] [--layers 24] [--repeats 1]
    OMP_NUM_THREADS=1 python benchmarks/analysis.py --model FOLDER --texts FILE.jsonl --samples 20 --length 256

Without --model, it uses one text of random tokens and a softmax model of the 340M shape with random float32 weights.
Each run is a separate process with one thread, one after the other. The table shows the least CPU time of the repeats.
Memory is how much the peak of the resident set grows while texts are measured, in further processes (Linux only). The
plain way holds the matrices of all layers of one text, as transformers returns them.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from cpu_attention import _reset_peak, _resident, cpu_name
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from qbench import analyze, load_checkpoint
from qbench.tokenizer import load_tokenizer

SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "vocab_size": 32000}
Figures = dict[str, float]


def plain(model: LlamaForCausalLM, texts: list[Tensor]) -> Figures:
    """The figures from whole matrices and hidden states, in torch."""
    model.set_attn_implementation("eager")
    sinks, zeros, near, pairs, rows, row_sums, off = [], 0, 0, 0, 0, 0.0, 0
    powers, low, high = torch.zeros(5, dtype=torch.float64), torch.inf, -torch.inf
    heads, outputs = model.config.num_attention_heads, []
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: outputs.append(args[0][0]))
    for ids in texts:
        outputs.clear()
        with torch.no_grad():
            out = model.model(ids[None], output_attentions=True, output_hidden_states=True, use_cache=False)
        lower = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        for matrix in out.attentions:
            sinks.append(matrix[0, :, :, 0].double().mean(-1))
            row_sums += float(matrix.sum(dtype=torch.float64))
            zeros += int(((matrix == 0) & lower).sum())
            near += int(((matrix <= 1e-5) & lower).sum())
            pairs += heads * int(lower.sum())
            rows += heads * len(ids)
        for state in out.hidden_states:
            x = state.double()
            powers += torch.stack([(x**power).sum() for power in range(5)])
            low, high = min(low, float(x.min())), max(high, float(x.max()))
        small = [x.unflatten(-1, (heads, -1)).abs().amax(-1) < 1e-2 for x in outputs]  # [T, heads]
        off = off + torch.stack([x.sum(0) for x in small])  # [layers, heads]
    alpha = torch.cat(sinks)
    m1, m2, m3, m4 = (powers[1:] / powers[0]).tolist()
    dead = off / sum(map(len, texts)) > 0.95
    return {
        "sink_rate 0.2": 100 * float((alpha > 0.2).double().mean()),
        "sink_rate 0.3": 100 * float((alpha > 0.3).double().mean()),
        "row_sum": row_sums / rows,
        "sparsity": 100 * zeros / pairs,
        "sparsity 1e-05": 100 * near / pairs,
        "dead_heads 0.01": 100 * float(dead.double().mean()),
        "kurtosis": (m4 - 4 * m1 * m3 + 6 * m1**2 * m2 - 3 * m1**4) / (m2 - m1**2) ** 2,
        "min": low,
        "max": high,
    }


def ours(model: LlamaForCausalLM, texts: list[Tensor]) -> Figures:
    """Everything that `analyze` measures; the table shows the figures that `plain` has too."""
    with warnings.catch_warnings(action="ignore"):
        analysis = analyze(model, texts)
    frame = analysis.to_frame()
    main = frame[(frame.length == analysis.facts.length) & (frame.part == "all")]
    return {f"{m} {s}".strip(): v for m, s, v in zip(main.metric, main.setting, main.value, strict=True)}


WAYS: dict[str, Callable[[LlamaForCausalLM, list[Tensor]], Figures]] = {"ours": ours, "plain": plain}


def inputs(args: argparse.Namespace) -> tuple[LlamaForCausalLM, list[Tensor]]:
    """The model and its texts."""
    if args.model is None:
        config = LlamaConfig(**SHAPE, num_hidden_layers=args.layers, max_position_embeddings=max(2048, args.length))
        torch.manual_seed(0)
        ids = torch.randint(config.vocab_size, (args.length,), generator=torch.Generator().manual_seed(0))
        return LlamaForCausalLM(config).eval().requires_grad_(False), [ids]
    tokenizer = load_tokenizer(args.model)
    pages = [json.loads(line)["page"] for line in args.texts.read_text().splitlines()[: args.samples]]
    return load_checkpoint(args.model), [torch.tensor(tokenizer(page)["input_ids"])[: args.length] for page in pages]


def measure(args: argparse.Namespace) -> dict[str, object]:
    """CPU seconds, MiB and figures of one way, measured in this process."""
    torch.set_num_threads(1)
    model, texts = inputs(args)
    way = WAYS[args.way]
    with torch.no_grad():
        model(texts[0][None, :8])  # loads libraries
    before, start = _reset_peak(), time.process_time()
    figures = way(model, texts)
    return {"seconds": time.process_time() - start, "mib": _resident("VmHWM") - before, "figures": figures}


def child(way: str, memory: bool = False) -> dict:
    """The result of `measure` in a new process."""
    # With a fixed threshold, malloc returns large blocks at once, so the resident set is the memory in use. But then
    # every block costs page faults, so this is not used to measure time.
    threshold = {"MALLOC_MMAP_THRESHOLD_": "65536"} if memory else {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **threshold}
    command = [sys.executable, *sys.argv, "--way", way]
    return json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # the child process
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args)))
        return
    print(f"{cpu_name()}, 1 thread, torch {torch.__version__}, float32\n")
    best = {name: min((child(name) for _ in range(args.repeats)), key=lambda run: run["seconds"]) for name in WAYS}
    for name in WAYS:
        best[name]["mib"] = child(name, memory=True)["mib"]
    print("| | ours | plain | ratio |\n|---|--:|--:|--:|")
    for name, unit in (("seconds", "CPU s"), ("mib", "extra MiB")):
        a, b = best["ours"][name], best["plain"][name]
        print(f"| {unit} | {a:.1f} | {b:.1f} | {a / b:.3f} |")
    for name, b in best["plain"]["figures"].items():
        a = best["ours"]["figures"][name]
        print(f"| {name} | {a:.8g} | {b:.8g} | {a / b if b else 1.0:.9f} |")


if __name__ == "__main__":
    main()
