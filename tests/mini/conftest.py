"""The world and its text, made once for all tests in this folder."""

import pytest
from mini.corpus import corpus
from mini.world import World, make_world


@pytest.fixture(scope="session")
def world() -> World:
    return make_world()


@pytest.fixture(scope="session")
def documents(world: World) -> list[str]:
    return list(corpus(world))
