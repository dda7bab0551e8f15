"""The tokenizer follows its tokenizer.json, with the special tokens and templates that HFLM would have."""

import json
import random
from pathlib import Path

import pytest
from jinja2.exceptions import SecurityError
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from qbench.tokenizer import TokenizerError, check_tokenizer, load_tokenizer

MINI = Path(__file__).parents[1] / "recipes" / "mini" / "softmax"
WORDS = ["Robert", "Boulter", "is", "an", "English", "actor", ",", "=", "@-@", "2", "000", "3.14", "naïve", "中文", "é"]
WORDS += ["<s>", "</s>", "\t", "\n"]
BYTES = [f"<0x{n:02X}>" for n in range(256)]
SPECIAL = ["<unk>", "<s>", "</s>"]
CONFIG = {  # Llama-2's
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "normalized": False, "rstrip": False},
    "clean_up_tokenization_spaces": False,
    "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": False, "rstrip": False},
    "legacy": False,
    "model_max_length": 1000000000000000019884624838656,
    "pad_token": None,
    "sp_model_kwargs": {},
    "tokenizer_class": "LlamaTokenizer",
    "unk_token": {"__type": "AddedToken", "content": "<unk>", "lstrip": False, "normalized": False, "rstrip": False},
}
TEMPLATE = "{{ bos_token }}{% for m in messages %}[INST] {{ m['content'] }} [/INST]{{ eos_token }}{% endfor %}"
CONFIGS = {
    "as Llama-2's": CONFIG,
    "with a chat template": CONFIG | {"chat_template": TEMPLATE},
    "without bos and eos": CONFIG | {"add_bos_token": False, "bos_token": None, "eos_token": None},
    "with a pad token": CONFIG | {"pad_token": "</s>", "add_eos_token": True},
    "of the older class": CONFIG | {"tokenizer_class": "LlamaTokenizerFast"},
    "with a class alone": {"tokenizer_class": "LlamaTokenizer"},
    "of no class": {"bos_token": "<s>", "eos_token": "</s>"},
    "missing": None,
}


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    """A tokenizer like Llama-2's: BPE with byte fallback; only the normalizer handles spaces."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    # Words by themselves for training; Llama's file has no pre-tokenizer.
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=[*SPECIAL, *BYTES], show_progress=False)
    text = "Robert Boulter is an English film , television and theatre actor . = Robert = naive"
    tokenizer.train_from_iterator([text, text.lower(), "   "], trainer)
    trained = json.loads(tokenizer.to_str())
    trained["added_tokens"] = []  # the bytes are plain tokens
    tokenizer = Tokenizer.from_str(json.dumps(trained))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def written(bpe: Tokenizer, folder: Path, config: dict | None) -> Path:
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def texts(count: int = 1000) -> list[str]:
    """Texts with no, one or more spaces before, between and after their words."""
    draw = random.Random(0)
    spaces = ["", " ", " ", " ", "  ", "   "]
    found = [" = Robert", "  Robert", "Robert ", "", " ", "\n = Robert = \n"]
    while len(found) < count:
        words = [draw.choice(WORDS) + draw.choice(spaces) for _ in range(draw.randrange(1, 9))]
        found.append(draw.choice(spaces) + "".join(words))
    return found


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_ids_are_those_of_the_file(bpe: Tokenizer, tmp_path: Path, config: dict | None) -> None:
    ours = load_tokenizer(written(bpe, tmp_path, config))
    raw = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in texts():
        for special in (True, False):
            assert ours.encode(text, add_special_tokens=special) == raw.encode(text, add_special_tokens=special).ids


def test_transformers_own_tokenizer_moves_texts_that_begin_with_a_space(bpe: Tokenizer, tmp_path: Path) -> None:
    """If this fails, transformers loads the file unchanged again, and load_tokenizer is no longer needed."""
    theirs = AutoTokenizer.from_pretrained(written(bpe, tmp_path, CONFIG))
    raw = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs.encode(" = Robert") != raw.encode(" = Robert").ids
    assert theirs.encode("= Robert") == raw.encode("= Robert").ids


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_special_tokens_and_templates_are_what_hflm_would_have(
    bpe: Tokenizer, tmp_path: Path, config: dict | None
) -> None:
    ours = load_tokenizer(written(bpe, tmp_path, config))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert facts(ours) == facts(theirs)
    saved = tmp_path / "saved"
    ours.save_pretrained(saved)
    (saved / "config.json").write_text(json.dumps({"model_type": "llama"}))
    again = load_tokenizer(saved)
    assert facts(again) == facts(ours)
    assert again.encode("  = Robert  ") == ours.encode("  = Robert  ")


def facts(tokenizer: PreTrainedTokenizerBase) -> dict:
    """What HFLM reads from a tokenizer besides the ids of texts."""
    chat = [{"role": "user", "content": "Robert"}]
    return {
        "special": tokenizer.special_tokens_map,
        "ids": (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id),
        "added": (tokenizer.encode("Robert"), tokenizer.encode("Robert", add_special_tokens=False)),
        "decoded": tokenizer.decode(tokenizer.encode("Robert is an actor"), skip_special_tokens=True),
        "length": (len(tokenizer), tokenizer.vocab_size, tokenizer.model_max_length),
        "chat": tokenizer.apply_chat_template(chat, tokenize=False) if tokenizer.chat_template else None,
    }


def test_minis_ids_are_the_same_as_ever() -> None:
    ours, theirs = load_tokenizer(MINI), AutoTokenizer.from_pretrained(MINI)
    raw = Tokenizer.from_file(str(MINI / "tokenizer.json"))
    for text in texts(200):
        assert ours.encode(text) == theirs.encode(text) == raw.encode(text).ids


def test_a_folder_without_a_tokenizer_json_is_transformers_business(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    assert load_tokenizer(tmp_path).encode("ab") == [3]


# --- Tokenizers that cannot be used


def copied(folder: Path, **changes: object) -> Path:
    """Mini's tokenizer, with fields of tokenizer_config.json changed."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (folder / name).write_bytes((MINI / name).read_bytes())
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return folder


@pytest.mark.parametrize(
    ("name", "content", "facts"),
    [
        ("tokenizer.json", "{}", "model"),
        ("tokenizer.json", '{"model": {"type": "BPE"}}', "tokenizer"),
        ("tokenizer.json", "[" * 100_000, "levels deep"),
        ("tokenizer_config.json", "[]", "object"),
        ("tokenizer_config.json", '{"bos_token": {"a": 1}}', "tokenizer"),
        ("special_tokens_map.json", "nonsense", "JSON"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str, facts: str) -> None:
    (copied(tmp_path) / name).write_text(content)
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert facts in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_with_neither_bos_nor_eos(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(copied(tmp_path))
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(TokenizerError, match="neither a BOS nor an EOS"):
        check_tokenizer(tokenizer, 10**6, tmp_path)


def test_a_vocabulary_larger_than_the_models() -> None:
    tokenizer = load_tokenizer(MINI)
    check_tokenizer(tokenizer, len(tokenizer), MINI)
    with pytest.raises(TokenizerError, match=str(len(tokenizer) - 1)):
        check_tokenizer(tokenizer, len(tokenizer) - 1, MINI)


def test_code_and_templates_of_a_folder_cannot_act(tmp_path: Path) -> None:
    attack = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    (tmp_path / "evil.py").write_text("raise SystemExit('this code was run')")
    folder = copied(tmp_path, chat_template=attack, auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]})
    with pytest.raises(SecurityError):
        load_tokenizer(folder).apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
