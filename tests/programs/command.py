"""`python -m penstock`, for a process that has imported it already."""

import os
import sys

from penstock.__main__ import main

sys.path[0] = os.getcwd()
sys.exit(main())
