"""Estimates a cell's time and memory before anything is loaded: from config.json, the tasks and the machine's speed.

The constants were measured on one core or are marked as guesses; benchmarks/plan.py compares estimates with real cells.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qbench.attention.kinds import Sizes
from qbench.checkpoint import layout
from qbench.checkpoint.fingerprint import local_file
from qbench.checkpoint.layout import CheckpointError
from qbench.evaluate.facts import KL_TOKENS, TaskSummary
from qbench.quantizers.options import quantizer
from qbench.recipe.cells import Cell
from qbench.recipe.schema import Recipe
from qbench.records.audit import UNQUANTIZED
from qbench.runner.speed import Speed, speed_of

CHARACTERS_PER_TOKEN = 4  # if the tokenizer is not on this machine: typical of English and a vocabulary of 32k
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
OVERHEAD = 2**30  # bytes: interpreter, packages, one batch; on a GPU the CUDA context
PROBE_TOKENS = 128  # the audit's probe, run through the source, the packed and the dense model
# GPTQ runs the calibration text through part of each layer for each stage of linears, and then through the whole layer:
# 2.4 passes for Llama's shapes.
CALIBRATION_PASSES = 2.4
LINEARS = 7  # per layer: sensitivity makes one pass for each
SAME_INPUT = ("k_proj.weight", "v_proj.weight", "up_proj.weight")  # these share the input of q_proj or gate_proj

# Seconds that do not depend on the model's size.
START = {"cpu": 0.1, "cuda": 10.0}  # to start a cell; on CUDA a guess, including the import of the method's library
DISK = 1e9  # bytes per second to read, check and copy a checkpoint
REQUEST = 2.5e-4  # per request: lm-eval's templates, metrics and standard errors
LAYER_CALL = 4e-4  # per layer and batch: Python and transformers
KL_LOGIT = {"cpu": 6e-9, "cuda": 0.0}  # per entry of the vocabulary and token: arithmetic in float64; on CUDA a guess


@dataclass(frozen=True)
class Estimate:
    """Parameters, peak memory, floating-point operations and seconds of a cell."""

    parameters: int
    memory: int  # bytes
    work: float  # operations
    seconds: dict[str, float] = field(default_factory=dict)  # by phase; empty if the machine's speed is not known

    @property
    def total(self) -> float:
        """The seconds of all phases."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class _Network:
    """The sizes of a checkpoint that the estimate needs."""

    sizes: Sizes
    parameters: int
    linear: int  # weights of the layers' linears; every token is multiplied with each
    columns: int  # input columns of the linears, counting a shared input once: GPTQ solves them one by one
    squares: int  # the sum of these column counts squared: one Hessian each

    def forward(self, read: float, scored: float, attended: float) -> float:
        """Operations for this many tokens: linears, attention to earlier tokens, and lm_head for scored tokens."""
        sizes = self.sizes
        attention = 4 * sizes.num_hidden_layers * sizes.num_attention_heads * sizes.head_dim
        return 2 * self.linear * read + attention * attended + 2 * sizes.vocab_size * sizes.hidden_size * scored


def estimate(cell: Cell, tasks: Mapping[str, TaskSummary], speed: Speed | None = None) -> Estimate | None:
    """A rough estimate; None if the checkpoint is not on this machine. speed: of the slot that the cell runs in."""
    network = _network(cell)
    if network is None:
        return None
    evaluated, batches = _evaluation(cell, network, tasks)
    quantized = _quantization(cell, network)
    compared, tokens = _divergence(cell, network, tasks)
    work = evaluated + quantized + compared
    found = Estimate(network.parameters, _memory(cell, network), work)
    if speed is None:
        return found
    weights = network.parameters * ITEM_BYTES[cell.recipe.resolved_dtype]
    calls = LAYER_CALL * network.sizes.num_hidden_layers
    requests = sum(facts.requests for facts in tasks.values())
    method, share = quantizer(cell.ref.method), float(cell.ref.label != UNQUANTIZED)
    traffic = share * method.passes * 4 * network.linear  # in float32
    seconds = {
        "load": START[speed.device] + weights / DISK,
        "kl": speed.seconds(compared)
        + tokens * (calls / cell.batch_tokens + KL_LOGIT[speed.device] * network.sizes.vocab_size),
        "quantize": speed.seconds(quantized, traffic) + share * method.column_seconds * network.columns,
        "evaluate": speed.seconds(evaluated, batches * weights) + batches * calls + REQUEST * requests,
    }
    return Estimate(found.parameters, found.memory, work, seconds)


def expected_seconds(
    recipe: Recipe, tasks: Mapping[str, TaskSummary], cells: Iterable[Cell], threads: int = 1
) -> dict[str, dict[str, float]]:
    """The estimated seconds of each phase by cell, without cells that have no estimate. threads: of one slot."""
    speed = speed_of(recipe, threads)
    found = {cell.ref.name: estimate(cell, tasks, speed) for cell in cells}
    return {name: own.seconds for name, own in found.items() if own and own.seconds}


def preflight_seconds(
    cells: Sequence[Cell],
    methods: Iterable[Cell],
    tasks: Mapping[str, TaskSummary],
    speed: Speed,
    characters: int,
) -> float:
    """The estimated time to load a checkpoint, to score this much text of each task, and to quantize one layer.

    cells: of the checkpoint; methods: those of them whose methods are tried.
    """
    first, network = estimate(cells[0], tasks, speed), _network(cells[0])
    if first is None or network is None:
        return 0.0
    share = sum(min(characters, facts.read) for facts in tasks.values()) / max(1, sum(f.read for f in tasks.values()))
    scored = share * (first.seconds["kl"] + first.seconds["evaluate"])
    quantized = (found.seconds["quantize"] for cell in methods if (found := estimate(cell, tasks, speed)))
    return first.seconds["load"] + scored + sum(quantized) / network.sizes.num_hidden_layers


