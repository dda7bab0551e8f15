"""The unquantized model's hidden states on disk: the same bits, and only those of the same model and tokens."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from qbench import Scorer, load_checkpoint
from qbench.evaluate import state_cache
from qbench.evaluate.divergence import keep_reference
from qbench.evaluate.forward import States
from qbench.evaluate.state_cache import StateCache

from .test_divergence import PAGES, requests_of, scorer


@pytest.fixture
def lm(checkpoints: dict[str, Path], tokenizer: PreTrainedTokenizerFast) -> Scorer:
    return scorer(load_checkpoint(checkpoints["softmax"]), tokenizer)


class Counting:
    """How often a model runs."""

    def __init__(self, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs = 0
        forward = model.model.forward

        def counted(*args: Any, **options: Any) -> Any:
            self.runs += 1
            return forward(*args, **options)

        monkeypatch.setattr(model.model, "forward", counted)


def reference(lm: Scorer, folder: Path, model: str = "a", pages: list[str] = PAGES, save: bool = True) -> Any:
    cache = StateCache(folder, model)
    found = keep_reference(lm, requests_of(pages), tokens=250, cache=cache)
    if save:
        cache.save()
    return found.states


def equal(some: dict[Any, States], others: dict[Any, States]) -> bool:
    return list(some) == list(others) and all(
        torch.equal(some[place].hidden, others[place].hidden)
        and some[place].hidden.dtype == others[place].hidden.dtype
        and some[place].tokens == others[place].tokens
        for place in some
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_read_back_to_the_last_bit(
    dtype: torch.dtype,
    checkpoints: dict[str, Path],
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm = scorer(load_checkpoint(checkpoints["softmax"], dtype=dtype), tokenizer)
    plain = keep_reference(lm, requests_of(PAGES), tokens=250).states
    computed = reference(lm, tmp_path)
    counting = Counting(lm.model, monkeypatch)
    read = reference(lm, tmp_path)
    assert counting.runs == 0
    assert equal(computed, plain)
    assert equal(read, plain)


def test_other_models_and_tokens_are_computed(lm: Scorer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference(lm, tmp_path)
    counting = Counting(lm.model, monkeypatch)
    for changed in ({"model": "b"}, {"pages": [*PAGES[:-1], PAGES[0]]}, {"pages": PAGES[::-1]}):
        before = counting.runs
        reference(lm, tmp_path, **changed)  # type: ignore[arg-type]
        assert counting.runs > before, changed


def test_nothing_is_kept_before_the_model_is_known_to_be_the_right_one(lm: Scorer, tmp_path: Path) -> None:
    reference(lm, tmp_path / "states", save=False)
    assert not (tmp_path / "states").exists()


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "of another key"])
def test_damaged_files_are_computed_again(
    damage: str, lm: Scorer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = reference(lm, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    if damage == "cut":
        content = content[:-100]
    elif damage == "flipped":
        content[-100] ^= 1
    elif damage == "empty":
        content.clear()
    else:
        reference(lm, tmp_path / "other", model="b")
        content = bytearray(next((tmp_path / "other").glob("*.safetensors")).read_bytes())
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert equal(reference(lm, tmp_path), plain)
    assert file.name in caplog.text
    caplog.clear()
    assert equal(reference(lm, tmp_path), plain)  # it was written again
    assert not caplog.text


def test_a_folder_that_cannot_be_written_costs_time_only(
    lm: Scorer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert reference(lm, tmp_path / "file" / "states")
    assert "states" in caplog.text


def test_the_oldest_files_go(lm: Scorer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_cache, "MOST_FILES", 2)
    kept: list[set[Path]] = [set()]
    for time, model in enumerate("abc"):
        reference(lm, tmp_path, model)
        kept.append(set(tmp_path.glob("*.safetensors")))
        for new in kept[-1] - kept[-2]:
            os.utime(new, (time, time))
    assert len(kept[3]) == 2
    assert kept[2] - kept[3] == kept[1]
