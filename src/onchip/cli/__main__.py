"""`python -m onchip.cli` is `onchip`."""

from onchip.cli import main

main()
