"""Save a model's config, weights and tokenizer in the Llama layout."""

import copy
import json
import os
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from qbench.attention.kinds import attentions
from qbench.attention.register import attention_kind, set_attention
from qbench.checkpoint.layout import CONFIG, GENERATION_CONFIG, PICKLES, CheckpointError
from qbench.checkpoint.load import WEIGHT_DTYPES, empty_model
from qbench.files import write_atomically
from qbench.quantizers.packed import packed_form
from qbench.quantizers.saving import config_files, packed_tensors
from qbench.quantizers.saving import quantization_config as config_of

SHARD_SIZE = "5GB"
ANY_WEIGHTS = ("*.safetensors", *PICKLES)


def save_checkpoint(
    model: LlamaForCausalLM, folder: str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Write a dense model in the Llama layout: anyone can load softmax models, only qbench loads other attentions.

    A model that is in the folder is replaced.
    """
    _check_dense(model)
    write_checkpoint(model, folder, model.state_dict(), tokenizer)


def save_quantized(
    model: LlamaForCausalLM, folder: str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Write the packed form of a quantized model, however it is executed; `load_checkpoint` reads it back.

    A folder that holds an unquantized model is an error; a quantized model in it is replaced.
    transformers can read softmax models quantized by bnb, or by GPTQ if optimum is installed; it refuses all others.
    """
    _check_nothing_is_lost(Path(folder))
    tensors, form = packed_tensors(model), packed_form(model)
    assert form is not None  # packed_tensors raises an error for that
    config = config_of(form.quantization, model.dtype)
    write_checkpoint(model, folder, tensors, tokenizer, quantization_config=config)
    if beside := form.quantization.quantizer.config_file:
        write_atomically(Path(folder, beside), json.dumps(config, indent=2) + "\n")


def write_checkpoint(
    model: LlamaForCausalLM,
    folder: str | os.PathLike[str],
    tensors: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase | None = None,
    quantization_config: dict[str, Any] | None = None,
) -> None:
    """Write a model's config and tokenizer with its tensors, dense or packed."""
    kind = attentions()[attention_kind(model)]
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; a model is saved to a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    # config.json is removed first and written last: a folder without it is not a checkpoint, so what an interrupted
    # save leaves behind does not load as the old model or as a mixture.
    (folder / CONFIG).unlink(missing_ok=True)
    for name in config_files():  # left by a quantized model that was saved here before
        (folder / name).unlink(missing_ok=True)
    tied = ["lm_head.weight"] if model.config.tie_word_embeddings else None
    save_torch_state_dict(tensors, folder, max_shard_size=SHARD_SIZE, shared_tensors_to_discard=tied)
    write_atomically(folder / GENERATION_CONFIG, model.generation_config.to_json_string())
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    config = copy.deepcopy(model.config)
    set_attention(config, kind)
    config.architectures = [kind.architecture]
    config.dtype = model.dtype
    if quantization_config:
        config.quantization_config = quantization_config
    write_atomically(folder / CONFIG, config.to_json_string())


def _check_nothing_is_lost(folder: Path) -> None:
    """A quantized model must not replace the unquantized one, of which it may be the only copy."""
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError):  # without a config that can be read, there is no model
        return
    is_unquantized = isinstance(config, dict) and "quantization_config" not in config
    if is_unquantized and any(file for pattern in ANY_WEIGHTS for file in folder.glob(pattern)):
        raise CheckpointError(
            f"{folder} holds an unquantized model, which the quantized one would replace; save to another folder, or "
            "remove that model first."
        )


def _check_dense(model: LlamaForCausalLM) -> None:
    if not isinstance(model, LlamaForCausalLM):
        raise CheckpointError(f"model is a {type(model).__name__}; save_checkpoint takes a LlamaForCausalLM.")
    if form := packed_form(model):  # dense or packed: without its label it would look like an unquantized baseline
        raise CheckpointError(
            f"The model is quantized as {form.quantization.label}, but save_checkpoint takes unquantized models: "
            "use save_quantized."
        )
    state = model.state_dict()
    shapes = {name: tensor.shape for name, tensor in empty_model(model.config).state_dict().items()}
    for name in sorted(shapes.keys() | state.keys()):
        tensor = state.get(name)
        if tensor is None or tensor.shape != shapes.get(name) or tensor.dtype not in WEIGHT_DTYPES.values():
            raise CheckpointError(f"{name} is not a weight of a dense Llama; save_checkpoint takes unquantized models.")
