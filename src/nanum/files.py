"""Users' files: read no further than they may be long, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from nanum.errors import Refused


def read(file: Path, what: str, largest_bytes: int) -> bytes:
    """What `file` holds, which is to be `what`: no more is read than is taken, since a device has no end.

    Raises `Refused`: no such file, one that cannot be read, one larger than `largest_bytes`.
    """
    try:
        with file.open("rb") as opened:
            raw = opened.read(largest_bytes + 1)
    except FileNotFoundError:
        raise Refused(f"{file}: no such file") from None
    except OSError as error:
        raise Refused(f"{file}: {error.strerror or error}") from None
    except ValueError:  # a NUL in the name
        raise Refused(f"{str(file)!r}: no such file") from None
    if len(raw) > largest_bytes:
        raise Refused(f"{file}: too large for {what} (over {largest_bytes:,} bytes)")
    return raw


def check_writable(file: Path, *, force: bool) -> None:
    """Whether `write_whole` could write `file` now: to be asked before the work that fills it.

    Raises `Refused`: it is there already and `force` is not said, or its folder is not there or cannot be written.
    """
    if file.is_dir():
        raise Refused(f"{file}: is a folder")
    if file.exists() and not force:
        raise Refused(f"{file}: is there already (--force replaces it)")
    try:
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise Refused(f"{file.parent}: {error.strerror or error}") from None


def write_whole(file: Path, content: str | bytes, *, force: bool) -> None:
    """Write `content`, text as UTF-8, into `file`, which is as before until all of it is there.

    Raises `Refused` as `check_writable` does, and where the disk is full.
    """
    check_writable(file, force=force)
    descriptor, unfinished = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with open(descriptor, "wb") as opened:
            opened.write(content.encode("utf-8") if isinstance(content, str) else content)
        os.chmod(unfinished, 0o666 & ~_umask())
        os.replace(unfinished, file)
    except OSError as error:
        raise Refused(f"{file}: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)


def _umask() -> int:
    """What a new file may not be allowed; reading it is setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
