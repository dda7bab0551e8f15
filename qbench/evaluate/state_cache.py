"""The unquantized model's hidden states on disk: computed once per checkpoint and set of pages, for all of its cells.

As with token ids (tokens.py), a file is named after the hash of what it was computed from, so it is never out of date;
if it is damaged, the states are computed again. On mini it turns 0.17 s per cell into 0.02 s, on SmolLM2 20 s into 0.1.
"""

import contextlib
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from qbench.evaluate.batches import Request
from qbench.evaluate.forward import Place, States
from qbench.files import write_atomically

if TYPE_CHECKING:
    from qbench.evaluate.scorer import Scorer

MOST_FILES = 32  # in the folder: of 8,000 tokens each, 1 GB for a hidden size of 2,048 in 16 bits

log = logging.getLogger(__name__)


class StateCache:
    """A folder of states, safe for several processes at once. model: a hash of all that decides them but the tokens."""

    def __init__(self, folder: Path, model: str) -> None:
        self._folder, self._model = folder, model
        self._computed: dict[str, Tensor] = {}  # by key, not saved yet

    def final_states(self, lm: "Scorer", requests: Mapping[Place, Request]) -> dict[Place, States]:
        """What lm.final_states gives."""
        texts = [[*place, list(context), list(continuation)] for place, (context, continuation) in requests.items()]
        key = hashlib.sha256(json.dumps([self._model, texts]).encode()).hexdigest()
        tokens = {place: list(continuation) for place, (_, continuation) in requests.items()}
        if (hidden := self._read(key)) is None:
            found = lm.final_states(requests)
            self._computed[key] = torch.cat([found[place].hidden for place in requests])
            return found
        parts = hidden.to(lm.device).split([len(own) for own in tokens.values()])
        return {place: States(part, tokens[place]) for place, part in zip(requests, parts, strict=True)}

    def save(self) -> None:
        """Write what was computed. Call it once it is known that the model is the one that the key describes."""
        for key, hidden in self._computed.items():
            hidden = hidden.cpu()
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                content = save({"hidden": hidden}, metadata={"checksum": _checksum(key, hidden)})
                write_atomically(self._file(key), content)
                self._remove_oldest()
            except OSError as error:  # a full or read-only disk costs time, not the run
                log.warning("Hidden states cannot be kept in %s (%s).", self._folder, error)
        self._computed.clear()

    def _file(self, key: str) -> Path:
        return self._folder / f"{key}.safetensors"

    def _read(self, key: str) -> Tensor | None:
        file = self._file(key)
        try:
            with safe_open(file, framework="pt") as stored:
                hidden: Tensor = stored.get_tensor("hidden")
                checksum = (stored.metadata() or {}).get("checksum")
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError) as error:
            log.warning("%s cannot be read (%s); its hidden states are computed again.", file, error)
            return None
        if checksum != _checksum(key, hidden):
            log.warning("%s is damaged; its hidden states are computed again.", file)
            return None
        return hidden

    def _remove_oldest(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # another process removes them too
            files = sorted(self._folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
            for file in files[:-MOST_FILES]:
                file.unlink()


def _checksum(key: str, hidden: Tensor) -> str:
    described = f"{key} {hidden.dtype} {list(hidden.shape)}".encode()
    return hashlib.sha256(described + hidden.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
