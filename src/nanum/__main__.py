"""`python -m nanum` is `nanum`."""

from nanum.cli import main

main()
