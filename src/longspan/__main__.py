import sys

try:
    from longspan.cli import main
except KeyboardInterrupt:  # a rank that is told to stop while it starts
    sys.exit("longspan: interrupted")

sys.exit(main())
