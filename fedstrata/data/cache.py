"""Where data that was fetched on request is kept, beside what else is in the cache."""

from fedstrata.caching import cache_directory

__all__ = ["cache_directory"]
