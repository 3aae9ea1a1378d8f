"""Random recipes: built, replayed and computed again by the twin without a fault, or refused by an
error of packprep's."""

import subprocess
import sys

import pytest

from tests.made import ROOT, environment
from tests.random_recipes import recipe_of, try_recipe, write_corpus

PARTS, EACH = 3, 10


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("random") / "corpus"
    write_corpus(folder)
    return folder


@pytest.mark.long
@pytest.mark.alike(1)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_random_recipe_holds_every_promise_or_is_refused(corpus, part):
    became = {}
    for seed in range(EACH * part, EACH * (part + 1)):
        try:
            became[seed] = try_recipe(seed, corpus)
        except BaseException as error:
            error.add_note(f"seed {seed}: {recipe_of(seed)}")
            raise
    assert sum(result == "built" for result in became.values()) >= EACH / 2, became


@pytest.mark.campaign
def test_two_thousand_random_recipes_hold_every_promise():
    command = [sys.executable, "tests/random_recipes.py", "--count", "2000"]
    assert subprocess.run(command, cwd=ROOT, env=environment()).returncode == 0
