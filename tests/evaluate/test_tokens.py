"""Token ids on disk: what the model's tokenization gives, faster, and never from a damaged file."""

import multiprocessing
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.model import TemplateLM
from transformers import PreTrainedTokenizerFast

from qbench.evaluate.tokens import TokenCache

PAIRS = [("Question: why?\nAnswer:", " because"), ("Trailing space ", "moves"), ("é 中", " ∑\n"), ("a", " b c d")]


class Tokenizing(TemplateLM):
    """The part of a model that tokenizes; it counts how often."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, add_bos: bool = False) -> None:
        super().__init__()
        self.tokenizer, self.add_bos, self.calls = tokenizer, add_bos, 0

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        self.calls += 1
        ids = self.tokenizer.encode(string, add_special_tokens=False)
        return [self.tokenizer.bos_token_id, *ids] if self.add_bos and add_special_tokens is not False else ids

    def _loglikelihood_tokens(self, *_: Any, **__: Any) -> Any: ...
    def loglikelihood_rolling(self, *_: Any, **__: Any) -> Any: ...
    def generate_until(self, *_: Any, **__: Any) -> Any: ...


@pytest.fixture
def lm(tokenizer: PreTrainedTokenizerFast) -> Tokenizing:
    return Tokenizing(tokenizer)


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_ids_are_the_models_own_and_come_from_disk_the_second_time(lm: Tokenizing, tmp_path: Path) -> None:
    expected = [lm._encode_pair(*pair) for pair in PAIRS]
    texts = [" a page\n", "", "another"]
    assert TokenCache(tmp_path).encode_pairs(lm, PAIRS) == expected
    assert TokenCache(tmp_path).encode_texts(lm, texts) == [lm.tok_encode(text) for text in texts]
    before = lm.calls
    TokenCache(tmp_path).encode_pairs(lm, [("a", "b")])
    small = lm.calls - before  # what the tokenizer's fingerprint costs, and one pair
    lm.tokenizer("a b c", truncation=True, max_length=2)  # leaves its settings behind in the tokenizer
    before = lm.calls
    again = TokenCache(tmp_path).encode_pairs(lm, PAIRS)
    assert lm.calls - before == small - 2
    assert again == expected
    assert isinstance(again[0], tuple)
    assert type(again[0][0][0]) is int
    assert TokenCache(tmp_path / "none").encode_pairs(lm, []) == []


def test_another_tokenizer_text_or_option_is_another_file(
    lm: Tokenizing, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    cache = TokenCache(tmp_path)
    with_bos = Tokenizing(tokenizer, add_bos=True)
    plain, special = cache.encode_texts(lm, ["a b"]), cache.encode_texts(with_bos, ["a b"])
    assert special == [[tokenizer.bos_token_id, *plain[0]]]
    assert cache.encode_texts(with_bos, ["a b"], add_special_tokens=False) == plain
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>", eos_token="</s>")
    other.add_tokens(["a b"])
    assert cache.encode_texts(Tokenizing(other), ["a b"]) == [[len(tokenizer)]]
    cache.encode_texts(lm, ["a b "])
    assert cache.encode_texts(lm, ["ab", "c"]) != cache.encode_texts(lm, ["a", "bc"])
    assert len(files(tmp_path)) == 7


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "swap"])
def test_a_damaged_file_is_computed_again(
    damage: str, lm: Tokenizing, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = TokenCache(tmp_path)
    expected = cache.encode_pairs(lm, PAIRS)
    (file,) = files(tmp_path)
    good = file.read_bytes()
    if damage == "swap":  # a whole file under another one's name
        cache.encode_pairs(lm, PAIRS[::-1])
        (other,) = set(files(tmp_path)) - {file}
        other.replace(file)
    else:
        file.write_bytes({"flip": good[:-1] + bytes([good[-1] ^ 1]), "cut": good[:-7], "empty": b""}[damage])
    assert cache.encode_pairs(lm, PAIRS) == expected
    assert "computed again" in caplog.text
    assert file.read_bytes() == good


def test_a_folder_that_cannot_be_written_costs_time_only(
    lm: Tokenizing, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert TokenCache(tmp_path / "file").encode_pairs(lm, PAIRS) == [lm._encode_pair(*pair) for pair in PAIRS]
    assert "cannot be kept" in caplog.text


TEXTS = [f"{number} words" for number in range(500)]


def encode_on_a_full_disk(folder: Path, lm: Tokenizing, expected: list[list[int]]) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    assert TokenCache(folder).encode_texts(lm, TEXTS) == expected


def encode_often(file: Path, lm: Tokenizing, expected: list[list[int]]) -> None:
    for _ in range(10):
        file.unlink(missing_ok=True)
        assert TokenCache(file.parent).encode_texts(lm, TEXTS) == expected


def run_in_processes(count: int, target: Callable[..., None], *arguments: Any) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=target, args=arguments) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * count


def test_a_disk_that_is_full_midway_leaves_no_part_of_a_file(lm: Tokenizing, tmp_path: Path) -> None:
    run_in_processes(1, encode_on_a_full_disk, tmp_path, lm, [lm.tok_encode(text) for text in TEXTS])
    assert files(tmp_path) == []


def test_processes_may_write_the_same_file_at_once(lm: Tokenizing, tmp_path: Path) -> None:
    expected = TokenCache(tmp_path).encode_texts(lm, TEXTS)
    (file,) = files(tmp_path)
    run_in_processes(3, encode_often, file, lm, expected)
    assert files(tmp_path) == [file]


def test_reading_is_faster_than_tokenizing(lm: Tokenizing, tmp_path: Path) -> None:
    pairs = [(f"Question: what is {i} and {i + 1} together, in words?\nAnswer:", f" number {i}") for i in range(3000)]
    start = time.process_time()
    first = TokenCache(tmp_path).encode_pairs(lm, pairs)
    computed = time.process_time() - start
    read = []
    for _ in range(3):  # take the best: a busy machine may slow down any of them
        start = time.process_time()
        assert TokenCache(tmp_path).encode_pairs(lm, pairs) == first
        read.append(time.process_time() - start)
    assert min(read) < computed / 3
