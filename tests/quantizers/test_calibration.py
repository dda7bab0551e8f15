"""Calibration sources: what is drawn, what the hash depends on, and the errors for files that cannot be read."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from qbench.quantizers import calibration
from qbench.quantizers.calibration import Calibration, calibration_batches, token_ids
from qbench.quantizers.options import QuantizeError

from . import tiny

WORDS = 500


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word: w7 is 7."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """w0 w1 … w499 in a text file: a window's ids count up from where it starts."""
    path = tmp_path / "words.txt"
    path.write_text(" ".join(f"w{i}" for i in range(WORDS)))
    return path


def source(path: Path, **settings: object) -> Calibration:
    return Calibration(source=str(path), **({"samples": 4, "length": 20} | settings))


def test_samples_are_windows_of_the_text(text: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    batches = calibration_batches(source(text, samples=20, length=25), tokenizer)
    assert len(batches) == 20
    assert all(ids.dtype == torch.int64 and ids.shape == (1, 25) for ids in batches)
    starts = [int(ids[0, 0]) for ids in batches]
    assert all(torch.equal(ids[0], torch.arange(s, s + 25)) for ids, s in zip(batches, starts, strict=True))
    assert len(set(starts)) > 15


def test_the_seed_and_nothing_else_decides_the_draw(text: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(1)
    first = torch.cat(calibration_batches(source(text), tokenizer))
    torch.manual_seed(2)
    assert torch.equal(first, torch.cat(calibration_batches(source(text), tokenizer)))
    assert not torch.equal(first, torch.cat(calibration_batches(source(text, seed=1), tokenizer)))


def test_length_is_cut_to_what_the_model_takes(text: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    assert calibration_batches(source(text, length=100), tokenizer, max_length=32)[0].shape == (1, 32)


def test_the_whole_text_can_be_asked_for(text: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (ids,) = calibration_batches(source(text, samples=1, length=WORDS), tokenizer)
    assert torch.equal(ids[0], torch.arange(WORDS))


def test_jsonl_documents_are_joined_in_order(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "pages.jsonl"
    rows = [{"page": f"w{i} w{i + 1}", "n": i} for i in range(0, 40, 2)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (ids,) = calibration_batches(source(path, samples=1, length=40, field="page"), tokenizer)
    assert torch.equal(ids[0], torch.arange(40))


def test_a_line_separator_within_a_document_does_not_end_it(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "pages.jsonl"
    path.write_text(json.dumps({"text": "w1\u2028w2"}, ensure_ascii=False), encoding="utf-8")
    assert calibration_batches(source(path, samples=1, length=2), tokenizer)[0].tolist() == [[1, 2]]


def test_no_more_is_read_than_is_of_use(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "READ_CHARACTERS", 100)
    path = tmp_path / "pages.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"w{i} " * 50}) for i in range(400)))
    drawn = torch.cat(calibration_batches(source(path, samples=8, length=2), tokenizer))
    assert drawn.max() < 64 * 16 / 150 + 1  # of 400 documents with 150 or more characters each


# --- several draws ---------------------------------------------------------------------------------------------------


def test_draws_are_disjoint_windows_of_all_of_the_text(text: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    asked = source(text, samples=4, length=20, seeds=5)  # 400 of 500 tokens
    assert asked.draws == (1, 2, 3, 4, 5)
    draws = [calibration_batches(asked, tokenizer, draw=draw) for draw in asked.draws]
    assert all(len(draw) == 4 and ids.shape == (1, 20) for draw in draws for ids in draw)
    drawn = torch.cat([ids.flatten() for draw in draws for ids in draw]).tolist()
    assert len(set(drawn)) == len(drawn) == 400  # a token that two windows share would be there twice
    assert all(torch.equal(ids[0], torch.arange(int(ids[0, 0]), int(ids[0, 0]) + 20)) for own in draws for ids in own)
    means = [torch.cat(draw).float().mean() for draw in draws]
    assert max(means) - min(means) < 300  # each draw is from all over the text: parts in order would be 400 apart


def test_more_draws_leave_the_first_ones_as_they_are(text: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    few, more = (source(text, seeds=seeds) for seeds in (2, 6))
    for draw in (1, 2):
        assert torch.equal(*(torch.cat(calibration_batches(s, tokenizer, draw=draw)) for s in (few, more)))
        assert few.content_hash(draw) == more.content_hash(draw)


def test_the_seed_decides_all_draws(text: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    first, again, other = (source(text, seeds=3, seed=seed) for seed in (0, 0, 1))
    drawn = [torch.cat(calibration_batches(s, tokenizer, draw=2)) for s in (first, again, other)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_one_draw_is_drawn_and_hashed_as_ever(text: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    one = source(text, seeds=1)
    assert one.draws == (None,)
    assert [int(ids[0, 0]) for ids in calibration_batches(one, tokenizer)] == [432, 197, 388, 455]
    settings = {"field": "text", "length": 20, "revision": None, "samples": 4, "seed": 0, "split": "train"}
    content = [settings | {"subset": None}, hashlib.sha256(text.read_bytes()).hexdigest()]
    assert one.content_hash() == hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    assert len({one.content_hash(), *(source(text, seeds=3).content_hash(draw) for draw in (1, 2, 3))}) == 4


@pytest.mark.parametrize(("seeds", "enough"), [(6, True), (7, False)])
def test_a_text_too_short_for_all_draws_is_an_error(
    text: Path, tokenizer: PreTrainedTokenizerFast, seeds: int, enough: bool
) -> None:
    asked = source(text, samples=4, length=20, seeds=seeds)  # 480 or 560 of 500 tokens
    if enough:
        assert len(calibration_batches(asked, tokenizer, draw=seeds)) == 4
        return
    with pytest.raises(QuantizeError, match=r"500 tokens.*7 draws of 4 samples of 20 tokens.*560.*seeds"):
        calibration_batches(asked, tokenizer, draw=1)  # though the first draw alone would fit


# --- the hash --------------------------------------------------------------------------------------------------------


def test_the_hash_is_of_the_text_and_the_settings(text: Path, tmp_path: Path) -> None:
    first = source(text).content_hash()
    moved = tmp_path / "elsewhere.txt"
    moved.write_bytes(text.read_bytes())
    assert source(moved).content_hash() == first
    others = [source(text, **{name: 7}) for name in ("samples", "length", "seed")]
    moved.write_text("other")
    hashes = {first, source(moved).content_hash(), *(other.content_hash() for other in others)}
    assert len(hashes) == 5


def test_a_hub_datasets_hash_is_its_commit_and_needs_no_network() -> None:
    wikitext, c4 = Calibration(source="wikitext2"), Calibration(source="c4")
    by_hand = {"source": "Salesforce/wikitext", "subset": "wikitext-2-raw-v1"}
    hashes = [s.content_hash() for s in (wikitext, c4, *(Calibration(**by_hand, revision=r) for r in "ab"))]
    assert len(set(hashes)) == 4
    assert Calibration(source="wikitext2").content_hash() == hashes[0]


def test_plans_do_not_import_torch() -> None:
    code = (
        "import sys, qbench.quantizers.calibration as c; c.Calibration(source='c4').content_hash(); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not {"torch", "transformers", "datasets"} & set(done.stdout.split())


# --- a source without ids: the model's tokenizer ---------------------------------------------------------------------


def test_a_source_is_read_with_the_models_tokenizer(
    text: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = LlamaForCausalLM(tiny.config(num_hidden_layers=1, vocab_size=512, max_position_embeddings=16))
    model.config.name_or_path = str(tmp_path / "model")
    with pytest.raises(QuantizeError, match=r"tokenizer.*calibration_batches\(source, tokenizer\)"):
        token_ids(source(text), model)
    tokenizer.save_pretrained(tmp_path / "model")
    ids = token_ids(source(text), model)
    assert [tuple(i.shape) for i in ids] == [(1, 16)] * 4  # the model takes 16


def test_a_source_is_named_as_the_recipe_names_it(
    text: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = LlamaForCausalLM(tiny.config(num_hidden_layers=1, vocab_size=512, max_position_embeddings=2))
    model.config.name_or_path = str(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    by_name = torch.cat(list(token_ids(Calibration(source=str(text)), model)))
    assert by_name.shape == (128, 2)
    for same in (str(text), text, {"source": str(text)}):
        assert torch.equal(torch.cat(list(token_ids(same, model))), by_name)
    assert len(token_ids({"source": str(text), "samples": 3}, model)) == 3


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (None, r"token-id tensors \[1, length\], or a calibration source\.$"),
        ([], "alibration.*empty"),
        (torch.ones(8, 48, dtype=torch.long), r"one tensor.*\[8, 48\].*split\(1\)"),
        (torch.ones(1, 48, dtype=torch.long), r"one tensor.*\[1, 48\].*split\(LENGTH, dim=1\)"),
        (7, "alibration.* int"),
        ([[1, 2, 3]], r"sample 0.*list.*tensor \[1, length\]"),
        ([torch.ones(1, 8)], "sample 0.*torch.float32.*whole numbers"),
        ([torch.ones(1, 8, dtype=torch.bool)], "sample 0.*torch.bool.*whole numbers"),
        (
            [torch.ones(1, 8, dtype=torch.long), torch.ones(8, dtype=torch.long)],
            r"sample 1.*torch.int64.*\[8\].*\[1, length\]",
        ),
        ([torch.full((1, 8), 999)], "sample 0.*999"),
        ("wikitext3", "calibration source.*'wikitext3'.*file"),
        ({"source": "c4", "samples": 0}, "samples.*0.*1 or more"),
        ({"source": "c4", "smaples": 8}, "smaples.*Did you mean samples"),
        ({"samples": 8}, "source.*missing"),
        ({1: 8}, "fields.*1.*names"),
    ],
)
def test_wrong_calibration_is_a_sentence(wrong: object, match: str) -> None:
    with pytest.raises(QuantizeError, match=match):
        token_ids(wrong, LlamaForCausalLM(tiny.config(num_hidden_layers=1)))


def test_token_ids_of_any_whole_type_are_taken() -> None:
    (ids,) = token_ids([torch.ones(1, 8, dtype=torch.uint8)], LlamaForCausalLM(tiny.config(num_hidden_layers=1)))
    assert ids.dtype == torch.int64


# --- what cannot be read ---------------------------------------------------------------------------------------------


def refuse(match: str, calibration: Calibration, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(QuantizeError, match=match):
        calibration_batches(calibration, tokenizer)


def test_text_too_short_says_how_many_tokens_there_are_and_are_needed(
    text: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    refuse(r"words\.txt.*500 tokens.*30 samples of 20 tokens.*600", source(text, samples=30), tokenizer)


def test_files_that_hold_no_text(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    for name, content in {"empty.txt": b"", "blank.txt": b" \n\n", "empty.jsonl": b"\n"}.items():
        (tmp_path / name).write_bytes(content)
        refuse(rf"{name}.*empty", source(tmp_path / name), tokenizer)
    (tmp_path / "bytes.txt").write_bytes(b"w1 w2 \xff\xfe")
    refuse(r"bytes\.txt.*UTF-8.*byte 6", source(tmp_path / "bytes.txt"), tokenizer)
    refuse(r"missing\.txt.*No such file", source(tmp_path / "missing.txt"), tokenizer)
    refuse("Is a directory", source(tmp_path), tokenizer)
    with pytest.raises(QuantizeError, match=r"missing\.txt"):
        source(tmp_path / "missing.txt").content_hash()


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ('{"body": "w1"}', r"pages\.jsonl, line 2: .*'text'.*body"),
        ("[1, 2]", r"line 2: .*'text'.*object"),
        ('{"text": 3}', r"line 2: .*'text'.*3.*string"),
        ('{"text": "w1', r"line 2.*not JSON"),
    ],
)
def test_a_bad_line_is_named(line: str, match: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "pages.jsonl"
    path.write_text('{"text": "w1 w2"}\n' + line)
    refuse(match, source(path), tokenizer)


def test_a_hub_dataset_that_is_not_cached_says_what_is_missing(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    def offline(**arguments: object) -> None:
        raise ConnectionError(f"Couldn't reach {arguments['path']} (offline mode).")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    match = r"Salesforce/wikitext wikitext-2-raw-v1 \(train, revision b08601e.*Hugging Face cache"
    refuse(match, Calibration(source="wikitext2"), tokenizer)
    refuse(
        r"allenai/c4 en/c4-train.00000-of-01024.json.gz .*local file.*qbench fetch", Calibration(source="c4"), tokenizer
    )


def test_a_hub_dataset_gives_its_documents(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": [f"w{i}" for i in range(100)]})
    asked: dict[str, object] = {}
    monkeypatch.setattr(datasets, "load_dataset", lambda **arguments: asked.update(arguments) or rows)
    (ids,) = calibration_batches(Calibration(source="wikitext2", samples=1, length=100), tokenizer)
    assert torch.equal(ids[0], torch.arange(100))
    assert asked == {**calibration.NAMED["wikitext2"], "split": "train"}
    match = r"wikitext2.*'body'.*text"
    refuse(match, Calibration(source="wikitext2", samples=1, length=10, field="body"), tokenizer)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"source": "wikitext3"}, "'wikitext3'.*wikitext2 or c4.*.jsonl.*owner/name.*revision"),
        ({"source": "owner/name"}, "revision"),
        ({"source": "c4", "subset": "de"}, "c4.*subset.*revision"),
        ({"source": "c4", "samples": 0}, "greater than or equal to 1"),
        ({"source": "c4", "sampels": 3}, "sampels"),
    ],
)
def test_settings_are_checked_when_they_are_read(settings: dict[str, object], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        Calibration(**settings)
