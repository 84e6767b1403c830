"""`python -m gradherd`, and so `torchrun -m gradherd`."""

from gradherd.cli import main

main()
