"""Scorer: answers lm-eval's requests with HFLM's numbers, in float32, without the work that HFLM repeats."""

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from qbench.errors import InputError, is_out_of_memory
from qbench.evaluate.batches import BATCH_TOKENS, GENERATED, Group, Request, device_kind, group_requests, truncate
from qbench.evaluate.forward import Place, StateKeeper, States, run, score_targets
from qbench.progress import Bar
from qbench.tokenizer import TokenizerError, check_tokenizer

Score = tuple[float, bool]  # a continuation's log-probability, and whether greedy decoding gives it
Work = TypeVar("Work")
Piece = TypeVar("Piece")
Answer = TypeVar("Answer")

log = logging.getLogger(__name__)


class ScoringError(InputError):
    """Requests that cannot be scored, explained in a sentence."""


class Scorer(HFLM):
    """An lm-eval model over any model from load_checkpoint or quantize.

    Tokenization, chat templates and generation are HFLM's.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int | None = None,
        batch_tokens: int | None = None,
        token_cache: Path | None = None,
    ) -> None:
        """Score a model that is in memory.

            lm_eval.simple_evaluate(Scorer(model, tokenizer), tasks=["arc_easy"])

        max_length: in tokens, by default what the model's config says. batch_tokens: how many tokens run at a time, by
        default BATCH_TOKENS; halved whenever memory runs out. token_cache: a folder that keeps token ids for the next
        model with the same tokenizer.
        """
        if not isinstance(model, LlamaForCausalLM):
            raise ScoringError(
                f"model is a {type(model).__name__}; it must be a model from load_checkpoint or quantize."
            )
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ScoringError(
                f"tokenizer is a {type(tokenizer).__name__}; it must be a tokenizer of transformers, such as "
                "qbench.tokenizer.load_tokenizer returns."
            )
        for name, value in (("max_length", max_length), ("batch_tokens", batch_tokens)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ScoringError(f"{name} is {value!r}; it must be a positive integer, or None.")
        try:
            check_tokenizer(tokenizer, model.config.vocab_size)
        except TokenizerError as error:
            raise ScoringError(str(error)) from None
        # LLM.int8 pools its outlier columns over a batch: a row's scores depend on its neighbours.
        self._pools_batches = any(getattr(module, "ACTIVATION_BITS", None) for module in model.modules())
        if self._pools_batches and batch_tokens is None:
            raise ScoringError(
                "The model quantizes its activations batch by batch, so its scores depend on the batches; give "
                "the same batch_tokens to all models that you compare."
            )
        self._last_encoded = lru_cache(maxsize=4)(super().tok_encode)  # all choices of a question need its context
        with _without_warnings(HFLM.__module__):  # used if the model is a name, which ours never is
            super().__init__(pretrained=model, tokenizer=tokenizer, max_length=max_length, softmax_dtype=torch.float32)
        # The token budget, and its value after each time that memory ran out.
        self.budgets = [batch_tokens or BATCH_TOKENS[device_kind(model.device.type)]]
        self.token_cache = token_cache
        self._scored: dict[tuple[str, ...], int] = {}
        # How often each run of tokens was read, by the position of its first token and its length.
        self.read: Counter[tuple[int, int]] = Counter()
        # How many tokens of a window's start to keep the final hidden states of when pages are scored; and the states.
        self.wanted: Mapping[Place, int] = {}
        self.states: dict[Place, States] = {}

    @property
    def batch_tokens(self) -> int:
        """How many tokens run at a time."""
        return self.budgets[-1]

    def tok_encode(self, *args: Any, **options: Any) -> list[int]:
        """Token ids of a text, as in HFLM."""
        return list(self._last_encoded(*args, **options))

    def count_tokens(self, requests: list[Instance]) -> list[int]:
        """How many tokens of each request were scored."""
        return [self._scored[request.args] for request in requests]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Score]:
        """The log-probability of each continuation after its context, and whether greedy decoding gives it."""
        names = [_name(request) for request in requests]
        scores: dict[int, Score] = {}
        pairs = self._encode_pairs([request.args for request in requests])
        self._scored |= {request.args: len(pair[1]) for request, pair in zip(requests, pairs, strict=True)}
        for index, score in self._score(pairs, names, greedy=True, quiet=disable_tqdm):
            scores[index] = score
            self.cache_hook.add_partial("loglikelihood", requests[index].args, score)
        return [scores[index] for index in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each document, in windows as lm-eval cuts them."""
        by_document = self.rolling_windows(requests)
        for request, own in zip(requests, by_document, strict=True):
            self._scored[request.args] = sum(len(continuation) for _, continuation in own)
        documents = [index for index, own in enumerate(by_document) for _ in own]  # of each window
        windows = [window for own in by_document for window in own]
        places = [
            (requests[index].task_name, requests[index].doc_id, n)
            for index, own in enumerate(by_document)
            for n in range(len(own))
        ]
        kept = {index: place for index, place in enumerate(places) if place in self.wanted}
        names = [_name(requests[document]) for document in documents]
        parts: dict[int, list[float]] = defaultdict(list)
        for index, (value, _) in self._score(windows, names, greedy=False, quiet=disable_tqdm, kept=kept):
            parts[documents[index]].append(value)
        totals = [math.fsum(parts[index]) for index in range(len(requests))]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def rolling_windows(self, requests: Sequence[Instance]) -> list[list[Request]]:
        """The windows of each document, as lm-eval cuts them: each token is scored in one of them."""
        found = []
        for request, tokens in zip(requests, self._encode_texts([r.args[0] for r in requests]), strict=True):
            if not tokens:
                raise ScoringError(f"{_name(request)}: the document is empty; it must have a token to score.")
            cuts = get_rolling_token_windows(tokens, self.prefix_token_id, max_seq_len=self.max_length, context_len=1)
            found.append(list(map(make_disjoint_window, cuts)))
        return found

    def final_states(self, requests: Mapping[Place, Request]) -> dict[Place, States]:
        """The final hidden states at the tokens of each request, in half as large batches as when they are scored."""
        places, fitted = list(requests), [truncate(*request, self.max_length) for request in requests.values()]

        def cut(left: Mapping[int, Request], batch_tokens: int) -> list[Group]:
            return group_requests(left, max(1, batch_tokens // 2), self.device.type)

        def keep(group: Group) -> dict[int, States]:
            keeper = StateKeeper(
                {target[2]: len(fitted[target[2]][1]) for row in group.rows() for target in row.targets}
            )
            for batch, hidden in run(self.model, group):
                keeper.add(batch, hidden)
            return keeper.states()

        found = dict(self._halving(dict(enumerate(fitted)), cut, keep))
        return {place: found[index] for index, place in enumerate(places)}

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """HFLM's generation, in batches by the token budget."""
        texts: dict[int, str] = {}
        lengths = [len(self.tok_encode(request.args[0])) for request in requests]
        cut = partial(self._generation_batches, lengths=lengths)
        with Bar(total=sum(lengths), unit="token", unit_scale=True, shown=not disable_tqdm) as bar:
            for index, text in self._halving(dict(enumerate(requests)), cut, self._generate):
                texts[index] = text
                self.read[0, lengths[index]] += 1  # what is generated is not counted
                bar.update(lengths[index])
        return [texts[index] for index in range(len(requests))]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: object
    ) -> list[Score]:
        names = [f"Request {index}" for index in range(len(requests))]
        scores = dict(self._score([(a, b) for _, a, b in requests], names, greedy=True, quiet=disable_tqdm))
        return [scores[index] for index in range(len(requests))]

    def _score(
        self,
        requests: Sequence[Request],
        names: list[str],
        greedy: bool,
        quiet: bool,
        kept: Mapping[int, Place] | None = None,
    ) -> Iterator[tuple[int, Score]]:
        """Index and score of each request, as they come. kept: the requests whose states are wanted."""
        fitted = {index: self._fit(request, names[index]) for index, request in enumerate(requests)}
        with Bar(unit="token", unit_scale=True, shown=not quiet) as bar:

            def cut(left: Mapping[int, Request], batch_tokens: int) -> list[Group]:
                groups = group_requests(left, batch_tokens, self.device.type)
                bar.reset(sum(len(row.tokens) for group in groups for row in group.rows()))
                return groups

            yield from self._halving(
                fitted, cut, partial(self._run, names=names, greedy=greedy, bar=bar, kept=kept or {})
            )

    def _fit(self, request: Request, name: str) -> Request:
        context, continuation = request
        if not continuation:
            raise ScoringError(f"{name}: the continuation is empty; it must have a token to score.")
        if not context:  # lm-eval moves the white space at its end to the continuation
            raise ScoringError(
                f"{name}: the context is only white space, so there is no token before the continuation."
            )
        if len(continuation) > self.max_length:
            raise ScoringError(
                f"{name}: the continuation has {len(continuation)} tokens and max_length is {self.max_length}; "
                "it must fit: leave the document out, or give a larger max_length if the model was trained for it."
            )
        return truncate(context, continuation, self.max_length)

    def _run(
        self, group: Group, names: list[str], greedy: bool, bar: Bar, kept: Mapping[int, Place]
    ) -> dict[int, Score]:
        values: dict[int, list[float]] = defaultdict(list)
        likeliest: dict[int, bool] = {}
        keeper = StateKeeper({index: self.wanted[place] for index, place in kept.items()})
        for batch, hidden in run(self.model, group):
            log_probabilities, flags = score_targets(self.model, hidden, batch, greedy)
            keeper.add(batch, hidden)
            targets = (request for row in batch for _, _, request in row.targets)
            for request, value, flag in zip(targets, log_probabilities, flags, strict=True):
                values[request].append(value)
                likeliest[request] = likeliest.get(request, True) and flag == 1
            bar.update(sum(len(row.tokens) for row in batch))
        contexts = [len(row.tokens) for batch in group.first for row in batch]
        self.read.update((contexts[row.context] if row.context >= 0 else 0, len(row.tokens)) for row in group.rows())
        scores = {request: (math.fsum(parts), likeliest[request]) for request, parts in values.items()}
        for request, (value, _) in scores.items():
            if not math.isfinite(value):
                raise ScoringError(
                    f"{names[request]}: the model's logits are NaN or infinite; they must be "
                    "finite: check the weights, or run the model in a dtype with a larger range."
                )
        self.states |= {kept[index]: own for index, own in keeper.states().items()}
        return scores

    def _halving(
        self,
        work: Mapping[int, Work],
        cut: Callable[[Mapping[int, Work], int], list[Piece]],
        do: Callable[[Piece], Mapping[int, Answer]],
    ) -> Iterator[tuple[int, Answer]]:
        """Do all work piece by piece; when memory runs out, halve the budget and split the rest again."""
        left = dict(work)
        while left:
            for piece in cut(left, self.batch_tokens):
                try:
                    answers = do(piece)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    self._halve(error)
                    break
                for index in answers:
                    del left[index]
                yield from answers.items()

    def _halve(self, error: Exception) -> None:
        if self._pools_batches:
            raise ScoringError(
                f"Out of memory with batch_tokens={self.batch_tokens}, which is not reduced because the model's scores "
                "depend on it; give a smaller one to all models that you compare."
            ) from error
        if self.batch_tokens == 1:
            raise ScoringError("Out of memory even with one sequence at a time; use a smaller max_length.") from error
        self.budgets.append(self.batch_tokens // 2)
        log.warning("Out of memory; continuing with batch_tokens=%d.", self.batch_tokens)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _encode_pairs(self, pairs: list[tuple[str, str]]) -> list[Request]:
        """Token ids as lm-eval splits them: an empty context is the prefix token."""
        with_context = [pair for pair in pairs if pair[0]]
        if self.token_cache is None:
            encoded = iter([self._encode_pair(*pair) for pair in with_context])
        else:
            from qbench.evaluate.tokens import TokenCache

            encoded = iter(TokenCache(self.token_cache).encode_pairs(self, with_context))
        return [next(encoded) if context else self._encode_alone(continuation) for context, continuation in pairs]

    def _encode_alone(self, continuation: str) -> Request:
        tokens = self.tok_encode(continuation, add_special_tokens=False)
        if tokens[:1] == [self.prefix_token_id]:
            return tokens[:1], tokens[1:]
        return [self.prefix_token_id], tokens

    def _encode_texts(self, texts: list[str]) -> list[list[int]]:
        if self.token_cache is None:
            return [self.tok_encode(text) for text in texts]
        from qbench.evaluate.tokens import TokenCache

        return TokenCache(self.token_cache).encode_texts(self, texts)

    def _generation_batches(
        self, requests: Mapping[int, Instance], batch_tokens: int, lengths: Sequence[int]
    ) -> list[dict[int, Instance]]:
        """Batches of requests with equal settings and similar lengths, whose contexts and new tokens fit the budget.

        lengths: tokens of each request's context.
        """
        settings = {index: repr(request.args[1]) for index, request in requests.items()}
        budget = GENERATED[device_kind(self.device.type)] * batch_tokens
        batches: list[dict[int, Instance]] = []
        last, rows = "", 0
        for index in sorted(requests, key=lambda index: (settings[index], -lengths[index])):
            if not batches or settings[index] != last or len(batches[-1]) == rows:
                new = normalize_gen_kwargs(requests[index].args[1], self.max_gen_toks)["max_gen_toks"]
                last, rows = settings[index], max(1, budget // (lengths[index] + new))
                batches.append({})
            batches[-1][index] = requests[index]
        return batches

    def _generate(self, batch: dict[int, Instance]) -> dict[int, str]:
        self.batch_size_per_gpu = len(batch)
        return dict(zip(batch, super().generate_until(list(batch.values()), disable_tqdm=True), strict=True))


@contextmanager
def _without_warnings(logger: str) -> Iterator[None]:
    theirs = logging.getLogger(logger)
    level = theirs.level
    theirs.setLevel(logging.ERROR)
    try:
        yield
    finally:
        theirs.setLevel(level)


def _name(request: Instance) -> str:
    return f"{request.task_name or 'A request without a task'}, document {request.doc_id}"
