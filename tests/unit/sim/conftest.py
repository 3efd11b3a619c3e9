"""Property tests are repeatable, and may be slow on a busy machine."""

from hypothesis import settings

settings.register_profile("pure", deadline=None, derandomize=True)
settings.load_profile("pure")
