"""What the tests share: an oracle, error measures and array conversions."""
