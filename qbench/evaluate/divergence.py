"""KL from the unquantized model, token by token, on the pages that perplexity tasks score.

Before a model is quantized, `keep_reference` keeps its final hidden states (after the last norm) at some of the scored
positions, and its lm_head. Scoring the quantized model keeps the states of the same positions, so it costs no second
forward pass. `compare` then forms the logits of both, some positions at a time, over the whole vocabulary.

The batches of the two passes differ. So the same measurement of the unquantized model is the noise floor.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.task import Task
from torch import Tensor, nn

from qbench.errors import InputError
from qbench.evaluate.evaluation import Evaluation, Metric
from qbench.evaluate.facts import KL_TOKENS, PAGES
from qbench.evaluate.forward import LOGITS_BYTES, Place, States
from qbench.evaluate.requests import build_documents
from qbench.records.audit import UNQUANTIZED, Audit, AuditError
from qbench.records.metrics import KL, METRICS
from qbench.records.samples import AGGREGATIONS, WEIGHT, Floats
from qbench.records.schema import Divergence

if TYPE_CHECKING:
    from qbench.evaluate.scorer import Scorer
    from qbench.evaluate.state_cache import StateCache

MIN_MOVED = 1e-3  # of the audit's KL, which is of random tokens
MIN_TOKENS = 16  # of a document that has them: all first tokens have the same context
MAX_FLOOR = 0.1  # of the unquantized model, in nats: in bfloat16 it is 1e-5 on mini; another model is further away
LOGITS = 2**18  # of one model in float64 at a time: 2 MB. On a CPU, 64 MB take 2.5 times as long
PRODUCTS = 2**20  # logits of one product with lm_head: 4 MB. With 27 MB, KL on mini takes 1.5 times as long
MIN_POSITIONS = 256  # of a product: with 5 positions, one with SmolLM2's lm_head takes four times as long


class DivergenceError(InputError):
    """Why KL cannot be measured, in a sentence."""


@dataclass(frozen=True)
class Reference:
    """What is kept of the unquantized model."""

    states: Mapping[Place, States]
    head: Tensor  # [vocabulary, dim]

    @property
    def counts(self) -> dict[Place, int]:
        """How many tokens of each window are measured."""
        return {place: len(own.tokens) for place, own in self.states.items()}

    @property
    def bytes(self) -> int:
        """The memory of the states."""
        return sum(own.hidden.numel() * own.hidden.element_size() for own in self.states.values())


@dataclass(frozen=True)
class TokenDivergences:
    """Both models at the same tokens, [tokens] each."""

    kl: Floats
    before: Floats  # log-probability of the right token, unquantized
    after: Floats
    same_top: Floats  # 1 if the unquantized model's likeliest token is also the quantized one's

    @classmethod
    def joined(cls, parts: Sequence["TokenDivergences"]) -> "TokenDivergences":
        """Those of several windows as one."""
        fields = ("kl", "before", "after", "same_top")
        return cls(*(np.concatenate([getattr(part, field) for part in parts]) for field in fields))


def pages(tasks: Mapping[str, Task], limits: Mapping[str, int], seed: int) -> list[Instance]:
    """The requests of the tasks that score whole pages; other tasks have no KL."""
    scored = [task for task in tasks.values() if task.OUTPUT_TYPE == PAGES]
    documents = (own for task in scored for own in build_documents(task, limits.get(task.task_name), seed))
    return [request for document in documents for request in document.requests]


def keep_reference(
    lm: "Scorer", requests: Sequence[Instance], tokens: int = KL_TOKENS, cache: "StateCache | None" = None
) -> Reference:
    """Run the unquantized model over the measured tokens of pages, and keep its states and its lm_head.

    tokens: how many of each task. cache: where the states of the same model may be.
    """
    for request in requests:
        if request.request_type != PAGES:
            raise DivergenceError(
                f"{request.task_name} does not score whole pages (its type is {request.request_type}); KL needs a task "
                f"of the type {PAGES}, such as wikitext."
            )
    windows = {
        (str(request.task_name), int(request.doc_id), number): window
        for request, own in zip(requests, lm.rolling_windows(requests), strict=True)
        for number, window in enumerate(own)
    }
    counts: dict[Place, int] = {}
    for task in dict.fromkeys(place[0] for place in windows):
        counts |= measured_tokens({p: len(window[1]) for p, window in windows.items() if p[0] == task}, tokens)
    cut = {place: (windows[place][0], windows[place][1][:size]) for place, size in counts.items()}
    # Methods never write to a weight, they replace the layer: the tensor stays as it is.
    states = cache.final_states(lm, cut) if cache else lm.final_states(cut)
    return Reference(states, lm.model.lm_head.weight.detach())


def measured_tokens(sizes: Mapping[Place, int], wanted: int) -> dict[Place, int]:
    """How many tokens of each window are measured: its first ones, `wanted` in all, or all if there are fewer.

    They come from as many documents as possible, since intervals and tests are over documents: first windows of
    documents before second ones, and of the windows that are needed, the longest are cut, but not below MIN_TOKENS. If
    there are still too many, the last windows are left out.
    """
    chosen: dict[Place, int] = {}
    for number in range(1 + max(place[2] for place in sizes)):
        if sum(chosen.values()) < wanted:
            chosen |= {place: size for place, size in sizes.items() if place[2] == number}
    longest = max(chosen.values())
    enough = (n for n in range(MIN_TOKENS, longest) if sum(min(size, n) for size in chosen.values()) >= wanted)
    longest = next(enough, longest)
    found = {place: min(size, longest) for place, size in chosen.items()}
    beyond = sum(found.values()) - wanted
    for place in reversed(chosen):
        # One token of each of the longest is enough, unless they are as short as allowed.
        spare = found[place] if longest <= MIN_TOKENS else int(found[place] == longest)
        cut = max(0, min(beyond, spare))
        found[place], beyond = found[place] - cut, beyond - cut
    return {place: size for place, size in found.items() if size}


def compare(reference: Reference, states: Mapping[Place, States], head: nn.Module) -> dict[Place, TokenDivergences]:
    """The divergences at every measured token. states, head: of the quantized model."""
    for place, own in reference.states.items():
        if place not in states or states[place].tokens != own.tokens:
            task, document, number = place
            raise DivergenceError(
                f"{task}, document {document}, window {number}: the quantized model was not scored on the tokens that "
                "the unquantized model was; KL needs the same tokens."
            )
    before = torch.cat([own.hidden for own in reference.states.values()])
    after = torch.cat([states[place].hidden for place in reference.states])
    tokens = torch.tensor([token for own in reference.states.values() for token in own.tokens], device=before.device)
    found = torch.cat(list(_chunks(before, after, tokens, reference.head, head)), dim=1)
    ends = np.cumsum([len(own.tokens) for own in reference.states.values()])[:-1]
    by_place = dict(zip(reference.states, np.split(found.cpu().numpy(), ends, axis=1), strict=True))
    for (task, document, number), values in by_place.items():
        if not np.isfinite(values).all():
            raise DivergenceError(
                f"{task}, document {document}, window {number}: the logits of the unquantized or the quantized model "
                "are NaN or infinite; they must be finite: run the model in a dtype with a larger range."
            )
    return {place: TokenDivergences(*values) for place, values in by_place.items()}


@torch.no_grad()
def _chunks(before: Tensor, after: Tensor, tokens: Tensor, head: Tensor, head_after: nn.Module) -> Iterator[Tensor]:
    """The divergences of some positions at a time: few for arithmetic, and more for a product with lm_head."""
    most, few = (max(1, size // len(head)) for size in (LOGITS_BYTES // 4, LOGITS))
    rows = min(most, max(PRODUCTS // len(head), MIN_POSITIONS))
    for own, other, right in zip(before.split(rows), after.split(rows), tokens.split(rows), strict=True):
        p, q = nn.functional.linear(own, head), head_after(other)  # [rows, vocabulary] each
        if p.shape != q.shape:
            raise DivergenceError(
                f"The vocabulary has {q.shape[1]} entries after quantization, but {p.shape[1]} before; "
                "KL needs the same vocabulary."
            )
        yield from map(_divergences, p.split(few), q.split(few), right.split(few))


def _divergences(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """KL, both log-probabilities of the right token, and 1 if the top-1 is the same: [4, positions], in float64.

    p, q: logits [positions, vocabulary]. An 8-bit model's KL is 1e-5; a difference of two log-softmaxes in float32 is
    off by 1e-6.
    """
    top, best = p.argmax(-1, keepdim=True), q.amax(-1, keepdim=True)
    same_top = q.gather(1, top) == best
    # With logits p and q: KL = Σ softmax(p) (p - q) - ln Σ exp p + ln Σ exp q. Their maxima are subtracted first.
    p, q = p.double().sub_(p.gather(1, top)), q.double().sub_(best)
    weights, right = p.exp(), tokens[:, None]
    total = weights.sum(-1, keepdim=True)
    log_p, log_q = total.log(), q.exp().sum(-1, keepdim=True).log_()
    mean = weights.mul_(p - q).sum(-1, keepdim=True) / total
    columns = mean - log_p + log_q, p.gather(1, right) - log_p, q.gather(1, right) - log_q, same_top
    return torch.cat([column.double() for column in columns], dim=1).T


def with_kl(evaluation: Evaluation, found: Mapping[Place, TokenDivergences]) -> tuple[Evaluation, list[Divergence]]:
    """The evaluation with the metric kl, whose values per document are sums over tokens; and the other figures."""
    by_document: dict[tuple[str, int], list[TokenDivergences]] = defaultdict(list)
    for (task, document, _), own in found.items():
        by_document[task, document].append(own)
    joined = {place: TokenDivergences.joined(own) for place, own in by_document.items()}
    samples = evaluation.samples.copy()
    places = list(zip(samples["task"], samples["doc_id"], strict=True))
    samples[KL] = [float(joined[place].kl.sum()) if place in joined else np.nan for place in places]
    samples[KL + WEIGHT] = [float(len(joined[place].kl)) if place in joined else np.nan for place in places]
    tasks = dict.fromkeys(task for task, _ in joined)
    of_task = {name: [own for (task, _), own in joined.items() if task == name] for name in tasks}
    metrics = evaluation.metrics + [_metric(name, own) for name, own in of_task.items()]
    return replace(evaluation, metrics=metrics, samples=samples), [_figures(*own) for own in of_task.items()]


def check_moved(metrics: Sequence[Metric], audit: Audit) -> None:
    """Raise if KL says that the model is the unquantized one although its audit saw other logits.

    Then the model was compared with itself, or another model was scored than the one that was audited. Also raise if
    the unquantized model is far from itself: then its states were not kept from this model.
    """
    for metric in metrics:
        if metric.name == KL and audit.label == UNQUANTIZED and metric.value > MAX_FLOOR:
            reason = (
                f"{metric.task}: the KL of the unquantized model from itself is {metric.value:.1g} nats per token; it "
                f"must be noise, at most {MAX_FLOOR:g}. The hidden states were of another model."
            )
            raise AuditError(audit.label, [reason], "Remove the folder `states` of qbench's cache, and run it again.")
        if metric.name == KL and audit.kl and metric.value < MIN_MOVED * audit.kl:
            reason = (
                f"{metric.task}: its KL from the unquantized model is {metric.value:.1g} nats per token, but on the "
                f"audit's probe it is {audit.kl:.1g}; the model was compared with itself, or was not the one scored."
            )
            raise AuditError(audit.label, [reason], "Run the cell again.")


def _metric(task: str, documents: Sequence[TokenDivergences]) -> Metric:
    sums = np.array([own.kl.sum() for own in documents])
    weights = np.array([float(len(own.kl)) for own in documents])
    facts, n = METRICS[KL], len(sums)
    value = AGGREGATIONS[facts.aggregation].value(sums, weights)
    # The delta method for a ratio of sums.
    error = math.sqrt(n / (n - 1) * float(((sums - value * weights) ** 2).sum())) / weights.sum() if n > 1 else None
    return Metric(task, KL, value, error, facts.better, facts.aggregation, n)


def _figures(task: str, documents: Sequence[TokenDivergences]) -> Divergence:
    own = TokenDivergences.joined(documents)
    median, p99, p999 = (float(x) for x in np.quantile(own.kl, (0.5, 0.99, 0.999)))
    constant = np.ptp(own.before) == 0 or np.ptp(own.after) == 0
    return Divergence(
        task=task,
        documents=len(documents),
        tokens=len(own.kl),
        median=median,
        p99=p99,
        p999=p999,
        same_top=float(own.same_top.mean()),
        rms_change=float(np.sqrt(np.mean((np.exp(own.after) - np.exp(own.before)) ** 2))),
        nats_before=float(-own.before.mean()),
        log_ratio=float((own.before - own.after).mean()),
        correlation=None if constant else float(np.corrcoef(own.before, own.after)[0, 1]),
    )
