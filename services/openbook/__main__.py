"""The command `openbook`, and `python -m openbook`, which Ctrl-C ends in silence from its first moment on."""

import sys


def main() -> None:
    """`openbook.cli.main`, which ends so by itself once it runs; what it imports before takes a fifth of a second."""
    try:
        from openbook.cli import main

        main()
    except KeyboardInterrupt:
        sys.exit(130)  # as shells know it


if __name__ == "__main__":
    main()
