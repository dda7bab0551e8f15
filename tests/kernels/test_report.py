"""The kernels compile for real GPUs without spills, and cost little more than softmax; no GPU needed."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernels_report.report import (
    ON_PAGE,
    CompileJob,
    compile_rows,
    jobs,
    loop_table,
    main,
    page_lines,
    parse,
    register_table,
)
from kernels_report.speed import plot_speed, speed_rows
from softpick import NORMALIZERS
from softpick.tiles import ARCHITECTURES, INTERPRETER, KERNELS, TileConfig, architecture, tiles

HEAD_DIMS = (64, 128)
PAGE = Path(__file__).parents[2] / "docs" / "attention.md"
QUICK = [  # compiled by every test run; the others take minutes
    ("sm_90", 64, ["softmax", "softpick"], ["forward", "decode", "key_value"]),
    ("sm_90", 128, ["softpick"], ["query"]),
]
TARGETS = [
    *QUICK,
    *(
        pytest.param(*target, list(NORMALIZERS), KERNELS, marks=pytest.mark.slow)
        for target in itertools.product(ARCHITECTURES, HEAD_DIMS)
    ),
]
# Instructions of softpick's forward loop at head dim 64 over softmax's: 437 to 365 and 361 to 288.
SOFTPICK_RATIO = {"sm_80": 1.20, "sm_90": 1.26}


SPILLING = CompileJob("forward", "sm_80", 128, "bf16", TileConfig(128, 128, 4, 2))
SMALL = CompileJob("forward", "sm_80", 32, "fp16", TileConfig(64, 32, 4, 2))


@pytest.fixture(scope="module")
def compiled():
    """Returns the rows of jobs. What every test run compiles is compiled together: a process starts for seconds."""
    quick = [*(job for target in QUICK for job in shipped(*target)), SPILLING, SMALL]
    rows = dict(zip(quick, compile_rows(quick, workers=1), strict=True))

    def look_up(work):
        if all(job in rows for job in work):
            return [rows[job] for job in work]
        return list(compile_rows(work, workers=1))

    return look_up


def shipped(arch, head_dim, normalizers, kernels):
    return list(jobs([arch], [head_dim], ["bf16"], normalizers, kernels=kernels))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("arch", "head_dim", "normalizers", "kernels"), TARGETS)
def test_the_kernels_do_not_spill_and_match_the_documentation(arch, head_dim, normalizers, kernels, compiled):
    rows = compiled(shipped(arch, head_dim, normalizers, kernels))
    check_resources(rows, kernels)
    page = documented_rows(head_dim)
    for line in page_lines(rows):
        cells = {column: str(cell) for column, cell in line.items()}
        there = any(cells.items() <= documented.items() for documented in page)
        assert there, f"docs/attention.md lacks {cells}: make kernels rewrites it with --write-docs"
    loops = {(row.job.kernel, row.job.normalizer): row.main_loop for row in rows[::-1]}  # of the first tiles
    assert min(loops.values()) > 100  # they were found
    if arch in SOFTPICK_RATIO and head_dim == 64:
        assert 1 < loops["forward", "softpick"] / loops["forward", "softmax"] <= SOFTPICK_RATIO[arch]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("options", [("fp16", False), ("bf16", True)], ids=["fp16", "padding mask"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_nor_do_those_of_float16_and_those_with_a_padding_mask(arch, options):
    dtype, key_mask = options
    check_resources(list(compile_rows(list(jobs([arch], HEAD_DIMS, [dtype], key_mask=key_mask)), False, workers=1)))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_nor_do_those_of_other_head_dims_and_of_float32(arch, normalizer):
    work = [
        *jobs([arch], (48, 96, 192, 256), ["bf16"], [normalizer]),
        *jobs([arch], (64, 128, 256), ["fp32"], [normalizer]),
    ]
    check_resources(list(compile_rows(work, loops=False, workers=1)))


def check_resources(rows, kernels=KERNELS):
    assert {row.job.kernel for row in rows} == set(kernels)
    for row in rows:
        assert row.spills == 0, row
        assert row.shared <= ARCHITECTURES[row.job.arch].shared_block, row
        assert 0 < row.occupancy <= 1, row


def documented_rows(head_dim):
    """Each line of the documentation's table for a head dim: its cells by column."""
    (made,) = ON_PAGE.findall(PAGE.read_text(encoding="utf-8"))
    (table,) = [part for part in made.split("Head dim ") if part.startswith(f"{head_dim}:")]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]


