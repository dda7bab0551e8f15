"""Compare our GPTQ of a whole model with gptqmodel's pipeline, in the same run, and measure our peak memory.

Each pass is a separate process, and the two take turns. Only the quantization is timed, from a loaded model in memory
to a packed one. Not timed: imports, loading, a warm-up on a small model, and the C++ packer that gptqmodel compiles on
its first use. Calibration, batches and settings are the same: plain GPTQ, float32, on the CPU.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from qbench.quantizers.gptq.layer import BATCH_TOKENS

GROUP_SIZE, DAMP = 128, 0.1


def main() -> int:
    """Time both in turns and print the table; exit code 1 if ours takes longer."""
    arguments = _arguments()
    if arguments.worker:
        work(arguments)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        shape = {"hidden": arguments.hidden, "layers": arguments.layers}
        make_model(Path(folder, "model"), **shape)
        make_model(Path(folder, "warm-up"), hidden=256, layers=1)
        write_calibration(Path(folder), arguments.samples, arguments.length)
        print(f"{shape}, {arguments.bits} bits, {arguments.samples} samples of {arguments.length} tokens")
        slower = [n for n in sorted({1, len(os.sched_getaffinity(0))}) if compare(Path(folder), arguments, n) > 1]
        show_memory(Path(folder), arguments)
    return 1 if slower else 0


def compare(folder: Path, arguments: argparse.Namespace, cores: int) -> float:
    """Print both times on this many cores; return the ratio of our time to theirs."""
    results: dict[str, list[dict[str, Any]]] = {"ours": [], "gptqmodel": []}
    for _ in range(arguments.rounds):
        for worker, runs in results.items():
            runs.append(run_worker(worker, folder, arguments.bits, cores))
    print(f"\n{cores} core{'s' * (cores > 1)}, median of {arguments.rounds} rounds (each)")
    middle = {w: {k: median(run[k] for run in runs) for k in ("seconds", "cpu", "peak")} for w, runs in results.items()}
    for worker, m in middle.items():
        each = ", ".join(f"{run['seconds']:.1f}" for run in results[worker])
        times = f"{m['seconds']:6.1f} s ({each}), {m['cpu']:.1f} s of CPU"
        print(f"  {worker:9} {times}, peak memory {_mb(m['peak'])} above the model")
    ratio, cpu = (middle["ours"][key] / middle["gptqmodel"][key] for key in ("seconds", "cpu"))
    print(f"  ours / gptqmodel = {ratio:.2f}, of CPU {cpu:.2f}")
    return ratio


def show_memory(folder: Path, arguments: argparse.Namespace) -> None:
    """Print our peak and its parts for growing calibration sets: only the activations may grow."""
    print("\nour peak memory above the model, and its parts")
    for samples in (arguments.samples, 4 * arguments.samples, 8 * arguments.samples):
        write_calibration(folder, samples, arguments.length)
        run = run_worker("ours", folder, arguments.bits, 1)
        named = " + ".join(f"{name} {_mb(n)}" for name, n in run["parts"].items())
        rest = run["peak"] - sum(run["parts"].values())
        print(f"  {samples} samples: {_mb(run['peak'])} = {named} + the rest {_mb(rest)}", flush=True)
    batch = f"one batch of {BATCH_TOKENS['cpu']} tokens in a layer"
    print(f"  the rest: {batch}, and the solver's copies of one stage's weights")


def write_calibration(folder: Path, samples: int, length: int) -> None:
    """Write token ids for the workers."""
    ids = torch.randint(0, 512, (samples, length), generator=torch.manual_seed(0))
    Path(folder, "calibration.json").write_text(json.dumps(ids.tolist()))


def run_worker(worker: str, folder: Path, bits: int, cores: int, group_size: int = GROUP_SIZE) -> dict[str, Any]:
    """Run one pass in a child process. Its working folder is `folder`, because gptqmodel writes logs there."""
    command = [
        sys.executable,
        __file__,
        "--worker",
        worker,
        "--cores",
        cores,
        "--bits",
        bits,
        "--group-size",
        group_size,
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(cores),
        "OMP_WAIT_POLICY": "passive",  # waiting threads sleep; spinning ones would make times depend on other load
        "GPTQMODEL_CPU_WORKERS": str(max(2, cores)),  # with 1 it crashes
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    done = subprocess.run(list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{worker} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return json.loads(Path(folder, f"{worker}.json").read_text())


def work(arguments: argparse.Namespace) -> None:
    """In the child: quantize ./model on ./calibration.json, and write times, peak bytes and weights next to them."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    samples = [torch.tensor([ids]) for ids in json.loads(Path("calibration.json").read_text())]
    prepare = {"ours": ours, "gptqmodel": theirs}[arguments.worker]
    if Path("warm-up").exists():
        prepare("warm-up", samples[:1], arguments.bits, arguments.group_size)()
    quantize = prepare("model", samples, arguments.bits, arguments.group_size)
    before = _reset_peak()
    start, cpu = time.perf_counter(), time.process_time()
    weights = quantize()
    result: dict[str, Any] = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}
    result["peak"] = _memory("VmHWM") - before
    if arguments.worker == "ours":
        result["parts"] = parts(samples, weights)
    torch.save(weights, f"{arguments.worker}.pt")
    Path(f"{arguments.worker}.json").write_text(json.dumps(result))


