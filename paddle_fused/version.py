"""The version, in one place; no imports, so that the build can read it without Paddle."""

__version__ = "0.1.0"
