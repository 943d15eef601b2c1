"""The plane's own REST API under /api."""
