"""``python -m vpool``."""

import sys

from vpool.commands import main

sys.exit(main())
