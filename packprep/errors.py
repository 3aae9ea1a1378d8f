"""All errors that packprep raises on purpose, and their exit statuses.

```
PackprepError                 2   could not run, or the build stopped
├── RecipeError                   a key, value or combination in the recipe or on the command line
├── VocabularyError               a tokenizer that cannot be read, or lacks a special token
├── SourceError                   an input file that is missing, unreadable, truncated or changed
├── StorageError                  a URL that cannot be reached, read or written
├── PlanError                     a plan that does not fit the recipe, inputs or installation
├── BuildError                    a build that stops: full disk, differing digests, many rejects
├── DatasetError                  a dataset whose files are missing, damaged or of an unknown kind
├── TokenizerMismatch             a trainer's tokenizer that differs from a dataset's
├── StateError                    a loader state of another dataset, seed, order or redraw
├── Exhausted                     a dataset of a mixture that reached its max_epochs
├── ArgumentError                 a Python call's argument that cannot be used (a ValueError too)
└── Stopped                  75   stopped by a signal at a safe point; run the same command again
```

A message names the problem, its place (file, row, key, values), and the action to take.
"""

NO_MEMORY = (
    "out of memory\n"
    "hint: free memory, raise the limit of the process (ulimit -v) or the job, or give fewer"
    " --workers. Then run the same command again: committed work is kept. A smaller"
    " output.shard_text_bytes also helps, but needs another folder"
)


class PackprepError(Exception):
    """The base class of all errors that packprep raises on purpose."""

    exit_status = 2


class RecipeError(PackprepError):
    """A key, a value or a combination in the recipe or on the command line cannot be used.

    Attributes:
        key: The path of the key in the recipe, such as ("tasks", 0, "weight"). A task is given
            by its number or its name. The path is () if the error has no single key.
    """

    def __init__(self, message: str, key: tuple[str | int, ...] = ()):
        super().__init__(message)
        self.key = key


class VocabularyError(PackprepError):
    """A tokenizer cannot be read, or does not have a special token that the recipe uses.

    Attributes:
        settings: Lines of TOML to add to [specials] of the recipe, or () if none fix the error.
    """

    def __init__(self, message: str, settings: tuple[str, ...] = ()):
        super().__init__(message)
        self.settings = settings


class SourceError(PackprepError):
    """An input file is missing, unreadable, truncated or different from the plan.

    Attributes:
        settings: Suggested values by key of [[sources]], or {} if the message suggests none.
    """

    def __init__(self, message: str, settings: dict[str, str] | None = None):
        super().__init__(message)
        self.settings = settings or {}


class StorageError(PackprepError):
    """A URL cannot be reached, read or written.

    Typical reasons are permissions, a missing bucket, or repeated failures.
    """


class PlanError(PackprepError):
    """A plan does not fit the recipe, the inputs or this installation."""


class BuildError(PackprepError):
    """A build had to stop. Committed shards are kept, and the same command resumes the build."""


class DatasetError(PackprepError):
    """A dataset's file is missing, damaged, or of an unknown format or version."""


class TokenizerMismatch(PackprepError):
    """A trainer's tokenizer differs from the tokenizer that produced a dataset's ids.

    The trainer's tokenizer has another token at an id, or gives other ids for a text.
    """


class StateError(PackprepError):
    """A loader state belongs to another dataset, or to another `seed`, `order` or `redraw`."""


class Exhausted(PackprepError):
    """The next sample of a mixture must come from a dataset that has used all of its max_epochs."""


class ArgumentError(PackprepError, ValueError):
    """An argument of a Python call cannot be used. It is a ValueError too, as in NumPy."""


class Stopped(PackprepError):
    """A signal stopped the work at a safe point. A build then resumes with the same command."""

    exit_status = 75
