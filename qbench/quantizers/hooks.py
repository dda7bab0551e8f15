"""Seeing what modules are called with."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def watched_inputs(
    modules: Mapping[Any, nn.Module], see: Callable[[Any, Tensor], None], first: bool = False
) -> Iterator[None]:
    """Show what each module is called with, by its key; first: before other hooks change it."""

    def hook(key: Any) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda module, arguments: see(key, arguments[0])

    hooks = [module.register_forward_pre_hook(hook(key), prepend=first) for key, module in modules.items()]
    try:
        yield
    finally:
        for added in hooks:
            added.remove()
