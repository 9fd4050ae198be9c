"""`python -m paravt` is the command `paravt`: what torchrun starts in each process (`torchrun -m paravt rl RECIPE`)."""

from paravt.cli import main

if __name__ == "__main__":
    main()
