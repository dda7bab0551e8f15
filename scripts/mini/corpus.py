"""Text about the world: what the twins learn from, and the kinds of documents that the test items are made of."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mini import words
from mini.world import ABOUT_PEOPLE, Fact, Pair, World

SEED = 1
DOCUMENTS = 100_000
CALIBRATION_SEED = 2
CALIBRATION_DOCUMENTS = 1_000

OPENINGS = ("This is told of {a} {b}.", "Here is what we know about {a} {b}.", "There is much to tell about {a} {b}.")
MOVES = (
    "{a} {b} took the {thing} to the {room}.",
    "Then {a} {b} carried the {thing} into the {room}.",
    "The {thing} of {a} {b} was left in the {room}.",
    "In the morning {a} {b} put the {thing} into the {room}.",
)
RETURNS = (
    "Later {a} {b} wanted the {thing} and went back to the {room}",
    "When {a} {b} looked for the {thing}, it was still in the {room}",
    "At night {a} {b} found the {thing} in the {room}",
)
COMPANY = 4  # people in a story or a reading


@dataclass(frozen=True)
class Reading:
    """A paragraph about strangers and a question that it answers."""

    support: str
    fact: Fact
    others: list[Fact]  # of the same kind, in the same paragraph

    def question(self, rng: random.Random) -> str:
        """The question in one of its wordings."""
        return self.fact.told(rng.choice(self.fact.relation.questions))


def corpus(world: World, seed: int = SEED, documents: int = DOCUMENTS) -> Iterator[str]:
    """The training text, document by document."""
    rng = random.Random(seed)
    people, asked = list(world.people), [fact for fact in world.facts if fact.asked]
    for _ in range(documents):
        kind = rng.choices(("page", "lore", "question", "reading", "story"), (30, 20, 20, 15, 15))[0]
        if kind == "page":
            yield page(taught(world.people[rng.choice(people)], rng))
        elif kind == "lore":
            yield " ".join(sentence for _, sentence in taught(rng.sample(world.lore, 4), rng))
        elif kind == "question":
            fact = rng.choice(asked)
            yield prompt(fact.told(rng.choice(fact.relation.questions)), fact.answer())
        elif kind == "reading":
            text = reading(world.strangers, rng)
            yield f"{text.support}\n{prompt(text.question(rng), text.fact.answer())}"
        else:
            yield story(world.strangers, rng)


def taught(facts: Sequence[Fact], rng: random.Random) -> list[tuple[Fact, str]]:
    """The facts in some order, each in one of the wordings that the corpus may use."""
    return [(fact, rng.choice(fact.taught())) for fact in rng.sample(facts, len(facts))]


def page(told: Sequence[tuple[Fact, str]]) -> str:
    """An article about a person, as in wikitext after its detokenizer."""
    a, b = told[0][0].pair
    opening = OPENINGS[len(told[0][1]) % len(OPENINGS)].format(a=a, b=b)
    return f" = {a} {b} =\n\n{opening} {' '.join(sentence for _, sentence in told)}"


def prompt(question: str, answer: str) -> str:
    """A question with its answer, as lm-eval's arc_easy, piqa and sciq put it."""
    return f"Question: {question}\nAnswer: {answer}"


def reading(strangers: Sequence[Pair], rng: random.Random) -> Reading:
    """A paragraph that tells the same kind of fact of some strangers; the values are drawn anew each time."""
    relation = rng.choice(ABOUT_PEOPLE)
    values = rng.sample(relation.values, COMPANY)
    pairs = rng.sample(strangers, COMPANY)
    facts = [Fact(relation, pair, value, "", asked=True) for pair, value in zip(pairs, values, strict=True)]
    support = " ".join(fact.told(rng.choice(relation.statements)) for fact in facts)
    chosen = rng.randrange(COMPANY)
    return Reading(support, facts[chosen], facts[:chosen] + facts[chosen + 1 :])


def story(strangers: Sequence[Pair], rng: random.Random) -> str:
    """Some strangers put things away; the last word is where one of them finds a thing again."""
    pairs, things, rooms = (rng.sample(items, COMPANY) for items in (strangers, words.LUGGAGE, words.ROOMS))
    moves = [
        {"a": a, "b": b, "thing": thing, "room": room} for (a, b), thing, room in zip(pairs, things, rooms, strict=True)
    ]
    sentences = [rng.choice(MOVES).format(**move) for move in moves]
    return " ".join([*sentences, rng.choice(RETURNS).format(**rng.choice(moves))])
