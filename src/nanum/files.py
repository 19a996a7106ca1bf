"""Users' files: read no further than they may be long, written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path

from nanum.errors import Refused


def read(file: Path, what: str, largest_bytes: int) -> bytes:
    """What `file` holds, which is to be `what`: one byte more than `largest_bytes` is read at most.

    A pipe or a device is read only where the process has it open already (`/dev/stdin`, and a shell's `<(…)`): to open
    one that nobody writes into would wait for ever.

    Raises `Refused`: no such file, one that cannot be read, one larger than `largest_bytes`, a pipe or a device by its
    name.
    """
    try:
        waits = _would_wait(file)
        raw = b"" if waits else _first(file, largest_bytes + 1)
    except FileNotFoundError:
        raise Refused(f"{file}: no such file") from None
    except OSError as error:
        raise Refused(f"{file}: {error.strerror or error}") from None
    except ValueError:  # a NUL in the name
        raise Refused(f"{str(file)!r}: no such file") from None
    if waits:
        raise Refused(f"{file}: is a device or a pipe, and no file to read")
    if len(raw) > largest_bytes:
        raise Refused(f"{file}: too large for {what} (over {largest_bytes:,} bytes)")
    return raw


def _first(file: Path, size: int) -> bytes:
    with file.open("rb") as opened:
        return opened.read(size)


def _would_wait(file: Path) -> bool:
    """Is it a device or a pipe that this process has not open?"""
    found = file.stat()
    return not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode) or _is_open(found))


def _is_open(there: os.stat_result) -> bool:
    """Is it what one of this process's descriptors is of?"""
    for descriptor in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # of the listing's own, which is closed by now
            if os.path.samestat(os.fstat(int(descriptor)), there):
                return True
    return False


def check_writable(file: Path, *, force: bool) -> None:
    """Whether `write_whole` could write `file` now: to be asked before the work that fills it.

    Raises `Refused`: it is there already and `force` is not said, is no file, or its folder is not there or takes none.
    """
    target = _behind_links(file)
    if target.is_dir():
        raise Refused(f"{file}: is a folder")
    if target.exists() and not target.is_file():
        raise Refused(f"{file}: is a device or a pipe, and no file to replace")
    if target.exists() and not force:
        raise Refused(f"{file}: is there already (--force replaces it)")
    if not target.parent.is_dir():
        raise Refused(f"{file}: there is no folder {target.parent}")
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}."):
            pass
    except OSError as error:
        raise Refused(f"{file}: {_why_not(error, target.parent)}") from None


def _behind_links(file: Path) -> Path:
    """Where a file is that is written by this name: a link is not replaced, but what it points to."""
    target = Path(os.path.realpath(file))
    if target.is_symlink():
        raise Refused(f"{file}: is a link that leads back to itself")
    return target


def _why_not(error: OSError, folder: Path) -> str:
    """Why no file can be made in a folder that is there."""
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"you may not write in the folder {folder}"
    if error.errno in (errno.ENOENT, errno.EROFS):  # of /proc, which says that it has no such file
        return f"the folder {folder} takes no files"
    return error.strerror or str(error)


def write_whole(file: Path, content: str | bytes, *, force: bool) -> None:
    """Write `content`, text as UTF-8, into `file`, or into what it is a link to; it is as before until all is there.

    Raises `Refused` as `check_writable` does, and where the disk is full.
    """
    check_writable(file, force=force)
    target = _behind_links(file)
    descriptor, unfinished = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with open(descriptor, "wb") as opened:
            opened.write(content.encode("utf-8") if isinstance(content, str) else content)
        os.chmod(unfinished, target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask())
        os.replace(unfinished, target)
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
