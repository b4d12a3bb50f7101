"""Modules as pure functions of sharded parameters, and the rules for the parameters' layouts."""

from shardlib.modules.as_module import as_module
from shardlib.modules.init import init
from shardlib.modules.parallelize import parallelize

__all__ = ["as_module", "init", "parallelize"]
