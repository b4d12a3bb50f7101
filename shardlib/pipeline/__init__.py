"""Pipelines: layers on different ranks of a mesh axis, run by a table of actions."""
