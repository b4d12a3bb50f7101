"""``python -m shardlib`` is the command ``shardlib``, see shardlib/command/main.py."""

from shardlib.command.main import script

if __name__ == "__main__":
    script()
