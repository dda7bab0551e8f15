"""What every cell on CUDA would find out for itself, such as whether an extension compiles, is found out once.

python -m qbench.runner.cuda METHOD…    prints the environment variables for the methods' cells, as JSON
"""

import functools
import json
import subprocess
import sys

from qbench.quantizers.options import quantizer

TIMEOUT = 600  # seconds: a compilation takes one or two minutes


@functools.cache
def cuda_environment(methods: tuple[str, ...]) -> dict[str, str]:
    """Environment variables for the methods' cells on CUDA; in a process of its own, since the driver stays off CUDA.

    If that fails, there are none, and each cell finds out for itself.
    """
    command = [sys.executable, "-P", "-m", __name__, *methods]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)
        found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}
    return found


def main(methods: list[str]) -> None:
    """Print what the methods' quantizers say."""
    found: dict[str, str] = {}
    for method in methods:
        if quantizer(method).is_installed:
            found |= quantizer(method).cuda_environment()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
