"""`python -m rollmill.runtime.tether COMMAND...`: becomes the command, and dies with the process that started it.

For commands that know nothing of a parent. Imports little, because every start waits for it.
"""

from __future__ import annotations

import os
import sys

from rollmill.runtime.parent import die_with_parent


def main(command: list[str]) -> None:
    """Become the command; the kernel's promise to kill it with its parent outlives the change."""
    die_with_parent()
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
