"""Solvers, one family per module or folder; `registry` finds them by name."""
