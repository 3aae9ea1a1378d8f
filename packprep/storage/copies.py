"""Files of a folder at a URL, brought to this machine while they are looked at; those of a local folder lie where they are."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from packprep.errors import BuildError, PackprepError
from packprep.storage import Folder, LocalFolder, Remote

_BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class Nearby:
    """A folder of this machine in which an output's files lie at their names: the output's own, or one of copies."""

    out: Folder
    folder: Path

    @property
    def holds_copies(self) -> bool:
        """Whether files lie here only once they were brought."""
        return self.folder != self.out.location

    def bring(self, *names: str) -> None:
        """Have these files here, as far as there are such."""
        for name in names if self.holds_copies else ():
            size = self.out.size(name)
            if size is not None:
                self._copy(name, size)

    def _copy(self, name: str, size: int) -> None:
        assert isinstance(self.out, Remote)
        path = self.folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                for begin in range(0, size, _BLOCK_BYTES):
                    file.write(self.out.read(name, begin, min(begin + _BLOCK_BYTES, size)))
        except FileNotFoundError:
            path.unlink(missing_ok=True)  # removed since
        except OSError as error:
            raise BuildError(
                f"{path}: {error.strerror}; {self.out.path_of(name)} is fetched there, a shard at a time for each worker: "
                "set TMPDIR to a folder with room"
            ) from error

    @contextmanager
    def brought(self, *names: str) -> Iterator[None]:
        """Have these files here while this lasts."""
        try:
            self.bring(*names)
            yield
        finally:
            for name in names if self.holds_copies else ():
                (self.folder / name).unlink(missing_ok=True)

    def named(self, message: str) -> str:
        """A message about files here, as one about the output."""
        return message.replace(str(self.folder), str(self.out))


@contextmanager
def nearby(out: Folder) -> Iterator[Nearby]:
    """The files of an output on this machine while this lasts. PackprepErrors that leave here name the output's files."""
    if isinstance(out, LocalFolder):
        yield Nearby(out, out.path)
        return
    out.reach()
    with tempfile.TemporaryDirectory(prefix="packprep-") as name:
        here = Nearby(out, Path(name))
        try:
            yield here
        except PackprepError as error:
            error.args = (here.named(str(error)),)
            raise
