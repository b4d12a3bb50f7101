"""Proving a sharded model against one device."""
