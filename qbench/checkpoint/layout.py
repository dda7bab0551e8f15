"""What a checkpoint's folder contains: the config fields, files and tensors of both layouts. Imports no torch.

The layouts are Hugging Face's Llama (`model_type: llama`) and flash-linear-attention's (FLA, mostly
`model_type: transformer`). Both hold the same network under different names.
"""

import math
from pathlib import Path
from typing import Any

from qbench.attention.kinds import Attention, Sizes, attentions
from qbench.errors import InputError, did_you_mean, shown
from qbench.files import read_json as read_any_json

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
GET_AGAIN = "copy it again or `git checkout` it; if it came from the Hub, remove it and run `qbench fetch`"

# Fields of config.json that name an attention, and the field of Attention that lists their values. All must agree.
ATTENTION_FIELDS = {
    "attn_impl": "attn_impl",
    "attn_implementation": "attn_implementation",
    "_attn_implementation": "attn_implementation",
}
# Llama's fields that determine the network's shapes, with transformers' defaults.
LLAMA_SIZES: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,  # num_attention_heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
# Llama's fields that are not used to build a model: they would run code, or are read elsewhere.
LLAMA_DROPPED = {"auto_map", "architectures", "dtype", "torch_dtype", "quantization_config", *ATTENTION_FIELDS}
# Llama's field: its name in the FLA layout, and its default there.
FLA_FIELDS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", 32000),
    "hidden_size": ("hidden_size", 2048),
    "num_hidden_layers": ("num_hidden_layers", 24),
    "num_attention_heads": ("num_heads", 32),
    "num_key_value_heads": ("num_kv_heads", None),
    "head_dim": ("head_dim", None),
    "intermediate_size": ("intermediate_size", None),
    "max_position_embeddings": ("max_position_embeddings", 2048),
    "rms_norm_eps": ("norm_eps", 1e-6),
    "initializer_range": ("initializer_range", 0.006),
    "tie_word_embeddings": ("tie_word_embeddings", False),
    "bos_token_id": ("bos_token_id", 1),
    "eos_token_id": ("eos_token_id", 2),
    "pad_token_id": ("pad_token_id", None),
}
# FLA's fields without an equivalent in Llama, and the values that match what Llama does; the first is the default.
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
# Sizes far above any model's: building one would take hours and all memory before its weights turn out to be missing.
MAX_SIZES = {"num_hidden_layers": 10_000, "head_dim": 2**16}
MAX_SIZE = 2**31 - 1
MAX_NAME_BYTES = 255  # of a file
GATE_PER_HEAD = "headwise_gate"  # FLA's field for a gate that we do not run
# Llama's tensor names to FLA's.
FLA_TENSORS = {
    "model.embed_tokens.": "model.embeddings.",
    ".input_layernorm.": ".attn_norm.",
    ".self_attn.": ".attn.",
    ".post_attention_layernorm.": ".mlp_norm.",
}


class CheckpointError(InputError):
    """A checkpoint that cannot be loaded or saved, explained in a sentence."""


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file of a checkpoint; it must contain an object."""
    if not file.exists():
        raise CheckpointError(f"{file} does not exist; a checkpoint must have it.")
    content = read_any_json(file, CheckpointError)
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} contains a JSON {type(content).__name__}; it must contain an object.")
    return content


# --- config.json; `file` is named in errors


def is_fla(fields: dict[str, Any], file: Path) -> bool:
    """Whether a config.json has the FLA layout; False: the Llama layout."""
    model_type = fields.get("model_type")
    known = list(dict.fromkeys(kind.model_type for kind in attentions().values()))
    if model_type != "llama" and model_type not in known:
        raise CheckpointError(
            f"{file}: model_type is {shown(model_type)}, which is not supported. Evaluate the original and the "
            "quantized model with lm-eval (--log_samples), and compare the outputs with `qbench check RUN BASELINE`. "
            f"Supported: 'llama' (Hugging Face's Llama layout) and {', '.join(map(repr, known))} "
            "(flash-linear-attention's)."
        )
    return model_type != "llama"


def config_attention(fields: dict[str, Any], file: Path, asked: str | None = None) -> Attention:
    """The attention that a config.json specifies; an error if a different one was requested."""
    known = attentions()
    if asked is not None and asked not in known:
        raise CheckpointError(
            f"attention is {asked!r}; it must be None or one of {', '.join(known)}.{did_you_mean(asked, known)}"
        )
    says = _said_of_attention(fields, file)
    _check_gate(fields, file, says)
    fitting = [name for name in known if all(name in meant for meant in says.values())]
    if not fitting:
        meanings = "; ".join(f"{text} means {_any_of(meant)}" for text, meant in says.items())
        raise CheckpointError(
            f"{file}: {' and '.join(says)} contradict each other; they must all mean the same attention: {meanings}."
        )
    kind = known[fitting[0]]
    if asked not in (None, kind.name):
        against = [text for text, meant in says.items() if asked not in meant]
        source = against[0] if against else "no attn_impl or attn_implementation"
        raise CheckpointError(
            f"attention is {asked!r}, but {file} has {source}, so the checkpoint's attention is {kind.name}; write "
            f"{kind.name!r} instead."
        )
    return kind


def config_doubt(fields: dict[str, Any], file: Path, kind: Attention) -> str:
    """A sentence on why a checkpoint's scores may differ from those in training; empty if there is no reason to."""
    value = fields.get("attn_impl")
    doubt = kind.doubts.get(value) if isinstance(value, str) else None
    return f"{file}: attn_impl is {value!r}; {doubt}" if doubt else ""


