"""`nanum measure`: what it refuses before it measures, what it leaves when it is interrupted, and what it measures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import Run
from test_documents import covers, documented, leaves

from nanum import processes
from nanum.cluster import Quantity, load
from nanum.measure import machine, summary


def reasons(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 2
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_every_reason_before_anything_is_measured(nanum: Run, tmp_path: Path) -> None:
    (tmp_path / "there.toml").write_text("mine")
    said = reasons(nanum("measure", "-o", str(tmp_path / "there.toml"), "--device", "abacus", "--chip", "h100-sxm"))
    assert len(said) == 3
    assert "--chip and --cluster are for --from-nccl-tests" in said[0]
    assert said[1] == "nanum: --device abacus: must be auto, cuda, cpu"
    assert "there already (--force replaces it)" in said[2]
    assert (tmp_path / "there.toml").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "-o FILE.toml is missing"),
        (["-o", "cluster.json"], "must be a name that ends in .toml"),
        (["-o", ""], "-o '': must be a name"),
        (["-o", f"{'a' * 201}.toml"], "longer than 200 characters"),
        (["-o", "/nowhere/at/all.toml"], "/nowhere/at"),
        (["-o", "a.toml", "--from-nccl-tests"], "which logs? Name their files"),
        (["-o", "a.toml", "--from-nccl-tests", "a.log"], "needs either --chip NAME or --cluster CLUSTER"),
        (["-o", "a.toml", "--from-nccl-tests", "a.log", "--chip", "h100"], "unknown chip 'h100'"),
        (
            ["-o", "a.toml", "--from-nccl-tests", "a.log", "--chip", "b200", "--quick"],
            "--from-nccl-tests measures nothing",
        ),
    ],
)
def test_what_cannot_be_asked(nanum: Run, tmp_path: Path, words: list[str], said: str) -> None:
    assert any(said in line for line in reasons(nanum("measure", *words, cwd=tmp_path)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0 if hasattr(os, "geteuid") else True, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_said_first(nanum: Run, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "you may not write in the folder" in reasons(nanum("measure", "-o", str(tmp_path / "a.toml")))[0]


def test_without_torch_the_extra_is_named(tmp_path: Path) -> None:
    hidden = "import sys; from nanum import processes; processes.torch_is_missing = lambda: True"
    code = f"{hidden}; from nanum.cli import main; sys.argv = ['nanum', 'measure', '-o', 'a.toml']; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "nanum[torch]" in reasons(done)[0]


def test_logs_become_a_file_that_predict_takes(nanum_process: Run, tmp_path: Path) -> None:
    from test_nccl_tests import log, row

    (tmp_path / "all_reduce_perf.log").write_text(log(8, 8, [row(1024, 20.0), row(2**30, 5000.0)]))
    words = ["--from-nccl-tests", "all_reduce_perf.log", "--chip", "h100-sxm", "-o", "lab.toml"]
    done = nanum_process("measure", *words, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    rows = documented("measure")
    assert {leaf for leaf in leaves(printed) if not any(covers(row, leaf) for row in rows)} == {
        "beside"
    }  # no ranks were busy: it is null, as is `together`
    (exchange,) = printed["exchanges"]
    assert (exchange["kind"], exchange["ranks"], exchange["nodes"]) == ("all_reduce", 8, 1)
    assert exchange["algbw_bytes_per_second"][1] == pytest.approx(2**30 / 5e-3)
    assert exchange["busbw_bytes_per_second"][1] == pytest.approx(2**30 / 5e-3 * 2 * 7 / 8)  # doc/PERFORMANCE.md
    predicted = nanum_process("predict", "gpt2", "lab.toml", "--json", cwd=tmp_path)
    assert predicted.returncode == 0, predicted.stderr
    assert json.loads(predicted.stdout)["cluster"]["name"] == "lab"
    shown = nanum_process("measure", *words, "--force", cwd=tmp_path)
    assert shown.stdout.splitlines()[-2].split()[-2:] == ["215", "376"]  # GB/s, of the algorithm and of the bus
    assert "all_reduce_perf.log: 8 ranks on 1 node" in shown.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all_reduce_perf.log", "lab.toml"]


def test_steps_that_were_observed_before_are_not_forgotten_in_silence(nanum: Run, tmp_path: Path) -> None:
    from test_nccl_tests import log, row

    (tmp_path / "all_reduce_perf.log").write_text(log(8, 8, [row(1024, 20.0), row(2**30, 5000.0)]))
    lab, logs = str(tmp_path / "lab.toml"), str(tmp_path / "all_reduce_perf.log")
    assert nanum("predict", "llama-3.1-8b", "1x8xh100-sxm", "--observed", "71s", "-o", lab).returncode == 0
    done = nanum("measure", "--from-nccl-tests", logs, "--cluster", lab, "-o", lab, "--force")
    assert done.returncode == 0
    assert "warning: lab: what steps said of it" in done.stderr


# What is measured for real.

if processes.torch_is_missing():
    pytest.skip("what is measured is measured with torch", allow_module_level=True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_interrupted_measurement_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nanum", "measure", "-o", "a.toml", "--device", "cpu"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"TMPDIR": str(tmp_path)}, **pipes)  # type: ignore[call-overload]
    measuring: list[str] = []
    while len(measuring) < 2:  # the process that measures, and its rank
        assert started.poll() is None
        time.sleep(0.05)
        measuring = [line for line in everything() if str(tmp_path) in line]
    started.send_signal(signal.SIGINT)
    out, said = started.communicate(timeout=60)
    assert (started.returncode, out, said) == (130, "", "nanum: interrupted\n")
    assert [line for line in everything() if str(tmp_path) in line] == []
    assert list(tmp_path.iterdir()) == []


def everything() -> list[str]:
    """The environment of everything that runs `nanum.live.measure`: TMPDIR tells whose it is."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if "nanum.live.measure" in (process / "cmdline").read_text():
                found.append((process / "environ").read_text(errors="replace"))
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def jobs() -> list:
    import torch

    from nanum.live.grids import Plan
    from nanum.live.measure_kernels import jobs as all_jobs

    return all_jobs(Plan(torch.device("cpu"), True, 1e9))


