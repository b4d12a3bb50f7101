"""The comparison of a sharded model with the same model on one device."""
