"""Screenshots on disk, once each, under the hash of their bytes: `ab/abcdef….png`.

Everything else in the system carries the hash. A picture is on disk, whole and synced, before its name is handed out:
it is written beside its place and renamed into it, so a crash leaves no torn file under a good name.
"""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from pathlib import Path

from owrl_jax.types import Screenshot

_NAME = re.compile(r"[0-9a-f]{64}")


class MissingScreenshot(KeyError):
    """No picture of that hash is in the store, or its bytes are no longer the ones that were put there."""

    def __str__(self) -> str:
        return str(self.args[0])


class ScreenshotStore:
    """A folder of pictures. Any number of processes may write into it at once.

    Args:
      root: the folder; made if missing.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)
        self._known: set[str] = set()

    def put(self, screenshot: Screenshot) -> str:
        """Keeps a picture; gives its hash.

        Raises:
          OSError: if it cannot be written (disk full); nothing is left of it then.
        """
        name = screenshot.sha256
        if name in self._known:
            return name
        path = self._path(name, screenshot.format)
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            beside = path.with_name(f".{name}.{uuid.uuid4().hex}")
            try:
                with beside.open("wb") as file:
                    file.write(screenshot.data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(beside, path)
            except BaseException:
                beside.unlink(missing_ok=True)
                raise
        self._known.add(name)
        return name

    def path(self, name: str) -> Path:
        """The file of a picture.

        Raises:
          MissingScreenshot: if there is none.
        """
        if not _NAME.fullmatch(name):
            raise MissingScreenshot(f"{name!r} is not the hash of a screenshot (64 hex digits)")
        found = next(iter(sorted((self.root / name[:2]).glob(f"{name}.*"))), None)
        if found is None:
            raise MissingScreenshot(f"no screenshot {name} in {self.root}: was the folder moved or cleaned?")
        return found

    def get(self, name: str) -> bytes:
        """The bytes of a picture.

        Raises:
          MissingScreenshot: if there is none, or the file no longer holds what its name says.
        """
        path = self.path(name)
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != name:
            raise MissingScreenshot(f"{path} was changed or damaged: its bytes do not have the hash in its name")
        return data

    def __contains__(self, name: str) -> bool:
        try:
            self.path(name)
        except MissingScreenshot:
            return False
        return True

    def _path(self, name: str, format: str) -> Path:
        return self.root / name[:2] / f"{name}.{format}"
