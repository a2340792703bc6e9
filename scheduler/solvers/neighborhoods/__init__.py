"""Integer programs over neighborhoods of a schedule, which `auto` runs last."""
