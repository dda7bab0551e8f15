"""Checkpoints: Hugging Face's Llama layout or flash-linear-attention's, into transformers' LlamaForCausalLM and back.

Both layouts hold the same network under other names, so loading is a rename. Only JSON and safetensors are read:
pickle files are never opened, and code that a config points at (`auto_map`) is never run.
"""

import copy
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict, snapshot_download
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from qbench.attention.register import KINDS, attention_kind
from qbench.errors import InputError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_SIZE = "5GB"
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
GET_AGAIN = "copy it again or `git checkout` it, or, from the hub, remove it and `qbench fetch` it"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Stored = dict[str, tuple[Path, list[int], str]]  # by tensor: the file, the shape, the dtype by safetensors' name

# vLLM does not know this name, so it refuses a softpick checkpoint instead of running it as softmax.
ARCHITECTURES = {"softmax": "LlamaForCausalLM", "softpick": "SoftpickLlamaForCausalLM"}

# What the values of config.json's fields mean. All are read in either layout, and must agree.
FLA_ATTENTION = {
    "flash_attn": "softmax",
    "parallel_attn": "softmax",
    "naive_attn": "softmax",
    "parallel_softpick_attn": "softpick",
    "naive_softpick_attn": "softpick",
}
LLAMA_ATTENTION = {
    "eager": "softmax",
    "sdpa": "softmax",
    "flash_attention_2": "softmax",
    "flash_attention_3": "softmax",
    "flex_attention": "softmax",
    "softpick": "softpick",
}
ATTENTION_FIELDS = {
    "attn_impl": FLA_ATTENTION,
    "attn_implementation": LLAMA_ATTENTION,
    "_attn_implementation": LLAMA_ATTENTION,
}

# Llama's field: the same one in the FLA layout, and its default there.
FLA_FIELDS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", 32000),
    "hidden_size": ("hidden_size", 2048),
    "num_hidden_layers": ("num_hidden_layers", 24),
    "num_attention_heads": ("num_heads", 32),
    "num_key_value_heads": ("num_kv_heads", None),
    "intermediate_size": ("intermediate_size", None),
    "max_position_embeddings": ("max_position_embeddings", 2048),
    "rms_norm_eps": ("norm_eps", 1e-6),
    "initializer_range": ("initializer_range", 0.006),
    "tie_word_embeddings": ("tie_word_embeddings", False),
    "bos_token_id": ("bos_token_id", 1),
    "eos_token_id": ("eos_token_id", 2),
    "pad_token_id": ("pad_token_id", None),
}
# FLA's fields that Llama has no place for, and the values that mean what Llama does; the first is the default.
FLA_FIXED: dict[str, tuple[Any, ...]] = {
    "qkv_bias": (False,),
    "qk_norm": (False,),
    "window_size": (None,),
    "hidden_act": ("swish", "silu"),
    "elementwise_affine": (True,),
    "rope_scaling": (None,),
    "use_rope": (True,),
    "logit_soft_cap": (None,),
    "quantization_config": (None,),
}
# Llama's tensor names to FLA's.
FLA_TENSORS = {
    "model.embed_tokens.": "model.embeddings.",
    ".input_layernorm.": ".attn_norm.",
    ".self_attn.": ".attn.",
    ".post_attention_layernorm.": ".mlp_norm.",
}


class CheckpointError(InputError):
    """A checkpoint that cannot be loaded or saved as it is, in a sentence."""


