"""`python -m whet`, which is also what `torchrun -m whet` starts."""

from whet.cli.app import main

if __name__ == "__main__":
    main()
