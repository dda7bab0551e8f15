"""The world and its text: reproducible, and no test item occurs in the training text."""

import hashlib
import os
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from mini.corpus import CALIBRATION_DOCUMENTS, CALIBRATION_SEED, PAINTERS, corpus
from mini.tasks import items
from mini.tokenizer import make_tokenizer
from mini.words import FIRST_NAMES, LAST_NAMES
from mini.world import World, make_world

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
NAME = re.compile(f"(?:{'|'.join(FIRST_NAMES)}) (?:{'|'.join(LAST_NAMES)})")
SENTENCE_END = re.compile(r"(?<=[.?])\s+|\n+")


@pytest.fixture(scope="module")
def seen(world: World, documents: list[str]) -> set[str]:
    """All sentences of the training text and of the calibration text."""
    calibration = corpus(world, CALIBRATION_SEED, CALIBRATION_DOCUMENTS)
    return {sentence for text in (*documents, *calibration) for sentence in SENTENCE_END.split(text)}


def test_the_text_does_not_depend_on_the_process() -> None:
    code = (
        "import hashlib; from itertools import islice; from mini.corpus import corpus; from mini.world import *\n"
        "print(hashlib.sha256(repr(list(islice(corpus(make_world()), 500))).encode()).hexdigest())"
    )
    here = hashlib.sha256(repr(list(islice(corpus(make_world()), 500))).encode()).hexdigest()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(SCRIPTS)}
        there = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert there.stdout.strip() == here


def test_another_seed_is_another_world() -> None:
    assert make_world(1).people != make_world(2).people


def test_the_training_text_states_every_fact_in_other_words(world: World, seen: set[str]) -> None:
    assert all(any(sentence in seen for sentence in fact.taught()) for fact in world.facts)


@pytest.mark.parametrize(
    ("task", "field"), [("mini_arc_easy", "question"), ("mini_piqa", "goal"), ("mini_sciq", "question")]
)
def test_no_question_of_the_tests_is_in_training(task: str, field: str, world: World, seen: set[str]) -> None:
    asked = [f"Question: {item[field]}" for item in items(world)[task]]
    assert not seen.intersection(asked)
    # The scan would find them: it finds questions about other facts in the same form.
    assert sum(sentence.startswith("Question: ") for sentence in seen) > 1000


@pytest.mark.parametrize(("task", "field"), [("mini_wikitext", "page"), ("mini_sciq", "support")])
def test_no_statement_of_the_tests_is_in_training(task: str, field: str, world: World, seen: set[str]) -> None:
    for item in items(world)[task]:
        statements = [text for text in SENTENCE_END.split(item[field]) if text.endswith(".")]
        assert len(statements) >= 5
        assert not seen.intersection(statements)


def test_nobody_in_the_test_stories_is_in_training(world: World, documents: list[str]) -> None:
    known = {name for text in documents for name in NAME.findall(text)}
    assert known == {f"{a} {b}" for a, b in (*world.people, *world.strangers)}
    for item in items(world)["mini_lambada"]:
        named = set(NAME.findall(item["text"]))
        assert len(named) in PAINTERS
        assert not named & known


def test_the_tokenizer_knows_every_word_and_loses_no_text(world: World, documents: list[str]) -> None:
    tokenizer = make_tokenizer(documents)
    assert len(tokenizer) < 1024
    for text in documents[:200]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == " " + text
        assert min(ids) >= 2 + 256, "a word fell back to bytes"
    assert tokenizer.decode(tokenizer.encode("Zoë, 42 €?\n\tend")) == " Zoë, 42 €?\n\tend"
