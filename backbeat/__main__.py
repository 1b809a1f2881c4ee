"""`python -m backbeat`, and so `torchrun … -m backbeat`."""

from backbeat.cli import main

main()
