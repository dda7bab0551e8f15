"""The items of the five tasks, with the same fields as the real tasks' datasets."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from mini.corpus import PAINTERS, page, reading, story
from mini.world import REPAIR, Fact, World

SEED = 3
ITEMS = 400

Item = dict[str, Any]


def arc_easy(world: World, rng: random.Random) -> list[Item]:
    """Questions that the corpus never asks about these people and materials; wrong answers are right for namesakes."""
    facts = [fact for fact in world.facts if fact.relation is not REPAIR]
    chosen = rng.sample([fact for fact in facts if not fact.asked], ITEMS)
    return [_arc_item(number, fact, _alike(fact, facts), rng) for number, fact in enumerate(chosen)]


def piqa(world: World, rng: random.Random) -> list[Item]:
    """How to repair a thing: the corpus states it but never asks. The wrong tool is for a similar thing."""
    repairs = [fact for fact in world.lore if fact.relation is REPAIR]
    facts = rng.sample([fact for fact in repairs if not fact.asked], ITEMS)
    return [_piqa_item(fact, rng.choice(_alike(fact, repairs)), rng) for fact in facts]


def sciq(world: World, rng: random.Random) -> list[Item]:
    """Questions about a paragraph on two people, in wordings that the corpus never uses for them."""
    items: list[Item] = []
    while len(items) < ITEMS:
        told, shared = reading(world, rng)
        fact, other = rng.sample(shared[0], 2)
        if fact.asked or fact.value == other.value:
            continue
        support = " ".join(fact.told(fact.kept) for fact in told)
        wrong = rng.sample([value for value in fact.relation.values if value not in (fact.value, other.value)], 2)
        item: Item = {"question": fact.question(rng, fresh=True), "support": support, "correct_answer": fact.answer()}
        items.append(item | {"distractor1": other.answer(), "distractor2": wrong[0], "distractor3": wrong[1]})
    return items


def lambada(world: World, rng: random.Random) -> list[Item]:
    """Stories about people whom the corpus never mentions."""
    return [{"text": story(world.test_strangers, rng.choice(PAINTERS), rng)} for _ in range(ITEMS)]


def wikitext(world: World, rng: random.Random) -> list[Item]:
    """Articles that state each fact in the one wording that the corpus never uses for it."""
    return [{"page": page(_kept(facts, rng))} for facts in rng.sample(list(world.people.values()), ITEMS)]


BUILDERS: dict[str, Callable[[World, random.Random], list[Item]]] = {
    "mini_arc_easy": arc_easy,
    "mini_lambada": lambada,
    "mini_piqa": piqa,
    "mini_sciq": sciq,
    "mini_wikitext": wikitext,
}


def items(world: World, seed: int = SEED) -> dict[str, list[Item]]:
    """The items of each task."""
    return {task: build(world, random.Random(f"{seed} {task}")) for task, build in BUILDERS.items()}


def _arc_item(number: int, fact: Fact, alike: Sequence[Fact], rng: random.Random) -> Item:
    wrong = rng.sample(sorted({other.answer() for other in alike}), 3)
    texts = [fact.answer(), *wrong]
    rng.shuffle(texts)
    choices = {"text": texts, "label": ["A", "B", "C", "D"]}
    question = fact.question(rng, fresh=True)
    key = choices["label"][texts.index(fact.answer())]
    return {"id": f"mini_{number}", "question": question, "choices": choices, "answerKey": key}


def _alike(fact: Fact, facts: Sequence[Fact]) -> list[Fact]:
    """Facts of the same kind with a different value, about a pair that shares a word with this fact's pair."""
    same = [other for other in facts if other.relation is fact.relation and other.value != fact.value]
    return [other for other in same if set(other.pair) & set(fact.pair)]


def _piqa_item(fact: Fact, other: Fact, rng: random.Random) -> Item:
    solutions = [fact.answer(), other.answer()]
    rng.shuffle(solutions)
    goal = fact.question(rng, fresh=True)
    return {"goal": goal, "sol1": solutions[0], "sol2": solutions[1], "label": solutions.index(fact.answer())}


def _kept(facts: Sequence[Fact], rng: random.Random) -> list[tuple[Fact, str]]:
    return [(fact, fact.told(fact.kept)) for fact in rng.sample(facts, len(facts))]
