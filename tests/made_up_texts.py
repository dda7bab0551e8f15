"""Made-up documents in the files and about the lengths of ARC-easy, LAMBADA and WikiText: nothing is downloaded."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

SIZES = {"arc_easy": 600, "lambada_openai": 800, "wikitext": 60}
# Words of a question, of a choice, of a passage and of a page: median, and the spread of their logarithm. They are
# those of the benchmarks' test sets, where half of the questions have between 11 and 25 words.
QUESTION, CHOICE, PASSAGE, PAGE = (16, 0.55), (3, 0.8), (58, 0.18), (2700, 0.65)
SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in ("a", "en", "i", "or", "u")]


def write_texts(folder: Path) -> dict[str, Path]:
    """One JSON line per document, the same for every call."""
    texts = MadeUp(np.random.default_rng(0))
    makers = {"arc_easy": texts.question, "lambada_openai": texts.passage, "wikitext": texts.page}
    files = {name: folder / f"{name}.jsonl" for name in makers}
    for name, make in makers.items():
        files[name].write_text("".join(json.dumps(make(number)) + "\n" for number in range(SIZES[name])))
    return files


class MadeUp:
    """Words by Zipf's law, as real ones are, so that a trained tokenizer has short and long tokens."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        counts = random.integers(1, 5, size=3000)
        self.vocabulary = np.array(["".join(random.choice(SYLLABLES, size=count)) for count in counts])
        weights = 1 / np.arange(1, len(self.vocabulary) + 1)
        self.weights = weights / weights.sum()

    def words(self, length: tuple[float, float]) -> list[str]:
        median, spread = length
        count = max(1, round(median * float(np.exp(spread * self.random.standard_normal()))))
        return self.random.choice(self.vocabulary, size=count, p=self.weights).tolist()

    def question(self, number: int) -> dict:
        choices = [" ".join(self.words(CHOICE)) for _ in "ABCD"]
        return {
            "id": f"question_{number}",
            "question": f"{' '.join(self.words(QUESTION)).capitalize()}?",
            "choices": {"text": choices, "label": list("ABCD")},
            "answerKey": "ABCD"[number % 4],
        }

    def passage(self, number: int) -> dict:
        words = self.words(PASSAGE)
        return {
            "text": f'"{words[0].capitalize()}," she said.\n\n{" ".join(words[1:])}, {words[number % 3]} it {words[0]}'
        }

    def page(self, number: int) -> dict:
        """With WikiText's marks: titles between equals signs, spaces around punctuation, ` @-@ ` for a hyphen."""
        lines = [f" \n = {self.vocabulary[number]} = \n", *self._paragraphs(self.words(PAGE))]
        return {"page": " \n".join([*lines, ""])}

    def _paragraphs(self, words: list[str]) -> Iterator[str]:
        for start in range(0, len(words), 120):
            part = words[start : start + 120]
            yield f" {part[0]} @-@ {' '.join(part)} , <unk> ( 24 in ) ."
