"""Seconds of what a device's host has to do with a step: copies over their link, and updates in the host's memory."""

from __future__ import annotations

from collections.abc import Collection

from nanum.cluster import Cluster, Host
from nanum.cluster import Quantity as Stated
from nanum.program import Collective, Compute, Quantity


def _host(cluster: Cluster) -> Host:
    if cluster.host is None:
        raise ValueError(f"cluster {cluster.name} states no link to its host's memory")
    return cluster.host


def copy_seconds(cluster: Cluster, node: Collective) -> Quantity:
    """Seconds of `calls` copies of `payload_bytes` together: a latency each, and the bytes at what the link reaches.

    Raises:
        ValueError: the cluster states no host.
    """
    link = _host(cluster).link
    return node.calls * link.latency_seconds.value + node.payload_bytes / (
        link.bytes_per_second.value * link.efficiency.value
    )


def update_seconds(cluster: Cluster, node: Compute) -> Quantity:
    """Seconds of work on the host that reads and writes `bytes_moved`: as fast as its memory, and so the least.

    Raises:
        ValueError: the cluster states no host.
    """
    return node.bytes_moved / _host(cluster).memory_bytes_per_second.value


def host_assumptions(cluster: Cluster, used: Collection[str]) -> list[tuple[str, Stated, str]]:
    """What those rest on, as far as they were asked for: what, its value, its unit."""
    host = cluster.host
    stated: list[tuple[str, Stated, str]] = []
    if host is not None and "host link" in used:
        link = host.link
        stated += [
            (f"{link.name} to the host, one direction of a GPU", link.bytes_per_second, "bytes_per_second"),
            (f"{link.name} to the host, what large copies reach of it", link.efficiency, "ratio"),
            (f"{link.name} to the host, latency of a copy", link.latency_seconds, "seconds"),
        ]
    if host is not None and "host memory" in used:
        bandwidth = host.memory_bytes_per_second
        stated.append(("the host's memory, a GPU's share of its bandwidth", bandwidth, "bytes_per_second"))
    return stated