def ours(folder: str, samples: list[torch.Tensor], bits: int, group_size: int) -> Callable[[], dict[str, torch.Tensor]]:
    """Our pass, ready to start."""
    from qbench.quantizers.gptq import GptqOptions
    from qbench.quantizers.gptq.layer import quantize_linears, solver

    solver()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # in memory, not mapped from the file
    targets = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    options = GptqOptions(group_size=group_size, damp=DAMP)

    def quantize() -> dict[str, torch.Tensor]:
        quantize_linears(model, bits, options, targets=targets, calibration=samples)
        return model.state_dict()

    return quantize


def theirs(
    folder: str, samples: list[torch.Tensor], bits: int, group_size: int
) -> Callable[[], dict[str, torch.Tensor]]:
    """gptqmodel's pipeline at the same settings, ready to start."""
    from gptqmodel import GPTQModel, QuantizeConfig

    config = QuantizeConfig(
        bits=bits,
        group_size=group_size,
        sym=True,
        desc_act=False,
        act_group_aware=False,
        damp_percent=DAMP,
        fallback=None,
        offload_to_disk=False,  # its default leaves parameters on meta
        format="gptq_v2",  # with v1 the packed model in memory is one step off
    )
    model = GPTQModel.load(folder, config, dtype=torch.float32, device="cpu")
    for parameter in model.model.parameters():
        parameter.data = parameter.data.clone()
    rows = [{"input_ids": ids[0].tolist(), "attention_mask": [1] * ids.shape[1]} for ids in samples]

    def quantize() -> dict[str, torch.Tensor]:
        batch = max(1, BATCH_TOKENS["cpu"] // samples[0].shape[1])
        model.quantize(rows, batch_size=batch, calibration_data_min_length=1)
        return model.model.state_dict()

    return quantize


def parts(samples: list[torch.Tensor], weights: dict[str, torch.Tensor]) -> dict[str, int]:
    """The expected parts of the peak, in bytes: one layer's Hessians, the activations, the packed results."""
    inputs = {
        name: len(tensor) for name, tensor in weights.items() if name.startswith("model.layers.0.") and "g_idx" in name
    }
    hidden = inputs["model.layers.0.self_attn.q_proj.g_idx"]
    stages = ("q_proj", "o_proj", "gate_proj", "down_proj")  # one Hessian for the linears that share an input
    packed = ("qweight", "qzeros", "scales", "g_idx")
    return {
        "Hessians": sum(4 * n * n for name, n in inputs.items() if name.split(".")[-2] in stages),
        "activations": sum(4 * ids.numel() * hidden for ids in samples),
        "packed": sum(t.numel() * t.element_size() for name, t in weights.items() if name.split(".")[-1] in packed),
    }


def make_model(folder: Path, *, hidden: int, layers: int) -> None:
    """Write a random Llama, with a tokenizer, which gptqmodel requires."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4 // 128 * 128,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder, config.vocab_size)


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer of made-up words next to a model."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1").save_pretrained(folder)


def _reset_peak() -> int:
    """Reset the peak of resident memory, and return the bytes that are resident now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def _mb(n: float) -> str:
    return f"{n / 2**20:.0f} MB"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", choices=("ours", "gptqmodel"), help=argparse.SUPPRESS)
    parser.add_argument("--cores", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--group-size", type=int, default=GROUP_SIZE, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
