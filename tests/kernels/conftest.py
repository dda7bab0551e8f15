"""Lets the tests here `import cases`: with --import-mode=importlib a test's folder is not on sys.path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
