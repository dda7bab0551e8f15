"""lm-eval's command line with qbench's model added: lm-eval has no plug-in hook for models.

python -m qbench.lm_eval --model qbench --model_args pretrained=PATH_OR_HUB_ID --tasks arc_easy [any lm-eval option]
"""

import inspect
import sys
from pathlib import Path

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model

from qbench.checkpoint.layout import CheckpointError
from qbench.checkpoint.load import load_checkpoint
from qbench.evaluate.scorer import Scorer, ScoringError
from qbench.evaluate.task_code import trusting
from qbench.tokenizer import load_tokenizer

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@register_model("qbench")
class CheckpointScorer(Scorer):
    """A Scorer from lm-eval's --model_args.

    lm-eval gives batch_size and max_batch_size to every model; here batch_tokens replaces them.
    """

    def __init__(
        self,
        pretrained: str,
        tokenizer: str | None = None,
        attention: str | None = None,
        dtype: str = "float32",
        device: str | None = None,
        max_length: int | None = None,
        batch_tokens: int | None = None,
        token_cache: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        **unknown: object,
    ) -> None:
        if unknown:
            known = [name for name in inspect.signature(CheckpointScorer).parameters if name != "unknown"]
            raise ScoringError(f"model_args has {', '.join(unknown)}; supported: {', '.join(known)}.")
        if str(batch_size) not in ("1", "auto"):
            raise ScoringError(
                f"batch_size is {batch_size}; batches are sized in tokens: give batch_tokens in model_args instead."
            )
        if dtype not in DTYPES:
            raise ScoringError(f"model_args has dtype={dtype}; supported: {', '.join(DTYPES)}.")
        if not torch.cuda.is_available() and (device or "cuda").startswith("cuda"):
            device = "cpu"  # lm-eval's default is cuda:0 on every machine
        super().__init__(
            load_checkpoint(pretrained, attention, device or "cuda", DTYPES[dtype]),
            load_tokenizer(tokenizer or pretrained),
            max_length=max_length,
            batch_tokens=batch_tokens,
            token_cache=Path(token_cache) if token_cache else None,
        )


def main() -> None:
    """Run lm-eval's command line."""
    try:
        with trusting(True):  # the folders given to --include_path, as lm-eval itself does
            cli_evaluate()
    except (CheckpointError, ScoringError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
