"""A tokenizer and tiny models that the evaluation tests share; nothing is downloaded."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from qbench import load_checkpoint, save_checkpoint
from qbench.attention.register import register_all
from qbench.evaluate.passkey import FILLER, HIDDEN, INTRODUCTION, QUESTION

from ..made_up_texts import write_texts

SENTENCES = [
    "Question: Which animal eats only plants?\nAnswer: a cow",
    "The river ran over its banks after three days of rain, and nobody in the town had slept.",
    "She put the letter back into its envelope and looked at him across the table.",
    "Photosynthesis turns the energy of sunlight into sugar, which feeds nearly all living things.",
    " = Lobster = \n \n The lobster lives in the Atlantic Ocean and may grow to 60 centimetres .",
]


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Documents of three tasks of lm-eval, as files."""
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="session")
def tokenizer(texts: dict[str, Path]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with BOS and EOS, like GPT-2's."""
    questions = [json.loads(line)["question"] for line in texts["arc_easy"].read_text().splitlines()]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([*SENTENCES, *questions, *[f"{INTRODUCTION} {FILLER} {HIDDEN} {QUESTION}"] * 4], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def checkpoints(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint with its tokenizer for each kind of attention; weights large enough for clear preferences."""
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 8,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.15 if "lm_head" not in name else 0.3)
    folders = {}
    register_all()
    for kind, implementation in (("softmax", "sdpa"), ("softpick", "softpick")):
        folders[kind] = tmp_path_factory.mktemp(kind)
        model.set_attn_implementation(implementation)
        save_checkpoint(model, folders[kind], tokenizer)
    return folders


@pytest.fixture(scope="session", params=["softmax", "softpick"])
def model(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> LlamaForCausalLM:
    return load_checkpoint(checkpoints[request.param], attention=request.param)


@pytest.fixture(scope="session")
def softmax_model(checkpoints: dict[str, Path]) -> LlamaForCausalLM:
    return load_checkpoint(checkpoints["softmax"])
