"""Bytes that really came through this process's sockets, as the kernel counts them (Linux, without privileges)."""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys

_TCP_INFO_BYTES = 256
_BYTES_RECEIVED = 128  # offset of tcpi_bytes_received, a u64 (include/uapi/linux/tcp.h)


def received_bytes() -> int | None:
    """The sum over the TCP sockets that are open; None where the kernel does not tell."""
    if sys.platform != "linux":
        return None
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as s:
                if s.type == socket.SOCK_STREAM and s.family in (socket.AF_INET, socket.AF_INET6):
                    told = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                    if len(told) < _BYTES_RECEIVED + 8:
                        return None
                    total += struct.unpack_from("Q", told, _BYTES_RECEIVED)[0]
        except OSError:  # closed meanwhile, or not a socket of ours
            continue
    return total
