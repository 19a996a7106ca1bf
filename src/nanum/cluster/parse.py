"""From a table of a TOML file to a `Cluster`: one mapping, for shipped hardware and users' files alike.

A cluster file, with everything that it may hold:

    name = "lab"                     # the file's own name where left out
    nodes = 4
    gpus_per_node = 8                # one NVLink domain
    chip = "h100-sxm"                # one that `nanum clusters` lists, or a [chip] table of one's own
    launch_blocking = false          # true where CUDA_LAUNCH_BLOCKING=1 is set: no kernel is launched while one runs

    [inter_node]                     # what is left out here is the default link's, and listed as assumed
    name = "InfiniBand NDR"
    bandwidth = "400 Gb/s"           # of one GPU, one direction
    efficiency = { value = 0.9, tag = "measured", source = "nccl-tests all_gather, 8 GiB" }
    latency = { value = 5, unit = "us", tag = "measured", source = "the same, 8 B" }
    group_size = 32                  # ranks that the efficiency was measured at

    [intra_node]                     # the same keys; what is left out is the chip's own

    [host]                           # the same keys but group_size, of a GPU's link to its host's memory, and
    memory_bandwidth = "76.8 GB/s"   # its share of that memory's; what is left out is the chip's own

    [chip]                           # in the place of a chip's name; then [intra_node] must be whole
    name = "mine"
    memory = "81559 MiB"             # what the driver reports
    memory_bandwidth = "3.35 TB/s"
    multiprocessors = 132
    peak = { bf16 = "989 TFLOPS", fp32 = "67 TFLOPS" }    # dense
    best = { bf16 = "794.5 TFLOPS" }                      # the best measured matmul; may be left out

    [measured]                       # kernels and exchanges over grids of sizes: see `nanum.cluster.grids`; written by
                                     # `nanum measure`

    [in_a_step]                      # what steps observed on the machine say of it: see `nanum.cluster.observed`;
                                     # written by `nanum predict --observed`

A number is a text with its unit, which is then tagged assumed, "stated in" the file; or a table of `value`, `unit`,
`tag` (datasheet, measured, assumed, derived) and `source`. Unknown keys are refused.
"""

from __future__ import annotations

from nanum.cluster import Chip, Cluster, Host, Link, Quantity, Ramp
from nanum.cluster.grids import measured
from nanum.cluster.measured import Sweep
from nanum.cluster.observed import in_a_step
from nanum.cluster.tables import DATA, Table, chip_table, host_table, link_tables, quantity, ramp_table, read_toml
from nanum.errors import Refused


def from_table(table: Table, name: str, *, where: str) -> Cluster:
    """`table`, as read from a user's TOML file, as a `Cluster` called `name` unless it says otherwise.

    Raises `Refused` with every reason, each led by `where`.
    """
    from nanum.cluster import schema  # brings in pydantic, which a preset need not wait for

    reasons = schema.reasons(table)
    if reasons:
        raise Refused(f"{where}: {reason}" for reason in reasons)
    return trusted(table, name, where=where)


def trusted(table: Table, name: str, *, where: str) -> Cluster:
    """As `from_table`, for a table that is known to be good."""
    chip = chip_table(table["chip"])
    intra_node, inter_node = link_tables(table)
    cluster = Cluster(
        name=table.get("name", name),
        nodes=table["nodes"],
        gpus_per_node=table["gpus_per_node"],
        chip=_chip(chip, where),
        intra_node=_link(intra_node, "intra_node", where),
        inter_node=_link(inter_node, "inter_node", where),
        measured=measured(table.get("measured")),
        host=_host(host_table(table), where),
        launch_blocking=table.get("launch_blocking", False),
        in_a_step=in_a_step(table.get("in_a_step"), where),
    )
    return Cluster(**{**vars(cluster), "assumptions": tuple(_assumptions(cluster))})


def default_network() -> Link:
    """The link between nodes that nobody named."""
    return _link(read_toml(DATA / "inter_node.toml"), "inter_node", "inter_node.toml")


