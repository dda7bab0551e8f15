"""Load a checkpoint of either layout as transformers' LlamaForCausalLM, with the attention it was trained with.

Only JSON and safetensors files are read: pickle files are never opened, and code that a config points to (`auto_map`)
is never run.
"""

import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from qbench.attention.kinds import Attention, Sizes
from qbench.attention.register import build_model, config_kind, set_attention
from qbench.checkpoint.layout import (
    CONFIG,
    GENERATION_CONFIG,
    GET_AGAIN,
    HUB_FILES,
    WEIGHTS,
    CheckpointError,
    config_attention,
    config_doubt,
    config_sizes,
    fla_name,
    is_fla,
    llama_fields,
    read_json,
    tensor_shapes,
    weight_files,
)
from qbench.errors import one_line, shown, why_not_downloaded
from qbench.numbers import counted
from qbench.quantizers.declaration import QuantizeError
from qbench.quantizers.saving import place_packed

# The dtypes that weights may be stored as and loaded as, by safetensors' names.
WEIGHT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# The fields of a Llama config that describe the network. Others may cost without limit: `num_labels` makes as many.
NETWORK_FIELDS = {*LlamaConfig.__annotations__, "rope_theta", "rope_scaling", "partial_rotary_factor"}
LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is, and what its file's header says about it."""

    file: Path
    shape: list[int]
    dtype: str  # safetensors' name


