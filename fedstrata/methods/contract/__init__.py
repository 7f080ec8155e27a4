"""The contract between a method and the engines: hooks, what they see, and how parts are put together."""
