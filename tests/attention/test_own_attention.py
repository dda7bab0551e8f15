"""The attention in docs/attention.md runs, from the table or from another package, and is reported as slow."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qbench.attention.kinds import Attention, AttentionError
from qbench.attention.register import attention_function

from ..messages import states

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
(MODULE,) = re.findall(r"`my_attention\.py`:\n\n```python\n(.*?)^```", PAGE, re.M | re.S)

USE = """
import sys
import torch
from transformers import LlamaConfig
from qbench import load_checkpoint, save_checkpoint
from qbench.attention.kinds import attentions
from qbench.attention.register import attention_kind, build_model, set_attention
from qbench.doctor.checks import attention_cases
from qbench.doctor.report import examine, render_report

assert list(attentions())[-1] == "sigmoid", list(attentions())
config = LlamaConfig(vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, initializer_range=0.3)
set_attention(config, attentions()["sigmoid"])
save_checkpoint(build_model(config), sys.argv[1])
model = load_checkpoint(sys.argv[1], attention="sigmoid")
assert attention_kind(model) == "sigmoid"

# The first layer's attention by hand, from its definition.
seen = {}
attention = model.model.layers[0].self_attn
attention.register_forward_pre_hook(lambda _, args, given: seen.update(given), with_kwargs=True)
attention.o_proj.register_forward_pre_hook(lambda _, args: seen.update(out=args[0]))
ids = torch.arange(1, 10)[None]
with torch.no_grad():
    model(ids)
    h, (cos, sin) = seen["hidden_states"], seen["position_embeddings"]
    q, k, v = (p(h)[0].view(9, -1, 16).transpose(0, 1) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
    turn = lambda x: x * cos[0] + torch.cat([-x[..., 8:], x[..., :8]], -1) * sin[0]
    q, k, v = turn(q), turn(k).repeat_interleave(2, 0), v.repeat_interleave(2, 0)
    for t in range(9):
        x = q[:, t, None] @ k[:, : t + 1].mT / 4
        expected = torch.sigmoid(x - torch.tensor(t + 1.0).log()) @ v[:, : t + 1]
        torch.testing.assert_close(seen["out"][0, t], expected.flatten())

    padded, mask = torch.cat([torch.full((1, 3), 7), ids], 1), torch.tensor([[0] * 3 + [1] * 9])
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, 3:], model(ids).logits, atol=1e-4, rtol=0)

print(render_report(examine()))
for name, check in attention_cases("cpu"):
    if name.startswith("sigmoid"):
        print(name, check())
