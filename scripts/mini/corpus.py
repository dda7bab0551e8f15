"""Text about the world: the training text of the twins, and the kinds of documents that test items are built from."""

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate

from mini import words
from mini.world import ABOUT_PEOPLE, Fact, Pair, World

SEED = 1
DOCUMENTS = 100_000
CALIBRATION_SEED = 2
CALIBRATION_DOCUMENTS = 2_000  # 84,000 tokens: five draws of 128 windows with 128 tokens each are 81,920

DEEDS = (
    "{a} {b} painted the {thing} {colour}.",
    "{a} {b} made the {thing} {colour}.",
    "Then {a} {b} turned the {thing} {colour}.",
    "One day {a} {b} dyed the {thing} {colour}.",
)
MEMORIES = (
    "Later {a} {b} found the {thing} {colour}",
    "In the evening {a} {b} saw the {thing} {colour}",
    "All day {a} {b} kept the {thing} {colour}",
)
PAINTERS = (1, 2, 3)  # how many painters a story may have
KINDS = {"page": 35, "lore": 18, "question": 30, "reading": 12, "story": 55}  # kinds of documents, and their shares
# How many times as often the corpus mentions the best-known person or thing as the least known. If all were equally
# common, a model would learn everything at once, and nothing would be hard.
SPREAD = 30


def corpus(world: World, seed: int = SEED, documents: int = DOCUMENTS) -> Iterator[str]:
    """The training text, document by document."""
    rng = random.Random(seed)
    people, lore = list(world.people.values()), world.lore
    fame = dict(zip(lore, often(len(lore)), strict=True))
    fame |= {fact: share for own, share in zip(people, often(len(people)), strict=True) for fact in own}
    asked = [fact for fact in world.facts if fact.asked]
    of_people, of_lore = list(accumulate(often(len(people)))), list(accumulate(often(len(lore))))
    of_asked = list(accumulate(fame[fact] for fact in asked))
    for _ in range(documents):
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        if kind == "page":
            yield page(taught(rng.choices(people, cum_weights=of_people)[0], rng))
        elif kind == "lore":
            facts = dict.fromkeys(rng.choices(lore, cum_weights=of_lore, k=4))
            yield " ".join(sentence for _, sentence in taught(list(facts), rng))
        elif kind == "question":
            fact = rng.choices(asked, cum_weights=of_asked)[0]
            yield prompt(fact.question(rng), fact.answer())
        elif kind == "reading":
            told, shared = reading(world, rng)
            questions = [fact for facts in shared for fact in facts if fact.asked][:2]
            support = " ".join(rng.choice(fact.taught()) for fact in told)
            yield "\n".join([support, *(prompt(fact.question(rng), fact.answer()) for fact in questions)])
        else:
            yield story(world.strangers, rng.choice(PAINTERS), rng, recalls=2)


def often(count: int) -> list[float]:
    """How often each of `count` is mentioned, 1 on average: Zipf's law, the first SPREAD times as often as the last."""
    shares = [1 / (count + (SPREAD - 1) * rank) for rank in range(count)]
    return [share * count / sum(shares) for share in shares]


def taught(facts: Sequence[Fact], rng: random.Random) -> list[tuple[Fact, str]]:
    """The facts in random order, each in one of the wordings that the corpus may use."""
    return [(fact, rng.choice(fact.taught())) for fact in rng.sample(facts, len(facts))]


def page(told: Sequence[tuple[Fact, str]]) -> str:
    """An article about a person, in the form that wikitext's detokenizer produces."""
    a, b = told[0][0].pair
    return f" = {a} {b} =\n\n{' '.join(sentence for _, sentence in told)}"


def prompt(question: str, answer: str) -> str:
    """A question with its answer, in the form of lm-eval's arc_easy, piqa and sciq."""
    return f"Question: {question}\nAnswer: {answer}"


def reading(world: World, rng: random.Random) -> tuple[list[Fact], list[tuple[Fact, Fact]]]:
    """The facts that a paragraph states about two people, and the pairs of facts of the same kind."""
    people = [world.people[pair] for pair in rng.sample(list(world.people), 2)]
    kinds = rng.sample(range(len(ABOUT_PEOPLE)), 3)
    shared = [(people[0][kind], people[1][kind]) for kind in kinds]
    told = [fact for facts in zip(*shared, strict=True) for fact in facts]
    rng.shuffle(shared)
    return told, shared


def story(strangers: Sequence[Pair], painters: int, rng: random.Random, recalls: int = 1) -> str:
    """Strangers paint things, and the story recalls each one; its last word is the colour of one of the things."""
    people, things, colours = (rng.sample(items, painters) for items in (strangers, words.LUGGAGE, words.COLOURS))
    deeds = [
        {"a": a, "b": b, "thing": thing, "colour": colour}
        for (a, b), thing, colour in zip(people, things, colours, strict=True)
    ]
    told = [rng.choice(DEEDS).format(**deed) for deed in deeds]
    recalled = [deed for _ in range(recalls) for deed in rng.sample(deeds, painters)]
    return " ".join(told) + " " + ". ".join(rng.choice(MEMORIES).format(**deed) for deed in recalled)
