"""``python -m shardlib`` is the command ``shardlib``, see shardlib/command/main.py."""

from shardlib.command.main import main

if __name__ == "__main__":
    raise SystemExit(main())