def _evaluation(cell: Cell, network: _Network, tasks: Mapping[str, TaskSummary]) -> tuple[float, float]:
    """The number of operations and of batches."""
    if cell.ref.measured:
        return _analysis(cell, network)
    length = characters_per_token(cell, tasks.values())
    longest = min(cell.recipe.max_length or math.inf, network.sizes.max_position_embeddings)
    work = tokens = 0.0
    for facts in tasks.values():
        read = facts.read / length
        attended = min(facts.attended / length**2, read * longest / 2)  # longer texts are split into windows
        work += network.forward(read, facts.scored / length, attended)
        tokens += read
    return work, tokens / cell.batch_tokens


def _divergence(cell: Cell, network: _Network, tasks: Mapping[str, TaskSummary]) -> tuple[float, float]:
    """Operations and tokens of KL: one pass of the unquantized model, and two products with lm_head.

    Only the first cell of a checkpoint makes the pass; which one that is, is not known here.
    """
    length = characters_per_token(cell, tasks.values())
    work = tokens = 0.0
    for facts in tasks.values() if not cell.ref.measured else ():
        own = min(KL_TOKENS, facts.scored / length) if facts.pages else 0.0
        work += network.forward(own, 2 * own, own**2 / max(1, facts.documents) / 2)
        tokens += own
    return work, tokens


def _analysis(cell: Cell, network: _Network) -> tuple[float, float]:
    """The same for an analysis. It reads whole texts and, except for sensitivity, computes no probabilities."""
    settings, sensitive = cell.recipe.analysis, cell.ref.measured == "sensitivity"
    samples = cell.sensitivity_source().samples if sensitive else settings.samples
    texts = 1 if cell.ref.measured == "maps" else samples
    passes = LINEARS * network.sizes.num_hidden_layers if sensitive else 1
    read = float(passes * texts * settings.length)
    return network.forward(read, read * sensitive, read * settings.length / 2), float(passes * texts)


def _quantization(cell: Cell, network: _Network) -> float:
    """Operations of the audit's probe, and of the calibration including its Hessians."""
    if cell.ref.label == UNQUANTIZED:
        return network.forward(PROBE_TOKENS, PROBE_TOKENS, 0)
    work = 3 * network.forward(PROBE_TOKENS, PROBE_TOKENS, 0)
    if calibration := cell.calibration:
        tokens = calibration.samples * calibration.length
        attended = tokens * calibration.length / 2
        work += CALIBRATION_PASSES * network.forward(tokens, 0, attended) + 2 * tokens * network.squares
    return work


def _memory(cell: Cell, network: _Network) -> int:
    """Weights, the source weights that the audit compares with, and on a GPU the longest sequence."""
    item = ITEM_BYTES[cell.recipe.resolved_dtype]
    memory = network.parameters * item * (1 if cell.ref.label == UNQUANTIZED else 2)
    if cell.recipe.resolved_device == "cpu":
        return memory + OVERHEAD
    sizes = network.sizes
    longest = min(cell.recipe.max_length or math.inf, sizes.max_position_embeddings)
    width = sizes.num_key_value_heads * sizes.head_dim
    # Keys and values of all layers; for one layer the residuals, norms, q, k, v and their rotations, and the MLP.
    per_token = 2 * sizes.num_hidden_layers * width + 12 * sizes.hidden_size + 4 * sizes.intermediate_size
    return int(memory + OVERHEAD + longest * per_token * item)


def characters_per_token(cell: Cell, tasks: Iterable[TaskSummary]) -> float:
    """Measured with the cell's tokenizer on a sample of the tasks' text; a typical value if it is missing."""
    file = local_file(cell.tokenizer, "tokenizer.json", cell.tokenizer_revision)
    sample = "\n".join(facts.sample for facts in tasks)
    return _measured_length(file, sample) if file and sample else CHARACTERS_PER_TOKEN


@functools.lru_cache(maxsize=32)
def _measured_length(file: Path, sample: str) -> float:
    from tokenizers import Tokenizer

    try:
        return len(sample) / max(1, len(Tokenizer.from_file(str(file)).encode(sample).ids))
    except Exception:  # tokenizers raises plain Exception; the worker reports what is wrong with the file
        return CHARACTERS_PER_TOKEN


def _network(cell: Cell) -> _Network | None:
    file = cell.config
    try:
        return _read_network(file, cell.required_attention, file.stat().st_mtime_ns) if file else None
    except (CheckpointError, OSError):
        return None  # the plan's note on the cell says what is wrong with it


@functools.lru_cache(maxsize=32)
def _read_network(config: Path, attention: str | None, changed: int) -> _Network:
    fields = layout.read_json(config)
    sizes = layout.config_sizes(fields, config)
    shapes = layout.tensor_shapes(sizes, layout.config_attention(fields, config, attention))
    linears = {name: shape for name, shape in shapes.items() if ".layers." in name and name.endswith("_proj.weight")}
    read = [shape[1] for name, shape in linears.items() if not name.endswith(SAME_INPUT)]
    return _Network(
        sizes=sizes,
        parameters=layout.parameter_count(config, attention),
        linear=sum(map(math.prod, linears.values())),
        columns=sum(read),
        squares=sum(n * n for n in read),
    )