def default_host(chip: str | None) -> Host:
    """What a GPU has beside it where nobody says: a shipped chip's own, or the default's."""
    return _host(host_table({"chip": {} if chip is None else chip}), "host.toml")


def _chip(table: Table, where: str) -> Chip:
    return Chip(
        name=table["name"],
        peak_flops_per_second=_by_dtype(table["peak"], where),
        best_flops_per_second=_by_dtype(table.get("best", {}), where),
        memory_bytes=quantity(table["memory"], "bytes", where),
        memory_bytes_per_second=quantity(table["memory_bandwidth"], "bytes_per_second", where),
        multiprocessors=quantity(table["multiprocessors"], "count", where),
    )


def _by_dtype(table: Table, where: str) -> dict[str, Quantity]:
    return {dtype: quantity(raw, "flops_per_second", where) for dtype, raw in table.items()}


def _link(table: Table, tier: str, where: str) -> Link:
    return Link(
        name=table.get("name", tier),
        bytes_per_second=quantity(table["bandwidth"], "bytes_per_second", where),
        efficiency=quantity(table["efficiency"], "ratio", where),
        latency_seconds=quantity(table["latency"], "seconds", where),
        group_size=table["group_size"],
        ramp=_ramp(table.get("ramp")),
    )


def _ramp(named: Table | None) -> Ramp | None:
    """The shipped table that a chip's link names; measured on that very chip, or borrowed."""
    if named is None:
        return None
    table = ramp_table(named["of"])
    none: Table = {"ranks": (), "faster": ()}
    switch = table.get("in_switch", none) if named.get("in_switch", True) else none
    finer = table.get("finer", {"sweeps": [], "source": ""})
    return Ramp(
        *_sweep(table),
        tuple(Sweep(*_sweep(each)) for each in finer["sweeps"]),
        tuple(zip(switch["ranks"], switch["faster"], strict=True)),
        named["tag"],
        "; ".join(filter(None, (table["source"], finer["source"]))),
    )


def _sweep(table: Table) -> tuple[int, tuple[float, ...], tuple[float, ...]]:
    return table["ranks"], tuple(map(float, table["payload_bytes"])), tuple(table["seconds"])


def _host(table: Table, where: str) -> Host:
    return Host(_link(table, "host", where), quantity(table["memory_bandwidth"], "bytes_per_second", where))


def _assumptions(cluster: Cluster) -> list[tuple[str, Quantity]]:
    """What is assumed about a cluster, as far as it is used: a link that joins nothing is not."""
    chip = cluster.chip
    stated = [(f"{chip.name}: peak {dtype}", value) for dtype, value in chip.peak_flops_per_second.items()]
    stated += [(f"{chip.name}: best {dtype} matmul", value) for dtype, value in chip.best_flops_per_second.items()]
    stated += [
        (f"{chip.name}: memory", chip.memory_bytes),
        (f"{chip.name}: memory bandwidth", chip.memory_bytes_per_second),
        (f"{chip.name}: multiprocessors", chip.multiprocessors),
    ]
    if cluster.gpus_per_node > 1:
        stated += _of_link(cluster.intra_node, "link in a node", cluster.gpus_per_node)
    if cluster.nodes > 1:
        stated += _of_link(cluster.inter_node, "link between nodes", cluster.gpus)
    return [(what, value) for what, value in stated if value.tag == "assumed"]


def _of_link(link: Link, tier: str, gpus: int) -> list[tuple[str, Quantity]]:
    """Its numbers; an efficiency is assumed to hold in a larger group than the one that it was measured at."""
    efficiency = link.efficiency
    if gpus > link.group_size and efficiency.tag != "assumed":
        efficiency = Quantity(efficiency.value, "assumed", f"as at {link.group_size} GPUs: {efficiency.source}")
    return [
        (f"{tier} ({link.name}): bandwidth of one GPU", link.bytes_per_second),
        (f"{tier} ({link.name}): efficiency at {gpus:,} GPUs", efficiency),
        (f"{tier} ({link.name}): latency of one hop", link.latency_seconds),
    ]
