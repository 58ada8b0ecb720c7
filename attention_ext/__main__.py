"""``python -m attention_ext``: the command line, see `attention_ext.cli`."""

import sys

from attention_ext.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