"""


def in_the_table(folder: Path) -> list[Path]:
    """A copy of qbench with the entry in the table."""
    (entry,) = re.findall(r"^SIGMOID = (Attention\(.*\))$", MODULE, re.M)
    shutil.copytree(ROOT / "qbench", folder / "qbench", ignore=shutil.ignore_patterns("__pycache__"))
    table = folder / "qbench" / "attention" / "kinds.py"
    code = table.read_text(encoding="utf-8")
    end = "        ),\n    )\n}\n"
    assert code.count(end) == 1
    table.write_text(code.replace(end, f"        ),\n        {entry},\n    )\n}}\n"), encoding="utf-8")
    return [folder]


def by_an_entry_point(folder: Path, value: str = "my_attention:SIGMOID") -> list[Path]:
    """An installed third-party package."""
    info = folder / "mine-0.3.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 0.3\n")
    (info / "entry_points.txt").write_text(f"[qbench.attentions]\nsigmoid = {value}\n")
    return [folder, ROOT]


def python(code: str, paths: list[Path], *arguments: object) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT / "kernels"]))}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=paths[0], env=env, capture_output=True, text=True, check=False)


def written(folder: Path, module: str = MODULE) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "my_attention.py").write_text(module, encoding="utf-8")
    return folder


@pytest.mark.parametrize("add", [pytest.param(in_the_table, marks=pytest.mark.slow), by_an_entry_point])
def test_the_attention_in_the_docs_runs_and_the_doctor_reports_that_it_is_slow(tmp_path: Path, add) -> None:
    entry_point = re.search(r'`sigmoid =\s+"(\S+)"`', PAGE)
    assert entry_point
    assert entry_point[1] == "my_attention:SIGMOID"
    done = python(USE, add(written(tmp_path / "code")), tmp_path / "saved")
    assert done.returncode == 0, done.stderr
    assert "my_attention:sigmoid_attention" in done.stdout
    assert re.search(r"^sigmoid function float32 within .*no kernel.*slow", done.stdout, re.M)
    assert re.search(r"^sigmoid model float32 logits within", done.stdout, re.M)


LIGHT = MODULE.replace("from softpick.reference import visible_keys\n", "")  # computes nothing, and imports no torch
LIST = "from qbench.attention.kinds import attentions; attentions()"
CALLED_SOFTPICK = LIGHT.replace('name="sigmoid"', 'name="softpick"')
WITHOUT_FUNCTION = re.sub(r', function="[^"]*"', "", LIGHT)


@pytest.mark.parametrize(
    ("module", "value", "facts"),
    [
        (LIGHT, "my_attention:NOTHING", ["sigmoid (my_attention:NOTHING)", "NOTHING"]),
        (LIGHT, "gone:SIGMOID", ["sigmoid (gone:SIGMOID)", "gone"]),
        (LIGHT, "my_attention:sigmoid_attention", ["function", "an Attention"]),
        (CALLED_SOFTPICK, "my_attention:SIGMOID", ["softpick (my_attention:SIGMOID)", "rename"]),
        (WITHOUT_FUNCTION, "my_attention:SIGMOID", ["'sigmoid'", "normalizer", "function"]),
    ],
)
def test_an_entry_point_that_is_wrong_is_named(tmp_path: Path, module: str, value: str, facts: list[str]) -> None:
    done = python(LIST, by_an_entry_point(written(tmp_path / "code", module), value))
    assert "AttentionError" in done.stderr
    assert all(fact in done.stderr.splitlines()[-1] for fact in facts), done.stderr


def test_a_function_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "without_function.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    kind = Attention("sigmoid", "Sigmoid", function="without_function:sigmoyd")
    with pytest.raises(AttentionError) as error:
        attention_function(kind)
    assert states(str(error.value), "sigmoid…'without_function:sigmoyd'…'module:function'")


def test_its_code_is_part_of_a_cells_key(tmp_path: Path) -> None:
    code = """
from qbench.recipe.cells import Cell, load_recipe, cells
from qbench.attention.kinds import ATTENTIONS
from dataclasses import replace
(cell, *_) = [cell for cell in cells(load_recipe("recipes/mini.yaml")) if cell.ref.attention == "softmax"]
plain = cell.packages(cell.attention)
assert "my_attention" not in plain
own = replace(cell, ref=cell.ref.model_copy(update={"attention": "sigmoid"}))
print(sorted(own.packages(own.attention).items() - plain.items()))
"""
    hashes = []
    # A declaration without a function counts as well, and so does one with computed fields.
    declared = "from qbench.attention.kinds import Attention\nSIGMOID = Attention('sigmoid', 'Sigmoid', {})\n"
    plain, gated = (declared.format(fields) for fields in ("normalizer='softmax'", "normalizer='softmax', gated=True"))
    by_a_file = "from pathlib import Path\n" + declared.format(
        "normalizer='softmax', gated=Path(__file__).with_name('gated').exists()"
    )
    modules = (LIGHT, LIGHT.replace("n.log()", "0"), plain, gated, by_a_file, by_a_file)
    for number, module in enumerate(modules):
        paths = by_an_entry_point(written(tmp_path / str(number), module))
        (paths[0] / "recipes").symlink_to(ROOT / "recipes")
        if number == len(modules) - 1:
            (paths[0] / "gated").touch()
        done = python(code, paths)
        assert done.returncode == 0, done.stderr
        assert "my_attention" in done.stdout
        hashes.append(done.stdout)
    assert len(set(hashes)) == len(modules)
