"""``python -m sekisho.node CONFIG``: started by the supervisor, not by hand."""

import sys

from sekisho.node.process import main

sys.exit(main(sys.argv[1:]))
