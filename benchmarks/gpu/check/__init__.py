"""Every kernel against the NumPy float64 oracle, by raw pointer: see __main__.py."""
