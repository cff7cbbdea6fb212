"""`python -m crisp_flex.cli`, the same as the console script."""

import sys

from crisp_flex.cli import main

if __name__ == "__main__":
    sys.exit(main())