def _any_of(names: list[str]) -> str:
    """A short list of kinds: gated, or any except gated."""
    others = [name for name in attentions() if name not in names]
    return " or ".join(names) if len(names) <= len(others) else f"any except {' and '.join(others)}"


def _check_gate(fields: dict[str, Any], file: Path, says: dict[str, list[str]]) -> None:
    """Check that a gate is one per element, as the FLA layout must state; a gate per head is not supported."""
    per_head = fields.get(GATE_PER_HEAD)
    for kind in (kind for kind in attentions().values() if kind.gated and kind.fla_flag):
        flag = fields.get(kind.fla_flag or "")
        others = {text: meant for text, meant in says.items() if text.split()[0] != kind.fla_flag}
        named = [text for text, meant in others.items() if meant == [kind.name]]
        is_meant = named and all(kind.name in meant for meant in others.values()) and is_fla(fields, file)
        if per_head in (None, False) and (flag is True or not is_meant):
            continue
        together = f" together with {' and '.join(named)}" if named else ""
        raise CheckpointError(
            f"{file}: {kind.fla_flag} is {flag!r} and {GATE_PER_HEAD} is {per_head!r}{together}; {kind.name} attention "
            "needs true and false: one gate per element. A gate per head is not supported, and other attentions "
            "have no gate."
        )


def _said_of_attention(fields: dict[str, Any], file: Path) -> dict[str, list[str]]:
    """What each field of the config says about its attention, and the kinds that it may mean."""
    says: dict[str, list[str]] = {}
    kinds = attentions().values()
    for name, own in ATTENTION_FIELDS.items():
        value = fields.get(name)
        if value is None:
            continue
        values = {known: kind.name for kind in kinds for known in getattr(kind, own)}
        if not isinstance(value, str) or value not in values:
            near = did_you_mean(value, values)
            raise CheckpointError(f"{file}: {name} is {value!r}; supported: {', '.join(values)}.{near}")
        says[f"{name} {value!r}"] = [values[value]]
    for flag in (kind.fla_flag for kind in kinds if kind.fla_flag):
        value = fields.get(flag)
        if value is None:
            continue
        names = [kind.name for kind in kinds if kind.fla_flag == flag]
        if not isinstance(value, bool):
            raise CheckpointError(
                f"{file}: {flag} is {value!r}; it must be true for {' or '.join(names)} attention, and false or left "
                "out for others."
            )
        says[f"{flag} {value!r}"] = names if value else [name for name in attentions() if name not in names]
    architectures = fields.get("architectures")
    if isinstance(architectures, list):
        # transformers' LlamaForCausalLM says nothing: other tools write it for any attention.
        ours = [kind.name for kind in kinds if not kind.is_softmax and kind.architecture in architectures]
        meant = ours or [kind.name for kind in kinds if kind.fla_architecture in architectures]
        says |= {f"architectures {architectures!r}": meant} if meant else {}
    if is_fla(fields, file):
        model_type = fields["model_type"]
        says[f"model_type {model_type!r}"] = [kind.name for kind in kinds if kind.model_type == model_type]
    return says


def llama_fields(fields: dict[str, Any], file: Path) -> dict[str, Any]:
    """The fields of a config.json of either layout by Llama's names, only those that describe the network."""
    if is_fla(fields, file):
        return _from_fla(fields, file)
    return {name: value for name, value in fields.items() if name not in LLAMA_DROPPED}


