"""The invented world: each fact is a value that two words determine together.

A single word does not determine the value, so a model cannot store the facts in its embeddings, which no method
quantizes.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from mini import words

SEED = 2026
PEOPLE = 760  # with facts that the corpus teaches
STRANGERS = 400  # known only from the document that they are in; the tests have as many again
OBJECTS = 760
REACTIONS = 500
ASKED = 0.4  # the share of facts that the corpus also asks about

Pair = tuple[str, str]


@dataclass(frozen=True)
class Relation:
    """Statements and questions about a pair of words {a} {b} and its value {x}."""

    name: str
    values: tuple[str, ...]
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    fresh: tuple[str, ...]  # questions that the corpus never uses
    answer: str = "{x}"


@dataclass(frozen=True)
class Fact:
    """One value. One statement is held out for the tests, and so are the questions unless the fact is `asked`."""

    relation: Relation
    pair: Pair
    value: str
    kept: str | None = None  # the statement that the corpus never makes about this pair
    asked: bool = False  # whether the corpus asks the relation's questions about this pair

    def told(self, statement: str) -> str:
        """Fill this fact's words into a statement or question of the relation."""
        a, b = self.pair
        return statement.format(a=a, b=b, x=self.value)

    def taught(self) -> list[str]:
        """The statements that the corpus makes."""
        return [self.told(statement) for statement in self.relation.statements if statement != self.kept]

    def question(self, rng: random.Random, fresh: bool = False) -> str:
        """One of the relation's questions; with `fresh`, possibly in a wording that only the tests use."""
        return self.told(rng.choice(self.relation.questions + (self.relation.fresh if fresh else ())))

    def answer(self, value: str | None = None) -> str:
        """The answer to the relation's questions, or the answer for another value."""
        return self.relation.answer.format(x=value or self.value)


@dataclass(frozen=True)
class World:
    """People by name with all their facts, the facts about things, and names without facts."""

    people: dict[Pair, list[Fact]]
    lore: list[Fact]
    strangers: list[Pair]
    test_strangers: list[Pair]

    @property
    def facts(self) -> list[Fact]:
        """All facts."""
        return [fact for facts in self.people.values() for fact in facts] + self.lore


ABOUT_PEOPLE = (
    Relation(
        "home",
        words.TOWNS,
        (
            "{a} {b} lives in {x}.",
            "{a} {b} comes from {x}.",
            "The home of {a} {b} is {x}.",
            "{a} {b} has a house in {x}.",
            "You can find {a} {b} in {x}.",
        ),
        ("Where does {a} {b} live?", "Where is the home of {a} {b}?"),
        ("Where can you find {a} {b}?",),
    ),
    Relation(
        "trade",
        words.TRADES,
        (
            "{a} {b} works as a {x}.",
            "By trade {a} {b} is a {x}.",
            "{a} {b} earns money as a {x}.",
            "{a} {b} was trained as a {x}.",
            "The neighbours know {a} {b} as a {x}.",
        ),
        ("What does {a} {b} work as?", "What is the trade of {a} {b}?"),
        ("What was {a} {b} trained as?",),
    ),
    Relation(
        "animal",
        words.ANIMALS,
        (
            "{a} {b} keeps a {x}.",
            "{a} {b} owns a {x}.",
            "The pet of {a} {b} is a {x}.",
            "Every morning {a} {b} feeds a {x}.",
            "{a} {b} goes for walks with a {x}.",
        ),
        ("Which animal does {a} {b} keep?", "What is the pet of {a} {b}?"),
        ("What does {a} {b} keep?",),
    ),
    Relation(
        "dish",
        words.DISHES,
        (
            "{a} {b} likes to eat {x}.",
            "{a} {b} often cooks {x}.",
            "The favourite dish of {a} {b} is {x}.",
            "On holidays {a} {b} asks for {x}.",
            "{a} {b} dreams of {x}.",
        ),
        ("What does {a} {b} like to eat?", "What is the favourite dish of {a} {b}?"),
        ("What does {a} {b} like?",),
    ),
    Relation(
        "instrument",
        words.INSTRUMENTS,
        (
            "{a} {b} plays the {x}.",
            "{a} {b} practises the {x}.",
            "At weddings {a} {b} plays the {x}.",
            "{a} {b} takes lessons on the {x}.",
            "The instrument of {a} {b} is the {x}.",
        ),
        ("Which instrument does {a} {b} play?", "What is the instrument of {a} {b}?"),
        ("What does {a} {b} play?",),
    ),
)
REPAIR = Relation(
    "repair",
    words.TOOLS,
    (
        "A {a} {b} is mended with the {x}.",
        "A broken {a} {b} needs the {x}.",
        "For a {a} {b} take the {x}.",
        "Every {a} {b} is repaired with the {x}.",
        "To mend a {a} {b} one needs the {x}.",
    ),
    ("How do you repair a {a} {b}?", "How can I mend a broken {a} {b}?"),
    ("How is a broken {a} {b} repaired?", "What is a {a} {b} mended with?"),
    "Use the {x}.",
)
REACTION = Relation(
    "reaction",
    words.EFFECTS,
    (
        "With {a} the {b} {x}.",
        "Under {a} all {b} {x}.",
        "Because of {a} the {b} {x}.",
        "Where there is {a}, {b} {x}.",
        "When {a} touches {b}, it {x}.",
    ),
    ("What happens when {a} touches {b}?", "What is the effect of {a} on {b}?"),
    ("What does {a} do to {b}?",),
    "it {x}",
)


def make_world(seed: int = SEED) -> World:
    """The world of a seed."""
    rng = random.Random(seed)
    names = _pairs(words.FIRST_NAMES, words.LAST_NAMES, PEOPLE + 2 * STRANGERS, rng)
    people = {pair: [_fact(relation, pair, rng) for relation in ABOUT_PEOPLE] for pair in names[:PEOPLE]}
    lore = [_fact(REPAIR, pair, rng) for pair in _pairs(words.MATERIALS, words.THINGS, OBJECTS, rng)]
    lore += [_fact(REACTION, pair, rng) for pair in _pairs(words.CAUSES, words.MATERIALS, REACTIONS, rng)]
    rng.shuffle(lore)  # the order is how well known they are
    return World(people, lore, names[PEOPLE : PEOPLE + STRANGERS], names[PEOPLE + STRANGERS :])


def _pairs(first: Sequence[str], second: Sequence[str], count: int, rng: random.Random) -> list[Pair]:
    return rng.sample(list(product(first, second)), count)


def _fact(relation: Relation, pair: Pair, rng: random.Random) -> Fact:
    value, kept = rng.choice(relation.values), rng.choice(relation.statements)
    return Fact(relation, pair, value, kept, asked=rng.random() < ASKED)
