"""What a benchmark is, and how it is loaded.

Nothing here decodes a video or asks a model: everything that can be found out before the first request is a `Fault`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from paravt.answers import LETTERS
from paravt.bench.files import Files, download_tables, find_tables
from paravt.bench.loaded import Fault, Loaded
from paravt.bench.resolve import Resolver
from paravt.bench.rows import BadRow, Item, Question, read_items
from paravt.errors import DataError


@dataclass(frozen=True)
class Benchmark:
    """One split of one benchmark."""

    name: str
    """As on the command line."""
    title: str
    """As in tables."""
    hub_id: str
    rows: int
    """As published."""
    videos: int | None
    """As published; None if that is not known."""
    tables: tuple[str, ...]
    """Patterns of the files with the rows, relative to the directory; the first that matches is read."""
    folder: str
    """Where the published layout has its videos; only to name those that are missing."""
    questions: Callable[[Item], list[Question]] = field(repr=False)
    """What a row asks; raises BadRow."""
    breakdown: tuple[str, ...] = ()
    """Keys of `Sample.metadata`. A value that is a list counts for each of its entries, and None for none."""
    macro: str | None = None
    """The key whose values' accuracies are averaged for the macro accuracy; None: the benchmark has none."""
    subtitles: bool = False
    """Whether the questions are asked with subtitles."""

    def load(
        self, source: str | Path | None = None, videos: str | Path | None = None, revision: str | None = None
    ) -> Loaded:
        """Read the benchmark from `source`, a directory in the published layout, or from the hub (None).

        `videos`: where the videos (and subtitles) are, if not below the source; nothing but tables is downloaded.
        `revision`: of the data set on the hub. Raises DataError if there are no rows to read, or the hub can't be
        asked; what is wrong with single rows or videos is in `Loaded.faults`.
        """
        if source is None:
            root, commit = download_tables(self.hub_id, revision, self.tables)
            name = f"{self.hub_id}@{commit}"
        else:
            root, name = Path(source), str(source)
        if videos is not None and not Path(videos).is_dir():
            raise DataError(f"{videos}: no such directory")
        tables = find_tables(root, self.tables)
        below = root if videos is None else Path(videos)
        resolver = Resolver(self.name, Files([below, root]), below / self.folder, self.subtitles)
        asked: list[Question] = []
        rows = 0
        for table in tables:
            for number, item in read_items(table):
                try:
                    if isinstance(item, BadRow):
                        raise item
                    found = self.questions(item)
                    if (most := max((len(question.options) for question in found), default=0)) > len(LETTERS):
                        raise BadRow(f"{most} options; {len(LETTERS)} can be lettered")
                except BadRow as error:
                    resolver.fault("row", f"{table}: row {number}", str(error))
                    rows += 1
                    continue
                rows += len(found)
                asked += found
        resolver.find_videos([question.video for question in asked])
        for question in asked:
            resolver.add(question)
        faults = tuple(resolver.faults)
        if not resolver.samples:
            first = f"; the first: {faults[0].where}: {faults[0].message}" if faults else ""
            raise DataError(f"{name}: none of {rows} rows of {self.title} can be used{first}")
        sizes = ((rows, self.rows, "rows"), (len(resolver.videos), self.videos, "videos"))
        cut = [
            Fault("size", name, f"{have} {what} where {want} were published")
            for have, want, what in sizes
            if want is not None and have != want
        ]
        samples = tuple(resolver.samples.values())
        return Loaded(self.name, name, samples, (*cut, *faults), self.title, self.breakdown, self.macro)
