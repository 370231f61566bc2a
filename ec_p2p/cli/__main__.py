"""`python -m ec_p2p.cli`: how connectors start a node, whatever is on PATH."""

import sys

from ec_p2p.cli import main

sys.exit(main())
