"""`python -m tf_dgc` is the command line `tf-dgc`."""

import sys

from tf_dgc.cli.main import main

sys.exit(main())
