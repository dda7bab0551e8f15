"""What ships compiles for real GPUs without spills, and costs little more than softmax; no GPU needed."""

import pytest
import torch
from kernels_report.report import compile_rows, jobs, main, plot_speed, speed_rows
from softpick import NORMALIZERS
from softpick.tiles import ARCHITECTURES, INTERPRETER, KERNELS, TileConfig, architecture, tiles

HEAD_DIMS = (64, 128)
NVIDIA = [arch for arch in ARCHITECTURES if arch.startswith("sm_")]
QUICK = [(arch, "bf16") for arch in NVIDIA] + [("sm_80", "fp16"), ("sm_90", "fp16")]
SLOW = [(arch, "fp16") for arch in NVIDIA if (arch, "fp16") not in QUICK] + [("gfx942", "bf16"), ("gfx942", "fp16")]


@pytest.mark.parametrize(
    ("arch", "dtype"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_no_shipped_config_spills_or_overflows_shared_memory(arch, dtype):
    check_resources(compile_rows(list(jobs([arch], HEAD_DIMS, [dtype])), loops=False, workers=1))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_nor_do_those_of_other_head_dims_and_of_float32(arch):
    work = [*jobs([arch], (48, 96, 192, 256), ["bf16"]), *jobs([arch], (64, 128, 256), ["fp32"])]
    check_resources(compile_rows(work, loops=False, workers=1))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_nor_do_those_with_a_padding_mask(arch):
    check_resources(compile_rows(list(jobs([arch], HEAD_DIMS, ["bf16"])), loops=False, key_mask=True, workers=1))


@pytest.mark.parametrize("normalizer", [name for name in NORMALIZERS if name != "softpick"])
@pytest.mark.parametrize(
    "arch",
    [arch if arch in ("sm_80", "sm_90") else pytest.param(arch, marks=pytest.mark.slow) for arch in ARCHITECTURES],
)
def test_nor_do_those_of_the_other_normalizers(arch, normalizer):
    work = list(jobs([arch], HEAD_DIMS, ["bf16"]))
    check_resources(compile_rows(work, loops=False, workers=1, normalizer=normalizer))


def check_resources(rows):
    assert {row["kernel"] for row in rows} == {"forward", "decode", "key_value", "query"}
    for row in rows:
        assert row["spills"] == 0, row
        assert row["shared KiB"] * 1024 <= ARCHITECTURES[row["arch"]].shared_block, row
        assert 0 < row["occupancy"] <= 1, row


# sm_90: softpick's loop has 361 instructions, softmax's 288 (294 before it shared its template: six register moves).
@pytest.mark.parametrize(("arch", "allowed"), [("sm_80", 1.20), ("sm_90", 1.26)])
def test_the_main_loop_is_hardly_longer_than_softmaxs(arch, allowed):
    work = [job for job in jobs([arch], (64,), ["bf16"]) if job[0] == "forward"]
    for row in compile_rows(work, workers=1):
        assert row["softmax's"] > 100  # the loop was found
        assert 1 < row["ratio"] <= allowed, row


def test_a_spill_would_be_seen():
    (row,) = compile_rows([("forward", "sm_80", 128, "bf16", TileConfig(128, 128, 4, 2))], loops=False, workers=1)
    assert row["spills"] > 0


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
    with pytest.raises(ValueError, match=r"this GPU is sm_75: use backend='reference'"):
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
def test_the_report_says_what_it_could_not_measure(capsys):
    main(["--arch", "sm_80", "--head-dim", "32", "--dtype", "fp16"])
    printed = capsys.readouterr().out
    assert "registers" in printed
    assert "No CUDA GPU here: no times." in printed
