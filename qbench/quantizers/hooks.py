"""Hooks that pass on what modules are called with."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def watched_inputs(
    modules: Mapping[Any, nn.Module],
    see: Callable[[Any, Tensor], None],
    first: bool = False,
    after: Mapping[Any, Sequence[int]] | None = None,
) -> Iterator[None]:
    """Show what each module is called with, by its key.

    first: before other hooks change it, except those in `after`: ids of hooks, by the module's key.
    """

    def hook(key: Any) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda module, arguments: see(key, arguments[0])

    hooks = [module.register_forward_pre_hook(hook(key), prepend=first) for key, module in modules.items()]
    for key, earlier in (after or {}).items():
        for hook_id in reversed(earlier):
            modules[key]._forward_pre_hooks.move_to_end(hook_id, last=False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for added in hooks:
            added.remove()
