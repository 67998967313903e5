"""Questions that are answered with a search engine."""
