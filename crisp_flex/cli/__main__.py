"""`python -m crisp_flex.cli`, the same as the console script."""

import sys

from crisp_flex.cli import main

sys.exit(main())