def test_every_grid_has_as_many_points_as_its_sizes_say(jobs: list) -> None:
    from nanum.cluster.grids import AXES

    assert {job.subject for job in jobs} == {"matmul", "kernel", "attention", "optimizer"}
    for job in jobs:
        points = 1
        for axis in AXES[job.subject]:
            points *= len(job.sizes[axis])
        assert len(job.points) == points
        assert len(job.sizes[AXES[job.subject][0]]) >= 1


def test_every_kernel_runs(jobs: list) -> None:
    for job in jobs:
        job.points[0]()()


def test_a_memory_bound_kernel_counts_what_it_reads_and_writes(jobs: list) -> None:
    """Against what PyTorch's own tensors have, where a Program counts neither more nor less."""
    as_held = {"add", "mul", "copy", "pow", "silu", "d_silu", "gelu", "log_softmax", "log_softmax_backward", "to_float"}
    for job in jobs:
        if job.subject == "kernel" and job.keys["name"] in as_held:
            assert [turns().bytes for turns in job.points[:2]] == job.sizes["bytes"][:2]


def test_the_order_of_operands_is_that_of_a_linear_layer_s_three_products() -> None:
    """y = x W^T, dx = dy W and dW = dy^T x, of [m, n] = [4, 6] and k = 5: how PyTorch's operands lie in each."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from nanum.live.measure_kernels import ORDERS

    def strides(run):
        seen = []

        class See(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func is torch.ops.aten.mm.default:
                    seen.append(tuple("n" if a.is_contiguous() else "t" for a in args))
                return func(*args, **(kwargs or {}))

        with See():
            run()
        return seen

    x, linear = torch.rand(4, 5, requires_grad=True), torch.nn.Linear(5, 6, bias=False)
    real = strides(lambda: torch.autograd.grad(linear(x), (x, linear.weight), torch.rand(4, 6)))
    ours = {}
    for order, (shapes, multiply) in ORDERS.items():
        operands = [torch.rand(shape) for shape in shapes(4, 6, 5)]
        (ours[order],) = strides(lambda multiply=multiply, operands=operands: multiply(*operands))
    assert real[0] == ours["nt"]
    assert {real[1], real[2]} == {ours["nn"], ours["tn"]}


def test_summaries_and_quiet_samples() -> None:
    from nanum.live.sampling import quietest, summary

    assert summary([3.0]) == (3.0, 3.0, 3.0)
    assert summary([float(i) for i in range(1, 12)]) == (6.0, 2.0, 10.0)
    assert quietest([1.0, 2.0, 1.0], [0.0, 1.9, 0.05]) == [1.0, 1.0]
    assert quietest([1.0, 2.0, 3.0, 4.0], [0.9, 0.3, 2.9, 3.9]) == [2.0, 1.0]  # none was quiet enough: the quieter half


def test_a_document_becomes_a_cluster() -> None:
    def grid(subject: str, seconds: list[float], **more: object) -> dict[str, object]:
        return {
            "subject": subject,
            "seconds": seconds,
            "low_seconds": seconds,
            "high_seconds": seconds,
            "repeats": 3,
            **more,
        }

    document = {
        "machine": {
            "name": "a CPU", "kind": "cpu", "devices": 4, "memory_bytes": 2**33, "multiprocessors": 1, "streams": False,
            "date": "2026-11-29", "libraries": {"torch": "2.13.0"},
        },
        "quick": True,
        "load": 0.5,
        "operation_seconds": 3.14159e-6,
        "together": {"ranks": 4, "matmul": 1.23456},
        "beside": {"ranks": 4, "compute": 1.5, "exchange": 1.0},
        "grids": [
            grid("matmul", [1e-3, 4e-3], dtype="fp32", operands="nt", m=[64], n=[64, 1024], k=[512]),
            grid("kernel", [1e-3, 4e-3], dtype="fp32", name="copy", bytes=[2**20, 2**25]),
            grid("exchange", [1e-3, 1e-2], kind="all_gather", ranks=4, nodes=1, bytes=[1024, 2**26]),
            grid("exchange", [6e-3, 4e-2], kind="all_reduce", ranks=4, nodes=1, bytes=[1024, 2**26]),
        ],
    }  # fmt: skip
    found = machine.cluster(document, "here", "0.1.0")
    assert (found.nodes, found.gpus_per_node, found.chip.name) == (1, 4, "a CPU (1 core)")
    assert found.chip.best_flops_per_second["fp32"].value == pytest.approx(2 * 64 * 1024 * 512 / 4e-3, rel=1e-3)
    assert found.chip.memory_bytes_per_second.value == pytest.approx(2**25 / 4e-3, rel=1e-3)
    assert found.intra_node.bytes_per_second.value == pytest.approx(2**26 * 3 / 4 / 1e-2, rel=1e-3)
    assert found.intra_node.latency_seconds.value == pytest.approx(1e-3)  # 6 ms in the six steps of a ring of four
    assert found.measured.operation_seconds is not None
    source = found.measured.operation_seconds.source
    assert all(word in source for word in ("2026-11-29", "4 x a CPU", "one thread a rank", "torch 2.13.0", "--quick"))
    assert not found.measured.streams
    assert summary(found)["together"] == {"ranks": 4, "matmul": 1.235}


def test_what_a_tiny_step_takes_beyond_its_kernels_is_the_host_s_own() -> None:
    """The prediction of the tiny model plus so much for each parameter and exchange: that much is found."""
    from dataclasses import asdict, replace

    from nanum.cluster.measured import Framework, Measured
    from nanum.live.measure_framework import JOB, TINY, WAYS
    from nanum.prediction import predict

    bare = replace(load("1x2xh100-sxm"), measured=Measured(streams=False))
    given = {"parameter": 1e-4, "sharded_parameter": 1e-3, "unit": 2e-3, "bucket": 3e-3, "redistribution": 4e-3}
    known = {work: Quantity(seconds, "measured", "a test") for work, seconds in given.items()}
    told = replace(bare, measured=replace(bare.measured, framework=Framework(**known)))
    runs = []
    for work, layout in WAYS.items():
        alone = replace(told, gpus_per_node=int(layout.world))
        prediction = predict(TINY, JOB, alone, layout, engine="torch")
        optimizer = float(prediction.stage_times[0].optimizer_seconds)
        update = prediction.time.optimizer_seconds
        parts = {"backward_seconds": prediction.time.step_seconds - optimizer, "optimizer_seconds": update}
        nouns = {"model": asdict(TINY), "job": asdict(JOB), "layout": asdict(layout)}
        runs.append({"work": work, **nouns, **parts})
    assert machine.overhead_seconds({"framework": runs}, bare) == pytest.approx(given, rel=1e-6)


@pytest.mark.slow
def test_this_machine_becomes_a_cluster_file(nanum_process: Run, tmp_path: Path) -> None:
    """The whole of it, quick. Nothing is said of how long it takes."""
    done = nanum_process(
        "measure", "-o", "here.toml", "--device", "cpu", "--quick", "--json", cwd=tmp_path, timeout=1200
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    cores = len(os.sched_getaffinity(0))
    assert printed["cluster"]["gpus_per_node"] == cores
    if cores > 1:
        rows = documented("measure")
        assert {leaf for leaf in leaves(printed) if not any(covers(row, leaf) for row in rows)} == set()
        assert {row for row in rows if not any(covers(row, leaf) for leaf in leaves(printed))} == set()
    assert {e["kind"] for e in printed["exchanges"]} == (
        {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"} if cores > 1 else set()
    )
    cluster = load(str(tmp_path / "here.toml"))
    assert {"fp32", "bf16"} <= {dtype for dtype, _ in cluster.measured.matmul}
    predicted = nanum_process(
        "predict", "gpt2", "here.toml", "--engine", "torch", "--precision", "fp32", "--dp-replicate", str(cores),
        "--dp-shard", "1", "--global-batch-size", str(cores), "--json", cwd=tmp_path,
    )  # fmt: skip
    assert predicted.returncode in (0, 1), predicted.stderr
    document = json.loads(predicted.stdout)
    assert document["time"]["step_seconds"] > 0
    assert {entry["tag"] for entry in document["assumptions"] if entry["what"].startswith("matmul")} == {"measured"}
    assert [path.name for path in tmp_path.iterdir()] == ["here.toml"]
