"""One recomputed call: its arguments and what it finds besides them, as they were."""
