"""`python -m rollmill.cli`."""

from rollmill.cli.app import main

main()
