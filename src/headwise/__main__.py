"""`python -m headwise` is `headwise`."""

from headwise.cli import main

main()
