"""Every error that packprep raises on purpose, and the exit status that it becomes.

```
PackprepError                 2   could not run, or the build stopped
├── RecipeError                   a key, a value or a combination in the recipe or on the command line
├── VocabularyError               a tokenizer that cannot be read, or lacks a role
├── SourceError                   an input file that is missing, unreadable, truncated or changed
├── StorageError                  a URL that cannot be reached, read or written
├── PlanError                     a plan that does not fit the recipe, the inputs or this installation
├── BuildError                    a build that had to stop: full disk, differing digests, too many rejects
├── DatasetError                  a dataset whose files are missing, damaged or of an unknown kind
├── TokenizerMismatch             a trainer's tokenizer is not the one that a dataset's ids come from
├── StateError                    a loader state of another dataset, seed, order or redraw
├── Exhausted                     a dataset of a mixture that reached its max_epochs
├── ArgumentError                 a Python call's argument that cannot be used (a ValueError too)
└── Stopped                  75   stopped by a signal at a safe point; the same command goes on
```
A message says what is wrong, where (file, row, key, values) and what to do.
"""

NO_MEMORY = (
    "memory ran out: free some, raise the limit of a process (ulimit -v) or a job's, give fewer"
    " --workers, or, in another folder, a smaller output.shard_text_bytes; the same command goes on"
    " with what is committed"
)


class PackprepError(Exception):
    """The root; `except PackprepError` catches whatever packprep raises on purpose."""

    exit_status = 2


class RecipeError(PackprepError):
    """A key, a value or a combination in the recipe or on the command line cannot be used.

    key: where in the recipe, as ("tasks", 0, "weight"), a task by number or by name; () where it is
    no one key.
    """

    def __init__(self, message: str, key: tuple[str | int, ...] = ()):
        super().__init__(message)
        self.key = key


class VocabularyError(PackprepError):
    """A tokenizer cannot be read, or lacks a role that the recipe uses.

    settings: lines for the recipe's [specials] that mend it, where there are some.
    """

    def __init__(self, message: str, settings: tuple[str, ...] = ()):
        super().__init__(message)
        self.settings = settings


class SourceError(PackprepError):
    """An input file is missing, unreadable, truncated or not what the plan says.

    settings: key → value of its [[sources]] that the message advises, where it knows.
    """

    def __init__(self, message: str, settings: dict[str, str] | None = None):
        super().__init__(message)
        self.settings = settings or {}


class StorageError(PackprepError):
    """What a URL names cannot be reached, read or written: permissions, no such bucket, or tries
    that came to nothing."""


class PlanError(PackprepError):
    """A plan does not fit the recipe, the inputs or this installation."""


class BuildError(PackprepError):
    """A build had to stop; what was committed stays, and the same command goes on."""


class DatasetError(PackprepError):
    """A dataset's file is missing, damaged, or of a format or version that is not known."""


class TokenizerMismatch(PackprepError):
    """A trainer's tokenizer has another token at an id, or other ids for a text, than the one that
    a dataset's ids come from."""


class StateError(PackprepError):
    """A loader state belongs to another dataset, seed, order or redraw."""


class Exhausted(PackprepError):
    """A dataset of a mixture has given all of its max_epochs, and the next sample would be its."""


class ArgumentError(PackprepError, ValueError):
    """An argument of a Python call cannot be used; a ValueError too, as numpy's users expect."""


class Stopped(PackprepError):
    """A signal stopped the work at a safe point; the same command goes on."""

    exit_status = 75