def _from_fla(fields: dict[str, Any], file: Path) -> dict[str, Any]:
    for name, supported in FLA_FIXED.items():
        if (value := fields.get(name, supported[0])) not in supported:
            raise CheckpointError(f"{file}: {name} is {value!r}; supported: {', '.join(map(repr, supported))}.")
    llama = {ours: fields.get(theirs, default) for ours, (theirs, default) in FLA_FIELDS.items()}
    ratio = fields.get("hidden_ratio")
    theta, ratio, hidden = fields.get("rope_theta", 1e4), 4 if ratio is None else ratio, llama["hidden_size"]
    for name, value in (("rope_theta", theta), ("hidden_ratio", ratio), ("hidden_size", hidden)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise CheckpointError(f"{file}: {name} is {value!r}; it must be a positive number.")
    llama["rope_parameters"] = {"rope_type": "default", "rope_theta": float(theta)}
    if llama["intermediate_size"] is None:  # two thirds of hidden_ratio times the hidden size, in steps of 256
        llama["intermediate_size"] = (int(hidden * ratio * 2 / 3) + 255) // 256 * 256
    return llama


def config_sizes(fields: dict[str, Any], file: Path) -> Sizes:
    """The sizes in a config.json of either layout, which must be positive and divide."""
    llama = LLAMA_SIZES | llama_fields(fields, file)
    names = {ours: theirs for ours, (theirs, _) in FLA_FIELDS.items()} if is_fla(fields, file) else {}

    def size(field: str, default: int | None = None) -> int:
        value = default if llama[field] is None else llama[field]
        most = MAX_SIZES.get(field, MAX_SIZE)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            wanted = f"at most {most:,}" if type(value) is int and value > most else "a positive integer"
            raise CheckpointError(f"{file}: {names.get(field, field)} is {shown(value)}; it must be {wanted}.")
        return value

    def flag(field: str) -> bool:
        value = llama[field]
        if not isinstance(value, bool):
            raise CheckpointError(f"{file}: {names.get(field, field)} is {shown(value)}; it must be true or false.")
        return value

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
        raise CheckpointError(f"{file}: {kv_name} {kv_heads} must divide {heads_name} {heads}.")
    return Sizes(
        vocab_size=size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=size("intermediate_size"),
        num_hidden_layers=size("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        max_position_embeddings=size("max_position_embeddings"),
        tie_word_embeddings=flag("tie_word_embeddings"),
        attention_bias=flag("attention_bias"),
        mlp_bias=flag("mlp_bias"),
    )


# --- Tensors


def tensor_shapes(sizes: Sizes, attention: Attention) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a checkpoint, by Llama's names; a tied lm_head is not counted."""
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    q, kv = sizes.num_attention_heads * sizes.head_dim, sizes.num_key_value_heads * sizes.head_dim
    q_rows = 2 * q if attention.gated else q
    projections = {
        "self_attn": {
            "q_proj": (q_rows, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, q),
        },
        "mlp": {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)},
    }
    biased = {"self_attn": sizes.attention_bias, "mlp": sizes.mlp_bias}
    norms = ("input_layernorm", "post_attention_layernorm")
    layer: dict[str, tuple[int, ...]] = {f"{norm}.weight": (hidden,) for norm in norms}
    for part, linears in projections.items():
        layer |= {f"{part}.{name}.weight": shape for name, shape in linears.items()}
        if biased[part]:
            layer |= {f"{part}.{name}.bias": shape[:1] for name, shape in linears.items()}
    layer |= {f"self_attn.{name}": shape for name, shape in attention.extra_shapes(sizes).items()}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (sizes.vocab_size, hidden)}
    for number in range(sizes.num_hidden_layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not sizes.tie_word_embeddings:
        shapes["lm_head.weight"] = (sizes.vocab_size, hidden)
    return shapes


def parameter_count(config: Path, attention: str | None = None) -> int:
    """How many parameters the network of a config.json has; attention: as `load_checkpoint` takes it."""
    fields = read_json(config)
    shapes = tensor_shapes(config_sizes(fields, config), config_attention(fields, config, attention))
    return sum(map(math.prod, shapes.values()))


def config_note(config: Path, attention: str | None) -> str:
    """What is wrong or doubtful about running a config.json; empty if nothing is. attention: what it must have."""
    try:
        fields = read_json(config)
        config_sizes(fields, config)
        return config_doubt(fields, config, config_attention(fields, config, attention))
    except CheckpointError as error:
        return str(error)


def fla_name(name: str) -> str:
    """What the FLA layout calls a tensor of Llama."""
    for ours, theirs in FLA_TENSORS.items():
        name = name.replace(ours, theirs)
    return name


def weight_files(folder: Path) -> list[Path]:
    """The files with a checkpoint's tensors: a single one, or the shards that its index names."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    index = folder / INDEX
    if not index.exists():
        pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
        found = f"only {', '.join(pickles)}; pickle files are never loaded" if pickles else "no safetensors weights"
        raise CheckpointError(
            f"{folder} has {found}: it must have {WEIGHTS}, or {INDEX} with its shards; convert it to safetensors."
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is {shown(weight_map)}; it must map each tensor to its file.")
    for name in weight_map.values():
        if not isinstance(name, str) or not _is_name(name):
            raise CheckpointError(
                f"{index}: weight_map names {shown(name)}; it must be the name of a file in the same folder."
            )
        if not (folder / name).is_file():
            raise CheckpointError(f"{index} names the shard {name}, but the folder does not contain it; {GET_AGAIN}.")
    return [folder / name for name in sorted(set(weight_map.values()))]


def _is_name(name: str) -> bool:
    """Whether a string is the name of a file, which cannot lead to another folder. The Hub's cache has links."""
    return Path(name).name == name and "\0" not in name and len(name.encode()) <= MAX_NAME_BYTES
