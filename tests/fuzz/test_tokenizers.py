"""Damaged and forged tokenizers: loading gives a tokenizer that works, or a sentence."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from qbench import tokenizer as ours
from qbench.errors import InputError

from .mutate_files import failures, mutate_bytes, mutate_json


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    made.train_from_iterator(["It is 42 ? Is it 42 ?"], trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
    config |= {
        "chat_template": "{{ messages }}",
        "model_max_length": 1000,
        "auto_map": {"AutoTokenizer": ["a.B", None]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>", "lstrip": False}}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 100}))
    return folder


def one(whole: Path, work: Path) -> Callable[[random.Random], str]:
    def run(draw: random.Random) -> str:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(whole, work)
        file = draw.choice(sorted(work.iterdir()))
        mutate = mutate_bytes if draw.random() < 0.2 else lambda draw, text: mutate_json(draw, text.decode())
        file.write_bytes(mutate(draw, file.read_bytes()))
        try:
            tokenizer = ours.load_tokenizer(work)
            ours.check_tokenizer(tokenizer, 100, work)
            tokenizer("Is it 42?")
        except InputError as error:
            return "" if str(work) in str(error) and "\n" not in str(error) else f"no file, or several lines: {error}"
        except BaseException as error:
            return f"{file.name}: {type(error).__name__}: {str(error)[:200]}"
        return ""

    return run


def test_a_sample_of_damaged_tokenizers(whole: Path, tmp_path: Path) -> None:
    assert failures(range(15), one(whole, tmp_path / "work")) == []


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_damaged_tokenizers(whole: Path, tmp_path: Path) -> None:
    assert failures(range(15, 165), one(whole, tmp_path / "work")) == []
