"""The command ``shardlib``: one file per subcommand, imported when it is called."""
