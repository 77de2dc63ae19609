"""A data set of trajectories on disk, in ArrayRecord files: random access, no TensorFlow, complete in itself.

    FOLDER/trajectories.array_record   one record per group of siblings: a JSON list of trajectories
    FOLDER/screenshots.array_record    one record per picture: its bytes
    FOLDER/dataset.json                counts, protocol, fingerprint, and the hash of each screenshot, in order

Trajectories of one group stand in one record because they are packed together: they share their prompt. The file
`dataset.json` is written last, so a folder without it was never finished. Its fingerprint is over the content of all
trajectories in order; a checkpoint keeps it beside its position, and a run goes on only with the same data. No jax.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from owrl_jax.types import Trajectory

TRAJECTORIES, SCREENSHOTS, FACTS = "trajectories.array_record", "screenshots.array_record", "dataset.json"
FORMAT = 1


class DataError(RuntimeError):
    """A data set that cannot be written or read; the message says why and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetFacts:
    """What stands in `dataset.json`.

    Attributes:
      format: of the folder.
      groups, trajectories, turns, response_tokens: counts.
      sites, tasks: different ones.
      protocol: of all trajectories.
      fingerprint: SHA-256 over the records of trajectories.
      screenshots: content hashes, in the order of their file.
      source: how the data set was made, for people.
    """

    format: int = FORMAT
    groups: int
    trajectories: int
    turns: int
    response_tokens: int
    sites: int
    tasks: int
    protocol: str
    fingerprint: str
    screenshots: tuple[str, ...]
    source: dict[str, Any] = dataclasses.field(default_factory=dict)


def write_dataset(
    folder: str | Path,
    trajectories: Iterable[Trajectory],
    screenshot: Callable[[str], bytes],
    *,
    source: dict[str, Any] | None = None,
) -> DatasetFacts:
    """Write a data set; the folder appears complete or not at all.

    Args:
      folder: must not exist.
      trajectories: in any order; siblings (same `group_id`) are put together where the first of them stands.
      screenshot: bytes by content hash, as `ScreenshotStore.get`.
      source: kept for people.
    Raises:
      DataError: if the folder exists, there is nothing to write, protocols differ, or a picture is not what its hash
        says.
    """
    from array_record.python.array_record_module import ArrayRecordWriter

    folder = Path(folder)
    if folder.exists():
        raise DataError(f"{folder} exists: give another folder, or remove it")
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    everything = [trajectory for group in groups.values() for trajectory in group]
    if not everything:
        raise DataError("there is no trajectory to write: a data set without any would train nothing")
    protocols = {trajectory.protocol for trajectory in everything}
    if len(protocols) > 1:
        raise DataError(f"trajectories of {len(protocols)} protocols cannot stand in one data set: {sorted(protocols)}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        digest = hashlib.sha256()
        writer = ArrayRecordWriter(str(draft / TRAJECTORIES), "group_size:1")
        for group in groups.values():
            record = msgspec.json.encode(group)
            digest.update(hashlib.sha256(record).digest())
            writer.write(record)
        writer.close()
        names = tuple(dict.fromkeys(turn.screenshot for t in everything for turn in t.turns if turn.screenshot))
        writer = ArrayRecordWriter(str(draft / SCREENSHOTS), "group_size:1")
        for name in names:
            data = screenshot(name)
            if hashlib.sha256(data).hexdigest() != name:
                raise DataError(f"the bytes given for screenshot {name} do not have that hash")
            writer.write(data)
        writer.close()
        facts = DatasetFacts(
            groups=len(groups),
            trajectories=len(everything),
            turns=sum(len(t.turns) for t in everything),
            response_tokens=sum(len(turn.response_ids) for t in everything for turn in t.turns),
            sites=len({t.task.site for t in everything}),
            tasks=len({t.task.id for t in everything}),
            protocol=protocols.pop(),
            fingerprint=digest.hexdigest(),
            screenshots=names,
            source=source or {},
        )
        (draft / FACTS).write_text(json.dumps(dataclasses.asdict(facts), indent=1), encoding="utf-8")
        draft.chmod(0o755)
        os.rename(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return facts


class Dataset:
    """A data set opened for reading; a random access source for grain: `len`, and a group of trajectories by number.

    Raises:
      DataError: if the folder holds no finished data set.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            self.facts = msgspec.json.decode((self.folder / FACTS).read_bytes(), type=DatasetFacts)
        except FileNotFoundError:
            raise DataError(f"{self.folder} holds no finished data set: it has no {FACTS} (owrl data build)") from None
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise DataError(f"{self.folder / FACTS} cannot be read: {error}") from None
        if self.facts.format != FORMAT:
            raise DataError(f"{self.folder} has format {self.facts.format}, this version reads {FORMAT}: build it anew")
        self._places = {name: at for at, name in enumerate(self.facts.screenshots)}
        self._trajectories, self._screenshots = _source(self.folder / TRAJECTORIES), None
        if len(self._trajectories) != self.facts.groups:
            raise DataError(
                f"{self.folder / TRAJECTORIES} has {len(self._trajectories)} records, {FACTS} says "
                f"{self.facts.groups}: the folder was changed; build it anew"
            )

    def __len__(self) -> int:
        return self.facts.groups

    def __getitem__(self, index: int) -> tuple[Trajectory, ...]:
        if not 0 <= index < len(self):
            raise IndexError(f"group {index} of {len(self)}")
        return msgspec.json.decode(self._trajectories[index], type=tuple[Trajectory, ...])

    def __repr__(self) -> str:
        return f"Dataset({str(self.folder)!r}, {self.facts.fingerprint[:12]})"

    def screenshot(self, name: str) -> bytes:
        """Bytes of a picture by its content hash.

        Raises:
          DataError: if there is none, or it was changed.
        """
        if name not in self._places:
            raise DataError(f"{self.folder} has no screenshot {name}: the data set was built from other trajectories")
        if self._screenshots is None:
            self._screenshots = _source(self.folder / SCREENSHOTS)
        data = self._screenshots[self._places[name]]
        if hashlib.sha256(data).hexdigest() != name:
            raise DataError(f"screenshot {name} in {self.folder} is damaged: build the data set anew")
        return data

    def check(self) -> None:
        """Read everything and compare it with the fingerprint and the hashes.

        Raises:
          DataError: naming what differs.
        """
        digest = hashlib.sha256()
        for number in range(len(self)):
            digest.update(hashlib.sha256(self._trajectories[number]).digest())
        if digest.hexdigest() != self.facts.fingerprint:
            raise DataError(f"the trajectories in {self.folder} are not those it was built with: build it anew")
        for name in self.facts.screenshots:
            self.screenshot(name)


def _source(path: Path) -> Any:
    import grain

    try:
        return grain.sources.ArrayRecordDataSource([str(path)])
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): build the data set anew") from error
