"""Errors that are sentences for the caller, and phrases that messages share."""

import difflib
import resource
from collections.abc import Iterable, Iterator, Sequence

# What torch's CPU allocator, CUDA, cuBLAS and the kernel say; torch has an exception type for CUDA only.
NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "cublas_status_alloc_failed")
# What Python, C++, Rust and the loader of libraries write before a process dies of it.
LAST_WORDS = (*NO_MEMORY, "memoryerror", "std::bad_alloc", "memory allocation of", "failed to map segment")
# Under a limit (`ulimit -v`), what starting a thread says.
LAST_WORDS_WITHIN_LIMIT = ("resource temporarily unavailable", "can't start new thread")
# What huggingface_hub, transformers and datasets say if they may not, or cannot, ask the Hub.
OFFLINE = ("outgoing traffic has been disabled", "offline-mode", "OfflineModeIsEnabled")

MAX_SHOWN = 80  # characters of a value in messages


class InputError(ValueError):
    """Something given by the caller is wrong: the command line shows the sentence and exits with 2."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """' Did you mean arc_easy?' if a known name is close, else nothing; to append to a sentence."""
    close = closest(str(name), known)
    return f" Did you mean {close}?" if close else ""


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like this one; None if none is close."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def shown(value: object) -> str:
    """A value of a file in a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


def some(names: Sequence[str], most: int = 3) -> str:
    """The first of the names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def first_of(lines: Sequence[str], most: int) -> list[str]:
    """The first of the lines, and one that says how many more there are."""
    rest = len(lines) - most
    return [*lines[:most], f"and {rest} more"] if rest > 0 else list(lines)


def one_line(error: BaseException) -> str:
    """An exception on one line: its type, and its message without line breaks."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def why_not_downloaded(error: BaseException) -> str:
    """An exception on one line. That the Hub's libraries are offline may be our doing: their advice is left out."""
    text = one_line(error)
    return "offline" if any(words in text for words in OFFLINE) else text


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error, or what caused it, says that memory ran out."""
    return any(map(_says_so, _causes(error)))


def died_of_memory(log: str) -> bool:
    """Whether the last lines of a process that died say that memory ran out."""
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    words = (*LAST_WORDS, *LAST_WORDS_WITHIN_LIMIT) if limited else LAST_WORDS
    return any(word in log.lower() for word in words)


def _says_so(error: BaseException) -> bool:
    # torch.OutOfMemoryError by its name: this module must not import torch.
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return known or any(words in str(error).lower() for words in NO_MEMORY)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what caused it, and so on."""
    link: BaseException | None = error
    while link:
        yield link
        link = link.__cause__ or link.__context__
