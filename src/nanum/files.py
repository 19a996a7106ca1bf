"""A user's file, read no further than it may be long."""

from __future__ import annotations

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
