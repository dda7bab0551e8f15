"""The doctor: what it reports, and that a broken kernel or quantizer fails."""

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pynvml
import pytest
import softpick
import torch

from qbench.attention.kinds import ATTENTIONS
from qbench.cli import main
from qbench.doctor import checks as self_check
from qbench.doctor import report as doctor
from qbench.doctor.report import CheckResult, Package, run_checks
from qbench.quantizers import declaration
from qbench.quantizers.options import quantizer, quantizers
from qbench.recipe.cells import load_recipe
from qbench.records.audit import AuditError

from ..fake_gpus import Driver, a100s, driver

ROOT = Path(__file__).parents[2]
__all__ = ["driver"]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "has_cuda", lambda: False)


def report(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict:
    assert main(["doctor", "--json", *arguments]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("no_gpu")
class TestReport:
    def test_it_has_the_machine_the_packages_and_the_methods(self, capsys: pytest.CaptureFixture[str]) -> None:
        found = report(capsys)
        assert found["device"] == "cpu"
        assert found["machine"]["cores"] >= 1
        assert {p["name"] for p in found["packages"]} >= {"torch", "transformers", "lm-eval", "matplotlib"}
        assert {m["name"]: m["widths"] for m in found["methods"]} == {
            m: list(own.widths) for m, own in quantizers().items()
        }
        assert [a["name"] for a in found["attention"] if a["runs"]] == ["cpu", "sdpa", "reference"]
        assert found["checks"] is None  # without CUDA, only with --checks

    def test_a_missing_package_is_1_and_says_what_to_install(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        version = doctor.installed_version
        monkeypatch.setattr(doctor, "installed_version", lambda name: None if name == "hqq" else version(name))
        (hqq,) = [p for p in report(capsys, code=1)["packages"] if p["name"] == "hqq"]
        assert hqq["state"] == "pip install 'hqq==0.2.8.post1'"
        assert main(["doctor"]) == 1
        assert re.search("not installed: hqq", capsys.readouterr().out.splitlines()[-1])

    def test_a_missing_extra_is_0(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        version = doctor.installed_version
        monkeypatch.setattr(doctor, "installed_version", lambda name: None if name == "matplotlib" else version(name))
        (plots,) = [p for p in report(capsys)["packages"] if p["name"] == "matplotlib"]
        assert (plots["installed"], plots["extra"], plots["state"]) == (None, "plot", "pip install 'matplotlib>=3.9'")

    def test_a_version_that_is_not_the_pinned_one_is_reported(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        version = doctor.installed_version
        monkeypatch.setattr(doctor, "installed_version", lambda name: "1.0" if name == "torch" else version(name))
        states = {p["name"]: p["state"] for p in report(capsys)["packages"]}
        assert states["torch"].endswith("pip install 'torch==2.13.0'")
        assert states["transformers"] == ""

    def test_people_see_the_packages_that_compute_and_a_table_of_the_mismatched(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(doctor, "packages", lambda: [Package("torch", "==2.0", "2.0"), Package("psutil", "", "7")])
        assert main(["doctor"]) == 0
        said = capsys.readouterr().out
        assert re.search(r"\npackages  torch==2.0, all 2 packages .*--packages", said)
        assert "wanted" not in said
        assert main(["doctor", "--packages"]) == 0
        assert "\npsutil " in capsys.readouterr().out
        found = [Package("torch", "==2.0", "1.0"), Package("psutil", "", "7"), Package("ray", ">=2.9", None, "ray")]
        monkeypatch.setattr(doctor, "packages", lambda: found)
        assert main(["doctor"]) == 0
        said = capsys.readouterr().out
        assert "packages  torch==1.0, 1 of 2 packages" in said
        assert re.search("^torch +==2.0 +1.0 .*pip install 'torch==2.0'", said, re.M)
        assert "\npsutil " not in said

    def test_a_method_without_its_library_says_what_to_install(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(declaration, "find_spec", lambda name: None if name == "bitsandbytes" else find_spec(name))
        (bnb,) = [m for m in report(capsys)["methods"] if not m["runs"]]
        assert bnb["name"] == "bnb"
        assert "pip install bitsandbytes" in bnb["note"]
        monkeypatch.setattr(doctor, "run_group", lambda group, *_: [CheckResult(group, True, "")])
        assert [check.name for check in run_checks("cpu")] == ["attention", "gptq", "hqq", "rtn"]

    def test_a_gpu_that_cannot_be_used_is_reported(self, driver: Driver, capsys: pytest.CaptureFixture[str]) -> None:
        assert "no NVIDIA driver" in doctor.notes()[0]
        driver.has(a100s(1))
        assert "CPU build" in doctor.notes()[0]  # otherwise this machine has a GPU, which other tests cover
        assert "GPU       NVIDIA A100-SXM4-80GB, 80.0 GiB, driver 580.65.06" in doctor.render_report(doctor.examine())

    def test_a_failed_check_is_1(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        checks = [CheckResult("a kernel", False, "off by 0.5"), CheckResult("a quantizer", True, "fine")]
        monkeypatch.setattr(doctor, "run_checks", lambda device, *_: iter(checks))
        assert [c["ok"] for c in report(capsys, "--checks", code=1)["checks"]] == [False, True]
        assert main(["doctor", "--checks"]) == 1
        out = capsys.readouterr().out
        assert "FAILED  a kernel" in out
        assert all(fact in out.splitlines()[-1] for fact in ("1 of 2", "FAILED", "a kernel", "--report"))
        monkeypatch.setattr(doctor, "run_checks", lambda device, *_: iter(checks[1:]))
        assert main(["doctor", "--checks"]) == 0


def test_on_cuda_the_checks_run_by_default(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "has_cuda", lambda: True)
    monkeypatch.setattr(doctor, "run_checks", lambda device, *_: iter([CheckResult(f"on {device}", True, "")]))
    assert [c["name"] for c in report(capsys)["checks"]] == ["on cuda"]
    assert report(capsys, "--no-checks")["checks"] is None


@pytest.mark.parametrize(("method", "bits"), [("bnb", 8), ("hqq", 3), pytest.param("gptq", 3, marks=pytest.mark.slow)])
def test_a_quantizer_passes(method: str, bits: int) -> None:
    assert re.search(r"\d bits per weight, KL \d", self_check.check_quantizer(method, bits, "cpu", torch.float32))


@pytest.mark.parametrize("sabotage", ["nothing", "other bits"])
def test_a_broken_quantizer_is_caught(sabotage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hqq = quantizer("hqq")
    real = hqq.quantize_linears

    def broken(model: object, bits: int, *arguments: object, **options: object) -> None:
        if sabotage == "other bits":
            real(model, bits + 1, *arguments, **options)

    monkeypatch.setattr(hqq, "quantize_linears", broken)
    with pytest.raises(AuditError):
        self_check.check_quantizer("hqq", 3, "cpu", torch.float32)


def test_a_broken_model_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "logits within" in self_check.check_model(ATTENTIONS["softpick"], "cpu", torch.float32)
    real = softpick.normalized_attention

    def broken(q: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
        return real(q, *arguments, **options) * (1.01 if q.dtype == torch.float32 else 1)

    monkeypatch.setattr(softpick, "normalized_attention", broken)
    with pytest.raises(self_check.CheckFailedError, match="logits"):
        self_check.check_model(ATTENTIONS["softpick"], "cpu", torch.float32)


def test_broken_kernels_are_caught_and_a_crash_does_not_end_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes import a sabotaged copy of the kernels: one is slightly wrong, one kills its process."""
    shutil.copytree(ROOT / "kernels" / "softpick", tmp_path / "softpick")
    code = (tmp_path / "softpick" / "cpu.py").read_text()
    (tmp_path / "softpick" / "cpu.py").write_text(code + SABOTAGE)
    (tmp_path / "softpick" / "triton_op.py").write_text("import os\nos.abort()\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    cpu, triton = run_checks("cpu", groups=("attention",))
    assert (cpu.name, cpu.ok) == ("softpick cpu float32", False)
    assert all(fact in cpu.detail for fact in ("output of [1, 4, 2, 130, 130, 64]", "1.0e-02"))
    assert (triton.name, triton.ok) == ("softpick triton float32 (interpreter)", False)
    assert "SIGABRT" in triton.detail


SABOTAGE = """

_right = attention


def attention(q, *arguments):
    out, *rest = _right(q, *arguments)
    return out * 1.01, *rest
"""


def test_a_group_that_cannot_begin_is_a_failed_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no such torch')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    (check,) = run_checks("cpu", groups=("hqq",))
    assert (check.name, check.ok) == ("hqq", False)
    assert all(fact in check.detail for fact in ("code 1", "ImportError: no such torch"))


def test_a_group_that_hangs_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECK_TIMEOUT", 0.01)
    (check,) = run_checks("cpu", groups=("attention",))
    assert not check.ok
    assert "0.01 s" in check.detail


class TestOfARecipe:
    """What `make bench` checks before it fetches anything."""

    def test_only_what_it_uses_is_checked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        recipe = load_recipe(ROOT / "recipes" / "paper-340m.yaml")
        assert doctor.groups_of(recipe) == ("attention:softpick", "bnb:4,8", "gptq:2,3,4,8", "hqq:2,3,4,8")
        asked: list[object] = []
        monkeypatch.setattr(doctor, "run_checks", lambda *what: asked.append(what) or iter(()))
        monkeypatch.setattr(doctor, "why_not_cuda", lambda: "")
        assert doctor.doctor(recipe=recipe)
        assert asked == [("cuda", doctor.groups_of(recipe), "bfloat16")]

    def test_a_part_of_a_group(self) -> None:
        assert [name for name, _ in self_check.cases("hqq:3,4", "cpu")] == ["hqq 3 bits", "hqq 4 bits"]
        kinds = {name.split()[0] for name, _ in self_check.cases("attention:rectified", "cpu")}
        assert kinds == {"rectified"}

    def test_in_the_recipes_dtype(self, tmp_path: Path) -> None:
        self_check.main("attention:rectified", "cpu", str(tmp_path / "found.jsonl"), "float16")
        names = {json.loads(line)["name"] for line in (tmp_path / "found.jsonl").read_text().splitlines()}
        assert {name.partition("float16")[1] for name in names} == {"float16"}

    def test_a_failed_check_of_it_is_1(self, monkeypatch: pytest.MonkeyPatch) -> None:
        recipe = load_recipe(ROOT / "recipes" / "mini.yaml")
        checks = [CheckResult("softpick triton", False, "off")]
        monkeypatch.setattr(doctor, "run_checks", lambda *_: iter(checks))
        assert doctor.doctor(recipe=recipe)  # on the CPU, checks run only on request
        assert not doctor.doctor(True, recipe)

    @pytest.mark.parametrize("gpus", [0, 1])
    def test_a_recipe_for_cuda_without_a_usable_gpu_exits_with_1_and_a_reason(
        self, gpus: int, driver: Driver, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if gpus:
            driver.has(a100s(gpus))
            monkeypatch.setattr("qbench.gpus.torch_build", lambda: "2.13.0+cpu")
        assert main(["doctor", str(ROOT / "recipes" / "paper-340m.yaml")]) == 1
        last = capsys.readouterr().out.splitlines()[-1]
        assert all(part in last for part in ("paper-340m.yaml", "CPU build" if gpus else "no NVIDIA driver"))


@pytest.mark.usefixtures("no_gpu")
def test_the_report_file_has_the_tracebacks_and_nothing_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1234")
    found = {
        ("attention:softpick",): [CheckResult("a kernel", False, "off by 0.5", traceback="Traceback: line 7")],
        ("timings",): [CheckResult("matmul", True, "1.5 TFLOP/s")],
    }
    monkeypatch.setattr(doctor, "groups_of", lambda recipe: ("attention:softpick",))
    monkeypatch.setattr(doctor, "run_checks", lambda device, groups, *_: iter(found[groups]))
    assert main(["doctor", "--report", str(ROOT / "recipes" / "mini.yaml")]) == 1
    text = (tmp_path / "qbench-doctor.md").read_text()
    parts = ["GPU-1234", "torch", "transformers", "FAILED  a kernel", "Traceback: line 7", "1.5 TFLOP/s", "\ncc: "]
    assert [part for part in parts if part not in text] == []
    assert "hf_secret" not in text
    assert "qbench-doctor.md" in capsys.readouterr().err


def test_the_report_file_is_written_if_the_gpu_cannot_be_used(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.fails(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "run_checks", lambda *_: pytest.fail("there is nothing to try"))
    assert main(["doctor", "--report", str(ROOT / "recipes" / "paper-340m.yaml")]) == 1
    text = (tmp_path / "qbench-doctor.md").read_text()
    assert all(part in text for part in ("paper-340m.yaml", "Driver Not Loaded", "nvidia-smi: "))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("no_gpu")
def test_the_report_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real failure with its traceback, and real timings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "methods", lambda: [])  # quantizers are slow
    broken = shutil.copytree(ROOT / "kernels" / "softpick", tmp_path / "broken" / "softpick")
    (broken / "cpu.py").write_text((broken / "cpu.py").read_text() + SABOTAGE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'broken'}:{ROOT}")
    recipe = load_recipe(ROOT / "recipes" / "mini.yaml")
    assert not doctor.doctor(recipe=recipe, report_wanted=True)
    text = (tmp_path / "qbench-doctor.md").read_text()
    parts = ["FAILED  softpick cpu float32", "Traceback (most recent call last)", "TFLOP/s", "with backward"]
    assert [part for part in parts if part not in text] == []