def test_a_spill_would_be_seen(compiled):
    (row,) = compiled([SPILLING])
    assert row.spills > 0


@pytest.mark.slow
def test_normalizers_stand_beside_softmax():
    names = ["softmax", "softpick"]
    rows = list(compile_rows(list(jobs(["sm_80"], [32], ["fp16"], names)), workers=1))
    loops, registers = loop_table(rows), register_table(rows)
    assert len(loops) == len(registers) == len(rows) / 2
    for softmax, softpick, line, resources in zip(rows[::2], rows[1::2], loops, registers, strict=True):
        assert line["softmax"] == str(softmax.main_loop)
        assert line["softpick"] == f"{softpick.main_loop} ({softpick.main_loop / softmax.main_loop:.2f})"
        assert [resources[name] for name in names] == [softmax.registers, softpick.registers]
        assert resources["spills"] == 0


def test_every_head_dim_and_dtype_has_tiles():
    for arch in (*ARCHITECTURES, INTERPRETER):
        for head_dim in range(1, 257):
            for itemsize in (2, 4):
                assert all(tiles(kernel, arch, head_dim, itemsize) for kernel in KERNELS)
    assert architecture(torch.device("cpu")) == INTERPRETER


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm_80"), ((8, 7), "sm_86"), ((9, 0), "sm_90"), ((10, 3), "sm_100"), ((12, 1), "sm_120")],
)
def test_a_gpu_gets_the_tiles_of_the_nearest_known_one(capability, arch, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert architecture(torch.device("cuda")) == arch


def test_an_old_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match=r"sm_75.*backend='reference'"):
        architecture(torch.device("cuda"))


def test_speed_is_measured_beside_softmax_and_plotted(tmp_path):
    rows = speed_rows("cpu", lengths=(32, 64), head_dims=(128,), dtype=torch.float32)
    assert [(row["direction"], row["length"]) for row in rows] == [
        ("forward", 32),
        ("backward", 32),
        ("forward", 64),
        ("backward", 64),
    ]
    assert all(row["softpick ms"] > 0 and row["softmax TFLOP/s"] > 0 for row in rows)
    plot_speed(rows, tmp_path / "kernels" / "speed.png", "a CPU")
    assert (tmp_path / "kernels" / "speed.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so only where there is no GPU")
def test_the_report_says_what_it_does_and_what_it_could_not_measure(capsys, monkeypatch, compiled):
    (row,) = compiled([SMALL])
    monkeypatch.setattr("kernels_report.report.compile_rows", lambda work: (replace(row, job=job) for job in work))
    main(["--arch", "sm_80", "--head-dim", "32", "--dtype", "fp16"])
    printed = capsys.readouterr().out
    assert printed.startswith("20 kernels")
    assert [line.split()[0] for line in printed.splitlines()[1:5]] == ["[", "[", "[", "["]
    assert "20 kernels compiled, 0 of them with spills" in printed
    assert all(name in printed for name in NORMALIZERS)
    assert "No CUDA GPU here: no times." in printed


def test_by_default_it_is_short_and_all_is_all():
    options = parse([])
    assert (options.arch, options.head_dim, options.dtype) == (["sm_80", "sm_90"], [64], ["bf16"])
    options = parse(["--arch", "all"])
    assert (options.arch, options.head_dim) == (list(ARCHITECTURES), [64, 128])
    assert parse(["--arch", "all", "--head-dim", "64"]).head_dim == [64]
    with pytest.raises(SystemExit):
        parse(["--write-docs", "--padding"])