def load_checkpoint(
    path_or_hub_id: str | os.PathLike[str],
    attention: str | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LlamaForCausalLM:
    """Load a Llama-style checkpoint with the attention it was trained with, in eval mode.

    attention: a kind ("softmax", "softpick", …) to require it; an error if the checkpoint has a different one.
    """
    if dtype not in WEIGHT_DTYPES.values():
        raise CheckpointError(f"dtype is {dtype!r}; it must be one of {_list(WEIGHT_DTYPES.values())}.")
    device = _device(device)
    folder = local_folder(path_or_hub_id)
    file = folder / CONFIG
    fields = read_json(file)
    kind = config_attention(fields, file, attention)
    if doubt := config_doubt(fields, file, kind):
        warnings.warn(doubt, stacklevel=2)
    config = llama_config(fields, file)
    stored = _stored_tensors(folder)
    _check_headers(folder, config_sizes(fields, file), kind, is_fla(fields, file), stored)
    config.dtype = dtype
    config._name_or_path = str(folder)
    set_attention(config, kind)
    try:
        model = empty_model(config)
        rotary = LlamaRotaryEmbedding(config)
    except Exception as error:  # whatever the fields of a config make of transformers' code
        raise CheckpointError(f"{file}: transformers cannot build a Llama from it ({one_line(error)}).") from error
    if kind.scaled and is_fla(fields, file):
        _check_logn(config, folder, stored)
    if settings := fields.get("quantization_config"):
        _place_packed(model, settings, file, stored, device, dtype)
    weights = _read_weights(model, folder, is_fla(fields, file), stored, device, dtype)
    model.load_state_dict(weights, assign=True, strict=not settings)  # packed layers have their tensors already
    model.tie_weights()
    # Not in the file, and never in half precision, since rotary angles are positions times these frequencies.
    model.model.rotary_emb = rotary.to(device)
    model.generation_config = _generation_config(folder, config)
    return model.eval()


def llama_config(fields: dict[str, Any], file: Path) -> LlamaConfig:
    """The LlamaConfig for a config.json of either layout; `file` is named in errors."""
    config_sizes(fields, file)  # raises if a size is wrong
    network = {name: value for name, value in llama_fields(fields, file).items() if name in NETWORK_FIELDS}
    try:
        return LlamaConfig.from_dict(network)
    except Exception as error:  # its validators raise a dozen types
        raise CheckpointError(f"{file}: not a valid Llama config ({one_line(error)}).") from error


def empty_model(config: LlamaConfig) -> LlamaForCausalLM:
    """The model without memory for its weights: names and shapes only."""
    with torch.device("meta"):
        return build_model(config)


def _device(device: str | torch.device) -> torch.device:
    try:
        device = torch.device(device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CheckpointError(
            f"device is {str(device)!r}, which torch cannot use on this machine ({one_line(error)}); use 'cpu'."
        ) from error
    if device.type == "meta":
        raise CheckpointError("device is 'meta', which cannot hold weights; use 'cpu' or 'cuda'.")
    return device


def _list(values: Any) -> str:
    return ", ".join(map(str, values))


def local_folder(path_or_hub_id: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder of a checkpoint; one on the Hub is downloaded into the cache."""
    path = Path(path_or_hub_id)
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file; give the folder that contains {CONFIG} and {WEIGHTS}.")
    try:
        # Top-level files only: "*" matches "/" too.
        return Path(
            snapshot_download(str(path_or_hub_id), revision=revision, allow_patterns=HUB_FILES, ignore_patterns=["*/*"])
        )
    except HFValidationError as error:
        raise CheckpointError(f"{path_or_hub_id} does not exist, and it is not a Hub id (owner/name).") from error
    except OSError as error:  # the Hub's HTTP errors, no network, offline and not in the cache
        raise CheckpointError(
            f"{path_or_hub_id} is not a local folder, and could not be downloaded from the Hub "
            f"({why_not_downloaded(error)}). "
            "Give a folder or a Hub id; without network access, a Hub id that is in the Hugging Face cache."
        ) from error


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read as safetensors ({error}): it is truncated or in another format; {GET_AGAIN}."
        ) from error


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors by name, from the headers of all files."""
    found: dict[str, StoredTensor] = {}
    for file in weight_files(folder):
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                if name in found:
                    raise CheckpointError(
                        f"{file} and {found[name].file.name} both contain the tensor {name}; only one may."
                    )
                header = tensors.get_slice(name)
                found[name] = StoredTensor(file, header.get_shape(), header.get_dtype())
    return found


def _check_headers(folder: Path, sizes: Sizes, kind: Attention, fla: bool, stored: Mapping[str, StoredTensor]) -> None:
    """Compare the config's sizes with the headers, before a model of these sizes is built."""
    layers = {found[1] for name in stored if (found := LAYER.match(name))}
    if sizes.num_hidden_layers > len(layers):
        raise CheckpointError(
            f"{folder / CONFIG}: num_hidden_layers is {sizes.num_hidden_layers}, but the weights have "
            f"{counted(len(layers), 'layer')}; the tensors of the other layers are missing."
        )
    for name, shape in tensor_shapes(sizes, kind).items():
        source = fla_name(name) if fla else name
        tensor = stored.get(source)
        # Packed layers have integers of another shape.
        if tensor and tensor.dtype in WEIGHT_DTYPES and tensor.shape != list(shape):
            raise CheckpointError(
                f"{tensor.file}: {source} has shape {tensor.shape}; by config.json it must be {list(shape)}, for "
                f"{kind.name} attention."
            )


def _place_packed(
    model: LlamaForCausalLM,
    settings: Any,
    file: Path,
    stored: dict[str, StoredTensor],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Put the quantized layers into the empty model, and remove their tensors from those still to be read."""
    if not isinstance(settings, dict):
        raise CheckpointError(f"{file}: quantization_config is {settings!r}; it must be an object.")
    try:
        taken = place_packed(model, settings, stored, lambda name: _read_tensor(stored[name].file, name, device), dtype)
    except QuantizeError as error:
        raise CheckpointError(f"{file}: {error}") from error
    for name in taken:
        del stored[name]


def _read_weights(
    model: LlamaForCausalLM,
    folder: Path,
    fla: bool,
    stored: dict[str, StoredTensor],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """The tensors by Llama's names, once the headers of all files show that they are what the model needs."""
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    expected = {fla_name(name) if fla else name: name for name in parameters}
    tied, kind = model.config.tie_word_embeddings, config_kind(model.config)
    _check_names(folder, kind.name, set(expected), set(stored), optional={"lm_head.weight"} if tied else set())
    weights: dict[str, Tensor] = {}
    for source, name in expected.items():
        if source not in stored:
            continue
        tensor = stored[source]
        if tensor.dtype not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"{tensor.file}: {source} is stored as {tensor.dtype}; it must be one of {_list(WEIGHT_DTYPES)}."
            )
        weights[name] = _read_tensor(tensor.file, source, device, dtype)
    if tied:
        embeddings = weights["model.embed_tokens.weight"]
        if not torch.equal(weights.get("lm_head.weight", embeddings), embeddings):
            raise CheckpointError(
                f"{folder}: tie_word_embeddings is true, but lm_head.weight is not the embeddings; set it to false."
            )
        weights["lm_head.weight"] = embeddings
    return weights


def _check_names(folder: Path, kind: str, expected: set[str], found: set[str], optional: set[str]) -> None:
    if missing := sorted(expected - found - optional):
        raise CheckpointError(
            f"{folder}: {len(missing)} of the {len(expected)} tensors that config.json requires are missing, "
            f"starting with {missing[0]}. The attention in config.json is {kind}."
        )
    # Old Llama checkpoints contain the rotary frequencies, which follow from the config.
    if extra := sorted(name for name in found - expected if not name.endswith("rotary_emb.inv_freq")):
        raise CheckpointError(
            f"{folder}: {counted(len(extra), 'tensor')} {'does' if len(extra) == 1 else 'do'} not belong to the model "
            f"that config.json describes, starting with {extra[0]}; remove them. The attention in config.json "
            f"is {kind}."
        )


def _check_logn(config: LlamaConfig, folder: Path, stored: dict[str, StoredTensor]) -> None:
    """Check the FLA layout's table of ln(t + 2), [4 · max_position, 1, 1] in each layer, and drop it.

    It follows from the config: models compute it for any t, and the Llama layout does not store it.
    """
    shape = [4 * config.max_position_embeddings, 1, 1]
    for number in range(config.num_hidden_layers):
        name = fla_name(f"model.layers.{number}.self_attn.logn")
        if name not in stored:
            kind = config_kind(config).name
            raise CheckpointError(f"{folder}: {name} is missing; {kind} attention needs this table of ln(t + 2).")
        tensor = stored.pop(name)
        if tensor.shape != shape:
            raise CheckpointError(
                f"{tensor.file}: {name} has shape {tensor.shape}; by config.json it must be {shape}, starting with "
                "4 · max_position_embeddings."
            )
        wanted = (torch.arange(shape[0], dtype=torch.float64) + 2).log()[:, None, None]
        found = _read_tensor(tensor.file, name, torch.device("cpu"))
        rounding = 2 * torch.finfo(found.dtype).eps if found.is_floating_point() else 0.0
        off = (found.double() - wanted).abs() > rounding * wanted
        if off.any():
            t = int(off.flatten().nonzero()[0])
            raise CheckpointError(
                f"{tensor.file}: {name} is {found.flatten()[t].item():.6g} at t = {t}; it must be ln(t + 2) = "
                f"{wanted.flatten()[t].item():.6g}: other factors are not supported."
            )


def _read_tensor(file: Path, name: str, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    # safetensors maps the file. The copy keeps the model valid if the file changes, and opening the file for each
    # tensor releases the mapped pages, so memory holds the model plus one tensor.
    with _open(file) as tensors:
        source = tensors.get_tensor(name)
        tensor = torch.empty(source.shape, device=device, dtype=dtype or source.dtype).copy_(source)
    # aminmax propagates NaN and, unlike isfinite, allocates nothing.
    if tensor.is_floating_point() and not torch.stack(tensor.aminmax()).isfinite().all():
        raise CheckpointError(f"{file}: {name} has NaN or infinite values in {tensor.dtype}; weights must be finite.")
    return tensor


def _generation_config(folder: Path, config: LlamaConfig) -> GenerationConfig:
    file = folder / GENERATION_CONFIG
    fields = read_json(file) if file.exists() else {}
    for field in TOKEN_IDS:
        ids = fields.get(field)
        if not all(type(token) is int for token in (ids if isinstance(ids, list) else [ids]) if ids is not None):
            raise CheckpointError(f"{file}: {field} is {shown(ids)}; it must be a token id, or a list of them.")
    try:
        generation = GenerationConfig.from_dict(fields)
    except Exception as error:
        raise CheckpointError(f"{file}: not a valid generation config ({one_line(error)}).") from error
    for field in TOKEN_IDS:
        if getattr(generation, field) is None:
            setattr(generation, field, getattr(config, field))
    if generation.pad_token_id is None:  # generate needs one to pad finished rows
        eos = generation.eos_token_id
        generation.pad_token_id = next(iter(eos), None) if isinstance(eos, list) else eos
    return generation
