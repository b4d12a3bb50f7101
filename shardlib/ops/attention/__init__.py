"""Attention whose sequence is split: plans, and what carries them out."""
