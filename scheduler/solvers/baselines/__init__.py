"""Published methods for comparison, one per module, and the tools that they share."""
