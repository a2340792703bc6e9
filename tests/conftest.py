from __future__ import annotations

from hypothesis import settings

from tests.support.examples import ALL

# `pytest --hypothesis-profile dev` is for quick runs, "thorough" for nights.
settings.register_profile("dev", max_examples=ALL // 10, deadline=None, print_blob=True)
settings.register_profile("ci", max_examples=ALL, deadline=None, print_blob=True)
settings.register_profile("thorough", max_examples=20 * ALL, deadline=None, print_blob=True)
settings.load_profile("ci")
