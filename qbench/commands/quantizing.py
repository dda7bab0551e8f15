"""`qbench quantize`: one checkpoint in, the same checkpoint quantized and audited out."""

import argparse
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from qbench.arguments import named_values
from qbench.commands.common import DONE, FAILED, Commands, add, count
from qbench.errors import InputError
from qbench.numbers import byte_size, duration, fixed, percent, significant

if TYPE_CHECKING:
    from qbench.quantizers.calibration import Calibration
    from qbench.quantizers.options import Quantization
    from qbench.records.audit import Audit


def add_quantize(commands: Commands) -> None:
    purpose = "quantize one checkpoint, prove that it was quantized, and save it"
    example = (
        "qbench quantize recipes/mini/softmax --method hqq --bits 4 --out softmax-hqq-4\n"
        "  qbench quantize owner/name --method gptq --bits 4 --group-size 64 --calibration wikitext2 --out quantized"
    )
    parser = add(commands, "quantize", _quantize, purpose, example)
    parser.add_argument("model", metavar="MODEL", help="a folder with a checkpoint, or a Hub id (owner/name)")
    parser.add_argument("--method", required=True, metavar="M", help="bnb, gptq, hqq, … (docs/quantizers.md)")
    parser.add_argument("--bits", required=True, type=count, metavar="N", help="the width of the weights' codes")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="a new or empty folder")
    parser.add_argument("--group-size", type=int, metavar="G", help="weights per group; default: the method's")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE,…",
        help="further options of the method, such as sym=false,damp=0.05",
    )
    text = "calibration text, for methods that need it: a text or .jsonl file, wikitext2 or c4"
    parser.add_argument("--calibration", metavar="FILE", help=text)
    parser.add_argument(
        "--samples", type=count, metavar="N", help="windows drawn from the calibration text; default: 128"
    )
    length = "tokens in each; default: 2048, or what the model takes"
    parser.add_argument("--length", type=count, metavar="N", help=length)
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: cuda if there is a GPU"
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "float16", "bfloat16"],
        default="float32",
        help="of scales and of what is not quantized; default: float32",
    )


def _quantize(options: argparse.Namespace) -> int:
    wanted = _wanted(options)
    calibration = _calibration(options, wanted)
    _check_folders(options)
    from qbench.runner.hub import use_cache_if_unreachable

    if not Path(options.model).is_dir() or (calibration and not calibration.is_file):
        use_cache_if_unreachable()
    # After it, since these import huggingface_hub.
    import torch

    from qbench.checkpoint.layout import CONFIG
    from qbench.checkpoint.load import load_checkpoint, local_folder
    from qbench.checkpoint.save import save_quantized
    from qbench.gpus import has_cuda
    from qbench.progress import listening, said_by_tenths
    from qbench.quantizers.quantize import quantize
    from qbench.records.audit import AuditError
    from qbench.runner.obstacles import config_obstacle
    from qbench.runner.plan import settings_lines
    from qbench.tokenizer import TOKENIZER_FILE, load_tokenizer

    folder = local_folder(options.model)
    if why := config_obstacle(folder / CONFIG, wanted):
        raise InputError(why)
    device = ("cuda" if has_cuda() else "cpu") if options.device == "auto" else options.device
    used = settings_lines(device, options.dtype, calibration)
    print("\n".join(used), flush=True)
    begun = time.monotonic()
    model = load_checkpoint(folder, device=device, dtype=getattr(torch, options.dtype))
    tokenizer = load_tokenizer(folder) if (folder / TOKENIZER_FILE).exists() else None
    log = nullcontext() if sys.stderr.isatty() else listening(said_by_tenths(_log, "linear layers quantized"))
    try:
        with log:
            model, audit = quantize(
                model, wanted.method, wanted.bits, calibration=calibration, progress=True, **wanted.arguments
            )
    except AuditError as error:
        print(f"qbench: {error}", file=sys.stderr)
        return FAILED
    save_quantized(model, options.out, tokenizer)
    took = duration(time.monotonic() - begun)
    print("\n".join([*_outcome(options.out, audit), f"Done in {took}, with {'; '.join(used)}"]))
    return DONE


def _log(line: str) -> None:
    """Where there is no terminal for a bar, which is on stderr too."""
    print(line, file=sys.stderr, flush=True)


def _wanted(options: argparse.Namespace) -> "Quantization":
    from qbench.quantizers.options import quantization

    given: dict[str, Any] = {} if options.group_size is None else {"group_size": options.group_size}
    for text in options.option:
        given |= {name: yaml.safe_load(value) for name, value in named_values(text, "--option", "sym=false").items()}
    wanted = quantization(options.method, options.bits, **given)
    if wanted.for_weights.is_unquantized:
        raise InputError(
            f"--method {options.method} quantizes nothing, so there is nothing to save; use another method."
        )
    if not wanted.quantizer.is_installed:
        raise InputError(f"{wanted.method} needs the package {wanted.quantizer.library}, which is not installed.")
    return wanted


def _calibration(options: argparse.Namespace, wanted: "Quantization") -> "Calibration | None":
    """The calibration source; None for methods without one."""
    from qbench.quantizers.calibration import calibration_source

    own = {"source": options.calibration, "samples": options.samples, "length": options.length}
    given = {name: value for name, value in own.items() if value is not None}
    if wanted.is_calibrated and "source" not in given:
        raise InputError(
            f"{wanted.method} needs calibration text: add --calibration with a text or .jsonl file, wikitext2 or c4."
        )
    if given and not wanted.is_calibrated:
        name = "calibration" if "source" in given else next(iter(given))
        raise InputError(f"{wanted.method} does not use calibration text; leave --{name} out.")
    if not given:
        return None
    source = calibration_source(given)
    if source.is_file and not Path(source.source).is_file():
        raise InputError(f"The calibration file {source.source} does not exist.")
    return source


def _check_folders(options: argparse.Namespace) -> None:
    """An error before anything is loaded: a wrong path would otherwise cost minutes."""
    out, model = options.out, Path(options.model)
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; --out must be a new or empty folder.")
    if out.is_dir() and any(out.iterdir()):
        raise InputError(f"{out} exists and is not empty; give a new or empty folder as --out.")
    if not model.exists() and (model.is_absolute() or options.model.startswith(".") or options.model.count("/") != 1):
        raise InputError(f"{options.model} does not exist, and it is not a Hub id (owner/name).")


def _outcome(folder: Path, audit: "Audit") -> list[str]:
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    share = audit.weights / audit.linear_weights
    return [
        f"{audit.label} is in {folder} ({byte_size(size)}), and passed its audit: {len(audit.layers)} layers with "
        f"{audit.weights:,} weights ({percent(share)} of those in linear layers) at {fixed(audit.storage_bits or 0.0)} "
        f"bits with scales.",
        f"Relative error of the weights {significant(audit.relative_error or 0.0)}; on the probe, KL "
        f"{significant(audit.kl or 0.0)} nats and the same top token in {percent(audit.top1_agreement or 0.0)}.",
    ]
