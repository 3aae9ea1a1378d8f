"""A build's first steps: what its recipe names is looked up, and its engine begins to load.

That takes longest of all that comes before work. So the modules that do the work are only imported meanwhile; and where a
build before used the same tokenizer, the fast engine's begins to load before tasks are looked at, and numpy is imported.
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from packprep.building.garbage import without_collection
from packprep.building.output import Output, output_of
from packprep.building.signals import ended_by_signals
from packprep.clock import Clock
from packprep.corpus.engines import native
from packprep.dataset.json_files import MANIFEST_NAME
from packprep.errors import PackprepError
from packprep.recipe import Recipe

if TYPE_CHECKING:
    from packprep.building.job import Job
    from packprep.building.run import Outcome, Progress


def build(
    recipe: Recipe,
    out: str | os.PathLike | Output,
    progress: "Progress",
    workers: int | None = 1,
    moved: Mapping[str, str] | None = None,
    array: tuple[int, int] = (0, 1),
    begun: "Callable[[Job], None]" = lambda job: None,
) -> "Outcome":
    """Build a recipe into `out`, a folder or its URL, or go on with a build that stopped there.

    workers: processes; None: one for each CPU that this process may use, and fewer for little text.
    moved: source name → prefix where its files lie now. array: (index, count) of this array task.
    begun: called once with the job: while the workers make the first shards, or before this process does.
    Raises what is wrong with the recipe, the inputs or the disk; Stopped after SIGTERM, SIGINT or SIGUSR1 while shards are
    made. In a main thread SIGTERM and SIGUSR1 end the process with status 75 if that takes more than some seconds.
    """
    clock, out = Clock(), output_of(out)
    with ended_by_signals(out.remove_temporaries), clock.stage("plan"), without_collection():
        from packprep.building.inputs import look_up
        from packprep.corpus.engines.registry import begin_loading, note_begun

        inputs = look_up(recipe, moved or {})
        if not out.exists(MANIFEST_NAME):
            named = recipe.engine, inputs.vocabulary, recipe.documents.special_text
            begin_loading(*named)
            note_begun(*named, _tokenizer(recipe))
        from packprep.building.run import run
    return run(inputs, out, progress, workers, array, begun, clock)


def begin_as_before(recipe: Recipe, out: str | os.PathLike) -> None:
    """Let what the build before loaded for the recipe's tokenizer begin to load, unless there is nothing to build.

    It may be called before `build`, with a recipe whose tasks are not complete; what is wrong is for `build` to say.
    """
    with contextlib.suppress(PackprepError, OSError):
        if recipe.engine in ("auto", native.NAME) and not output_of(out).exists(MANIFEST_NAME):
            native.begin_as_before(_tokenizer(recipe), recipe.documents.special_text)


def _tokenizer(recipe: Recipe) -> str:
    """The path of the recipe's tokenizer; of a name, something like it."""
    return os.path.join(recipe.base, recipe.tokenizer)
