"""Find out once what every cell on CUDA would otherwise find out itself, such as whether an extension compiles.

python -m qbench.runner.cuda METHOD…    prints the environment variables for the methods' cells as JSON
"""

import functools
import json
import subprocess
import sys

from qbench.quantizers.options import quantizer

TIMEOUT = 600  # seconds: a compilation takes one or two minutes


@functools.cache
def cuda_environment(methods: tuple[str, ...]) -> dict[str, str]:
    """Environment variables for the methods' cells on CUDA, found in a separate process: the driver must not use CUDA.

    Empty if that fails; then each cell finds out itself.
    """
    command = [sys.executable, "-P", "-m", __name__, *methods]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)
        found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}
    return found


def main(methods: list[str]) -> None:
    """Print the environment variables that the methods' quantizers ask for."""
    found: dict[str, str] = {}
    for method in methods:
        if quantizer(method).is_installed:
            found |= quantizer(method).cuda_environment()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
