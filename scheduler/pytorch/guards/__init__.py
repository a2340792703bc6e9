"""Guards: what Python contributes to a step, watched so that a change is noticed at the next call."""
