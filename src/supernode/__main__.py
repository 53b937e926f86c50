"""`python -m supernode` is the command line."""

from supernode.cli.entry import main

main()