def load_checkpoint(
    path_or_hub_id: str | os.PathLike[str],
    attention: str | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LlamaForCausalLM:
    """Load a Llama-style checkpoint with the attention it was trained with, in eval mode.

    attention: "softmax" or "softpick" where the caller relies on it; another one in the checkpoint is an error.
    """
    if dtype not in DTYPES.values():
        raise CheckpointError(f"dtype is {dtype!r}; it must be one of {_list(DTYPES.values())}.")
    device = _device(device)
    folder = local_folder(path_or_hub_id)
    file = folder / "config.json"
    fields = _read_json(file)
    kind = _attention_kind(fields, file, attention)
    config = llama_config(fields, file)
    config.dtype = dtype
    config._name_or_path = str(folder)
    config._attn_implementation = "sdpa" if kind == "softmax" else kind
    if kind != "softmax":
        # As a plain attribute it is serialized, so that the model's own save_pretrained keeps it too.
        config.attn_implementation = kind
    try:
        model = empty_model(config)
        rotary = LlamaRotaryEmbedding(config)
    except (KeyError, AssertionError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file}: transformers cannot build a Llama from it: {error!r}.") from error
    stored = _stored_tensors(folder)
    if settings := fields.get("quantization_config"):
        _place_packed(model, settings, file, stored, device, dtype)
    weights = _read_weights(model, folder, fields["model_type"] == "transformer", stored, device, dtype)
    model.load_state_dict(weights, assign=True, strict=not settings)  # packed layers have their tensors already
    model.tie_weights()
    # Not in the file, and never in half precision: rotary angles are positions times these frequencies.
    model.model.rotary_emb = rotary.to(device)
    model.generation_config = _generation_config(folder, config)
    return model.eval()


def save_checkpoint(
    model: LlamaForCausalLM, folder: str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Write a dense model in the Llama layout: softmax for everyone, softpick so that only qbench runs it."""
    _check_dense(model)
    write_checkpoint(model, folder, model.state_dict(), tokenizer)


def write_checkpoint(
    model: LlamaForCausalLM,
    folder: str | os.PathLike[str],
    tensors: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase | None = None,
    quantization_config: dict[str, Any] | None = None,
) -> None:
    """Write a model's config and tokenizer with tensors that stand for it: its own, or packed ones."""
    kind = attention_kind(model)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # config.json goes first and comes last: a folder without it is no checkpoint, so what an interrupted save
    # leaves behind does not load, neither as the old model nor as a mixture.
    file = folder / "config.json"
    file.unlink(missing_ok=True)
    (folder / "quantize_config.json").unlink(missing_ok=True)  # of a gptq model that was here before
    tied = ["lm_head.weight"] if model.config.tie_word_embeddings else None
    save_torch_state_dict(tensors, folder, max_shard_size=SHARD_SIZE, shared_tensors_to_discard=tied)
    (folder / "generation_config.json").write_text(model.generation_config.to_json_string())
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    config = copy.deepcopy(model.config)
    config.architectures = [ARCHITECTURES[kind]]
    config.dtype = model.dtype
    if kind != "softmax":
        config.attn_implementation = kind
    if quantization_config:
        config.quantization_config = quantization_config
    unfinished = folder / "config.json.tmp"
    unfinished.write_text(config.to_json_string())
    unfinished.replace(file)


def llama_config(fields: dict[str, Any], file: Path) -> LlamaConfig:
    """The LlamaConfig that the config.json of either layout means; `file` is named in errors."""
    model_type = fields.get("model_type")
    if model_type == "transformer":
        names = {ours: theirs for ours, (theirs, _) in FLA_FIELDS.items()}
        llama = _from_fla(fields, file)
    elif model_type == "llama":
        names = {}
        dropped = {"auto_map", "architectures", "dtype", "torch_dtype", "quantization_config", *ATTENTION_FIELDS}
        llama = {name: value for name, value in fields.items() if name not in dropped}
    else:
        raise CheckpointError(
            f"{file}: model_type is {model_type!r}; supported are 'llama' (Hugging Face's Llama layout) and "
            "'transformer' (flash-linear-attention's)."
        )
    _check_sizes(llama, names, file)
    try:
        return LlamaConfig.from_dict(llama)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{file}: not a valid Llama config: {' '.join(str(error).split())}") from error


def empty_model(config: LlamaConfig) -> LlamaForCausalLM:
    """The model without memory for its weights: names and shapes only."""
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def _device(device: str | torch.device) -> torch.device:
    try:
        device = torch.device(device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"device is {str(device)!r}, which torch cannot use here ({reason}); give 'cpu'."
        ) from error
    if device.type == "meta":
        raise CheckpointError("device is 'meta', which holds no values; give 'cpu' or 'cuda'.")
    return device


def _list(values: Any) -> str:
    return ", ".join(map(str, values))


def local_folder(path_or_hub_id: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder of a checkpoint; one on the hub is downloaded into the cache."""
    path = Path(path_or_hub_id)
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file; give the folder that holds config.json and {WEIGHTS}.")
    try:
        # Top-level files only: "*" matches "/" too.
        return Path(
            snapshot_download(str(path_or_hub_id), revision=revision, allow_patterns=HUB_FILES, ignore_patterns=["*/*"])
        )
    except HFValidationError as error:
        raise CheckpointError(f"{path_or_hub_id} is not a folder, and not a hub id such as 'owner/name'.") from error
    except OSError as error:  # the hub's HTTP errors, no network, offline and not in the cache
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"{path_or_hub_id} is not a folder, and could not be had from the hub ({type(error).__name__}: {reason}). "
            "Give a folder or a hub id; without network, one that is in the Hugging Face cache."
        ) from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read ({error.strerror}); a checkpoint's folder must have it."
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a JSON {type(content).__name__}; it must hold an object.")
    return content


def _attention_kind(fields: dict[str, Any], file: Path, asked: str | None) -> str:
    if asked is not None and asked not in KINDS:
        raise CheckpointError(f"attention is {asked!r}; it must be None or one of {_list(KINDS)}.")
    says: dict[str, str] = {}
    for field, kinds in ATTENTION_FIELDS.items():
        value = fields.get(field)
        if value is None:
            continue
        if not isinstance(value, str) or value not in kinds:
            raise CheckpointError(f"{file}: {field} is {value!r}; supported are {_list(kinds)}.")
        says[f"{field} {value!r}"] = kinds[value]
    architectures = fields.get("architectures")
    if isinstance(architectures, list) and ARCHITECTURES["softpick"] in architectures:
        says[f"architectures {fields['architectures']!r}"] = "softpick"
    if len(set(says.values())) > 1:
        raise CheckpointError(f"{file}: {' and '.join(says)} contradict each other; they must mean one attention.")
    kind = next(iter(says.values()), "softmax")
    if asked not in (None, kind):
        source = next(iter(says), "no attn_impl or attn_implementation")
        raise CheckpointError(
            f"attention={asked!r} was asked for, but {file} has {source}, which is {kind}; "
            f"ask for {kind!r}, or leave attention out."
        )
    return kind


def _from_fla(fields: dict[str, Any], file: Path) -> dict[str, Any]:
    for name, supported in FLA_FIXED.items():
        if (value := fields.get(name, supported[0])) not in supported:
            raise CheckpointError(f"{file}: {name} is {value!r}; supported is {_list(map(repr, supported))}.")
    llama = {ours: fields.get(theirs, default) for ours, (theirs, default) in FLA_FIELDS.items()}
    llama["head_dim"] = fields.get("head_dim")  # None: hidden_size / num_heads; the tensors' shapes are held to it
    ratio = fields.get("hidden_ratio")
    theta, ratio, hidden = fields.get("rope_theta", 1e4), 4 if ratio is None else ratio, llama["hidden_size"]
    for name, value in (("rope_theta", theta), ("hidden_ratio", ratio), ("hidden_size", hidden)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise CheckpointError(f"{file}: {name} is {value!r}; it must be a positive number.")
    llama["rope_parameters"] = {"rope_type": "default", "rope_theta": float(theta)}
    if llama["intermediate_size"] is None:
        size = int(hidden * ratio * 2 / 3)
        llama["intermediate_size"] = (size + 255) // 256 * 256
    return llama


def _check_sizes(llama: dict[str, Any], names: dict[str, str], file: Path) -> None:
    """Sizes must be positive and divide; `names` gives what the file calls a field, where that is not Llama's name."""

    def size(field: str, default: Any = None) -> int:
        value = llama.get(field, getattr(LlamaConfig, field))
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{file}: {names.get(field, field)} is {value!r}; it must be a positive integer.")
        return value

    for field in ("vocab_size", "num_hidden_layers", "intermediate_size", "max_position_embeddings"):
        size(field)
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    kv_heads, dim = size("num_key_value_heads", heads), size("head_dim", hidden // heads)
    heads_name = names.get("num_attention_heads", "num_attention_heads")
    kv_name = names.get("num_key_value_heads", "num_key_value_heads")
    if hidden % heads or dim % 2:
        raise CheckpointError(
            f"{file}: hidden_size {hidden} and {heads_name} {heads}; {heads_name} must divide hidden_size, and the "
            "head dim must be even for rotary embeddings."
        )
    if heads % kv_heads:
        raise CheckpointError(f"{file}: {kv_name} {kv_heads} does not divide {heads_name} {heads}; it must.")


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    index = folder / INDEX
    if not index.exists():
        pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
        found = f"only {_list(pickles)}; pickle files are never loaded" if pickles else "no safetensors weights"
        raise CheckpointError(
            f"{folder} has {found}: it must have {WEIGHTS}, or {INDEX} with its shards; convert it to safetensors."
        )
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is {weight_map!r}; it must map each tensor to its file.")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index}: weight_map names {name!r}; it must be the name of a file in that folder.")
        if not (folder / name).is_file():
            raise CheckpointError(f"{index} names the shard {name}, which is not in the folder; {GET_AGAIN}.")
    return [folder / name for name in sorted(set(weight_map.values()))]


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} cannot be read as safetensors ({error}): it is truncated or something else; {GET_AGAIN}."
        ) from error


def _stored_tensors(folder: Path) -> Stored:
    """File, shape and dtype of each tensor, from the headers of all files."""
    found: Stored = {}
    for file in _weight_files(folder):
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                if name in found:
                    raise CheckpointError(f"{file} and {found[name][0].name} both hold the tensor {name}; one must.")
                header = tensors.get_slice(name)
                found[name] = (file, header.get_shape(), header.get_dtype())
    return found


def _place_packed(
    model: LlamaForCausalLM, settings: Any, file: Path, stored: Stored, device: torch.device, dtype: torch.dtype
) -> None:
    """Put the quantized layers into the empty model, and take their tensors off those that are still to be read."""
    # Imports the method's library, which an unquantized checkpoint does not need.
    from qbench.quantizers.declaration import QuantizeError
    from qbench.quantizers.saving import place_packed

    if not isinstance(settings, dict):
        raise CheckpointError(f"{file}: quantization_config is {settings!r}; it must be an object.")
    try:
        taken = place_packed(model, settings, stored, lambda name: _read_tensor(stored[name][0], name, device), dtype)
    except QuantizeError as error:
        raise CheckpointError(f"{file}: {error}") from error
    for name in taken:
        del stored[name]


def _read_weights(
    model: LlamaForCausalLM, folder: Path, fla: bool, found: Stored, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors by Llama's names, after the headers of all files have shown that they are what the model needs."""
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    expected = {_fla_name(name) if fla else name: name for name in parameters}
    tied = model.config.tie_word_embeddings
    _check_names(folder, set(expected), set(found), optional={"lm_head.weight"} if tied else set())
    weights: dict[str, Tensor] = {}
    for source, name in expected.items():
        if source not in found:
            continue
        file, shape, stored = found[source]
        parameter = model.get_parameter(name)
        if shape != list(parameter.shape):
            raise CheckpointError(
                f"{file}: {source} has shape {shape}; by config.json it must be {list(parameter.shape)}."
            )
        if stored not in DTYPES:
            raise CheckpointError(f"{file}: {source} is stored as {stored}; it must be one of {_list(DTYPES)}.")
        weights[name] = _read_tensor(file, source, device, dtype)
    if tied:
        embeddings = weights["model.embed_tokens.weight"]
        if not torch.equal(weights.get("lm_head.weight", embeddings), embeddings):
            raise CheckpointError(
                f"{folder}: tie_word_embeddings is true, but lm_head.weight is not the embeddings; set it to false."
            )
        weights["lm_head.weight"] = embeddings
    return weights


def _fla_name(name: str) -> str:
    for ours, theirs in FLA_TENSORS.items():
        name = name.replace(ours, theirs)
    return name


def _check_names(folder: Path, expected: set[str], found: set[str], optional: set[str]) -> None:
    if missing := sorted(expected - found - optional):
        raise CheckpointError(
            f"{folder}: {len(missing)} of the {len(expected)} tensors that config.json asks for are missing, "
            f"the first is {missing[0]}."
        )
    # Old Llama checkpoints carry the rotary frequencies, which follow from the config.
    if extra := sorted(name for name in found - expected if not name.endswith("rotary_emb.inv_freq")):
        raise CheckpointError(
            f"{folder}: {len(extra)} tensors have no place in the model that config.json describes, "
            f"the first is {extra[0]}; there must be none."
        )


def _read_tensor(file: Path, name: str, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    # safetensors maps the file: the copy keeps the model alive when the file changes, and opening the file for each
    # tensor gives the mapped pages back, so that memory holds the model once and one tensor more.
    with _open(file) as tensors:
        source = tensors.get_tensor(name)
        tensor = torch.empty(source.shape, device=device, dtype=dtype or source.dtype).copy_(source)
    # aminmax passes NaN on and, unlike isfinite, needs no memory.
    if tensor.is_floating_point() and not torch.stack(tensor.aminmax()).isfinite().all():
        raise CheckpointError(f"{file}: {name} has NaN or infinite values in {tensor.dtype}; weights must be finite.")
    return tensor


def _generation_config(folder: Path, config: LlamaConfig) -> GenerationConfig:
    file = folder / "generation_config.json"
    generation = GenerationConfig.from_dict(_read_json(file)) if file.exists() else GenerationConfig()
    for field in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(generation, field) is None:
            setattr(generation, field, getattr(config, field))
    if generation.pad_token_id is None:  # generate needs one to fill finished rows with
        eos = generation.eos_token_id
        generation.pad_token_id = next(iter(eos), None) if isinstance(eos, list) else eos
    return generation


def _check_dense(model: LlamaForCausalLM) -> None:
    if not isinstance(model, LlamaForCausalLM):
        raise CheckpointError(f"model is a {type(model).__name__}; save_checkpoint writes LlamaForCausalLM.")
    from qbench.quantizers.packed import packed_form

    if form := packed_form(model):  # dense or packed: without its label it would pass for an unquantized baseline
        raise CheckpointError(
            f"The model is quantized, as {form.quantization.label}; save_checkpoint writes unquantized models: "
            "use save_quantized."
        )
    state = model.state_dict()
    shapes = {name: tensor.shape for name, tensor in empty_model(model.config).state_dict().items()}
    for name in sorted(shapes.keys() | state.keys()):
        tensor = state.get(name)
        if tensor is None or tensor.shape != shapes.get(name) or tensor.dtype not in DTYPES.values():
            raise CheckpointError(
                f"The model's {name} is not that of a dense Llama; save_checkpoint writes unquantized models."
            )


def save_quantized(
    model: LlamaForCausalLM, folder: str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Write the packed form of a quantized model, however it is executed; `load_checkpoint` reads it back.

    transformers reads softmax models of bnb, and of GPTQ if optimum is installed; it refuses all others.
    """
    from qbench.files import write_atomically
    from qbench.quantizers.packed import packed_form
    from qbench.quantizers.saving import packed_tensors, quantization_config

    tensors, form = packed_tensors(model), packed_form(model)
    assert form is not None  # packed_tensors has an error for that
    config = quantization_config(form.quantization, model.dtype)
    write_checkpoint(model, folder, tensors, tokenizer, quantization_config=config)
    if beside := form.quantization.quantizer.config_file:
        write_atomically(Path(folder, beside), json.dumps(config, indent=2) + "\n")
