"""YAML read with limits: with aliases (&, *) and brackets, a file of a few bytes can fill the memory or never end."""

from collections.abc import Iterator
from typing import IO

import yaml

MAX_BYTES = 10_000_000
MAX_NODES = 100_000  # with what aliases stand for; the largest recipe of ours has 150
MAX_DEPTH = 64  # lists and mappings within each other, as in JSON files


class TooLargeError(yaml.MarkedYAMLError):
    """A file that exceeds a limit, as a sentence in `problem`."""


class LimitedLoader(yaml.SafeLoader):
    """Python's loader: libyaml's ends the process if brackets are nested deeply."""

    def __init__(self, stream: IO[bytes]) -> None:
        """Read this stream."""
        super().__init__(read_limited(stream))
        self.name: str = getattr(stream, "name", "a stream")  # for errors

    def get_single_node(self) -> yaml.Node | None:
        """The content before it becomes values."""
        try:
            node = super().get_single_node()
            if node is not None:
                _check_size(node)
        except RecursionError:
            raise _too_deep() from None
        return node


def read_limited(stream: IO[bytes]) -> str:
    """The text of a stream, which may be a pipe or a device without a size."""
    content = stream.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise TooLargeError(problem=f"it has more than {MAX_BYTES:,} bytes")
    return content.decode("utf-8-sig")


def each_node(root: yaml.Node) -> Iterator[yaml.Node]:
    """Every node once, however many aliases it has."""
    waiting, seen = [root], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            waiting += reversed(_children(node))


def _check_size(root: yaml.Node) -> None:
    sizes: dict[int, tuple[int, int]] = {}  # by node: values and levels, with what aliases in it stand for
    unfinished = (0, 0)

    def size(node: yaml.Node) -> tuple[int, int]:
        if id(node) not in sizes:
            sizes[id(node)] = unfinished
            inner = [size(child) for child in _children(node)]
            sizes[id(node)] = (
                1 + sum(values for values, _ in inner),
                1 + max((levels for _, levels in inner), default=0),
            )
        elif sizes[id(node)] == unfinished:
            raise TooLargeError(problem="this part contains itself (&, *)", problem_mark=node.start_mark)
        return sizes[id(node)]

    values, levels = size(root)
    if values > MAX_NODES:
        raise TooLargeError(problem=f"with its aliases (*) it has {values:,} values, more than {MAX_NODES:,}")
    if levels > MAX_DEPTH:
        raise _too_deep()


def _too_deep() -> TooLargeError:
    return TooLargeError(problem=f"it is nested too deeply, more than {MAX_DEPTH} levels")


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []
