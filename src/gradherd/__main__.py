"""`python -m gradherd`, and so `torchrun -m gradherd`."""

from gradherd.cli.main import main

if __name__ == "__main__":  # local ranks import this module, too
    main()
