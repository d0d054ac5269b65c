"""The command line. `main` is the entry point; typer and rich are loaded only when it runs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

INTERRUPTED = 130
WRONG_USE = 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `onchip` with these arguments (those of the process unless given) and exit.

    The exit status is 0 when all went well, 1 when something failed or is not installed, 2 for a wrong argument and 130
    after an interrupt; every one but 0 comes with a message on standard error.
    """
    if any(importlib.util.find_spec(package) is None for package in ("typer", "rich")):
        sys.exit("onchip: the command line needs typer and rich: pip install 'onchip[cli]'")
    from onchip.cli import app

    sys.exit(app.run(arguments))
