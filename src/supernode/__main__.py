"""`python -m supernode` is the command line."""

from supernode.cli.main import main

main()
