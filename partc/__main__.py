"""`python -m partc ...` is the command line."""

from partc.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
