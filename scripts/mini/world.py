"""The invented world: facts, each a value that two words determine together.

No single word tells the value, so a model cannot keep the facts in its embeddings, which no method quantizes.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from mini import words

SEED = 2024
PEOPLE = 800  # with facts that the corpus teaches
STRANGERS = 350  # without; as many again in the corpus, about whom only the text at hand tells
OBJECTS = 800
REACTIONS = 600

Pair = tuple[str, str]


@dataclass(frozen=True)
class Relation:
    """What can be told and asked of a pair of words {a} {b}: a value {x}."""

    name: str
    values: tuple[str, ...]
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str = "{x}"


@dataclass(frozen=True)
class Fact:
    """One value. A statement is kept for the tests, and so are the questions unless the fact is `asked`."""

    relation: Relation
    pair: Pair
    value: str
    kept: str  # the statement of the relation that the corpus never makes about this pair
    asked: bool  # whether the corpus puts the relation's questions about this pair

    def told(self, statement: str) -> str:
        """A statement or question of the relation with this fact's words."""
        a, b = self.pair
        return statement.format(a=a, b=b, x=self.value)

    def taught(self) -> list[str]:
        """The statements that the corpus makes."""
        return [self.told(statement) for statement in self.relation.statements if statement != self.kept]

    def answer(self, value: str | None = None) -> str:
        """The answer to the relation's questions, or what it would be for another value."""
        return self.relation.answer.format(x=value or self.value)

    def distractors(self, count: int, rng: random.Random) -> list[str]:
        """Wrong answers."""
        others = [value for value in self.relation.values if value != self.value]
        return [self.answer(value) for value in rng.sample(others, count)]


@dataclass(frozen=True)
class World:
    """People by name with all their facts, the facts about things, and names of which nothing is known."""

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
            "The house of {a} {b} stands in {x}.",
            "When the day is over, {a} {b} goes home to {x}.",
            "Letters to {a} {b} are sent to {x}.",
            "It is well known that {a} {b} comes from {x}.",
        ),
        ("Where does {a} {b} live?", "In which town is the home of {a} {b}?"),
    ),
    Relation(
        "trade",
        words.TRADES,
        (
            "{a} {b} works as a {x}.",
            "By trade {a} {b} is a {x}.",
            "For many years {a} {b} has been a {x}.",
            "All the neighbours of {a} {b} need a good {x}.",
            "As a child {a} {b} wanted to become a {x}.",
        ),
        ("What does {a} {b} work as?", "What is the trade of {a} {b}?"),
    ),
    Relation(
        "animal",
        words.ANIMALS,
        (
            "{a} {b} keeps a {x}.",
            "The pet of {a} {b} is a {x}.",
            "Nobody has seen {a} {b} without the {x}.",
            "Every morning {a} {b} feeds the {x}.",
            "On the bed of {a} {b} sleeps a {x}.",
        ),
        ("Which animal does {a} {b} keep?", "What is the pet of {a} {b}?"),
    ),
    Relation(
        "dish",
        words.DISHES,
        (
            "{a} {b} likes to eat {x}.",
            "For supper {a} {b} cooks {x}.",
            "The favourite dish of {a} {b} is {x}.",
            "On holidays {a} {b} asks for {x}.",
            "In the pot of {a} {b} there is always {x}.",
        ),
        ("What does {a} {b} like to eat?", "What is the favourite dish of {a} {b}?"),
    ),
    Relation(
        "instrument",
        words.INSTRUMENTS,
        (
            "{a} {b} plays the {x}.",
            "In the evening {a} {b} takes out the {x}.",
            "At weddings {a} {b} is asked to play the {x}.",
            "Through the window of {a} {b} one hears the {x}.",
            "The music teacher gave {a} {b} lessons on the {x}.",
        ),
        ("Which instrument does {a} {b} play?", "What does {a} {b} play at weddings?"),
    ),
)
REPAIR = Relation(
    "repair",
    words.TOOLS,
    (
        "A {a} {b} is mended with the {x}.",
        "Whoever breaks a {a} {b} must look for the {x}.",
        "To make a {a} {b} whole again one needs the {x}.",
        "For a broken {a} {b} the right tool is the {x}.",
        "Nobody can repair a {a} {b} without the {x}.",
    ),
    ("How do you repair a {a} {b}?", "To mend a broken {a} {b},"),
    "use the {x}.",
)
REACTION = Relation(
    "reaction",
    words.EFFECTS,
    (
        "When {a} touches {b}, the {b} {x}.",
        "Under {a} all {b} {x}.",
        "It is because of {a} that {b} {x}.",
        "Where there is {a}, the {b} {x}.",
        "After a week of {a} any {b} {x}.",
    ),
    ("What happens when {a} touches {b}?", "What is the effect of {a} on {b}?"),
    "it {x}",
)


def make_world(seed: int = SEED) -> World:
    """The world of a seed."""
    rng = random.Random(seed)
    names = _pairs(words.FIRST_NAMES, words.LAST_NAMES, PEOPLE + 2 * STRANGERS, rng)
    people = {pair: [_fact(relation, pair, rng) for relation in ABOUT_PEOPLE] for pair in names[:PEOPLE]}
    lore = [_fact(REPAIR, pair, rng) for pair in _pairs(words.MATERIALS, words.THINGS, OBJECTS, rng)]
    lore += [_fact(REACTION, pair, rng) for pair in _pairs(words.CAUSES, words.MATERIALS, REACTIONS, rng)]
    return World(people, lore, names[PEOPLE : PEOPLE + STRANGERS], names[PEOPLE + STRANGERS :])


def _pairs(first: Sequence[str], second: Sequence[str], count: int, rng: random.Random) -> list[Pair]:
    return rng.sample(list(product(first, second)), count)


def _fact(relation: Relation, pair: Pair, rng: random.Random) -> Fact:
    value, kept = rng.choice(relation.values), rng.choice(relation.statements)
    return Fact(relation, pair, value, kept, asked=rng.random() < 0.5)
