"""Pages of the documentation that are made from the code when the site is built."""
