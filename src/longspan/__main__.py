import sys

from longspan.cli import main

sys.exit(main())
